"""The training loop: batches in, a run directory out.

A run directory holds `config.yaml`, `log.jsonl`, `metrics.json`, TensorBoard events, `checkpoints/step_*`, `model/`
(the final model in `save_pretrained` form), `predictions_*.json` and `report.html`; with `train.keep_best` also `best/`
(the best model, see `e2e_vl/run/best.py`).

`Trainer.train_step` is one optimiser step, `Trainer.run` the loop around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import Tensor
from tqdm.auto import tqdm

from detector.errors import UserError
from detector.io import atomic_files, atomic_folder, read_json, remove_leftovers, write_json
from e2e_vl.config import RunConfig, save_config
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler
from e2e_vl.io import RunLog, without_nan
from e2e_vl.run import checkpoint as checkpoints
from e2e_vl.run.best import BestModel
from e2e_vl.run.build import Run, build_eval_data, build_run, resolve
from e2e_vl.run.evaluate import evaluate_splits
from e2e_vl.run.guards import (
    FiniteCheck,
    StopSignals,
    check_batch_size,
    check_disk_space,
    check_images,
    run_lock,
    stopped_by,
)
from e2e_vl.run.launch import make_accelerator, on_main
from e2e_vl.run.optim import LossesOnly, build_optimizer, build_schedule, loss_weights
from e2e_vl.run.trackers import (
    check_trackers,
    end_text,
    finished_text,
    installed_trackers,
    parameter_counts,
    start_text,
    start_trackers,
    track_pictures,
    without_constants,
)
from e2e_vl.structures import Batch


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train as the config says; `config.output` becomes the run directory.

    With `resume`, training continues from the newest complete checkpoint there, exactly as if the run had not stopped;
    a finished run is left as it is. SIGTERM, SIGHUP and Ctrl-C end a run after its current step and a checkpoint. An
    error on one of several processes ends that process, and the launcher ends the others.

    Returns:
        What `metrics.json` holds.

    Raises:
        UserError, OSError: settings, data or a checkpoint that do not fit, or a full disk, in one sentence.
        FloatingPointError: losses or gradients that are NaN or infinite.
        StoppedRunError: a signal stopped the run.
    """
    started = time.perf_counter()
    output = Path(config.output)
    accelerator = make_accelerator(
        config.train.mixed_precision,
        log_with=[name for name in config.train.trackers if name in installed_trackers()] or None,
        project_config=ProjectConfiguration(str(output), logging_dir=str(output / "tensorboard")),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        max_wait_minutes=config.train.max_wait_minutes,
    )
    is_main = accelerator.is_main_process
    config = resolve(config)
    with contextlib.ExitStack() as lock:

        def prepare_output() -> Path | None:
            """Check what needs no data or model, and take the run directory; returns the checkpoint to resume."""
            check_batch_size(config, accelerator.num_processes)
            check_trackers(config.train.trackers)
            checkpoint = checkpoints.find_resumable(output, config, accelerator.num_processes) if resume else None
            if checkpoint is None:
                checkpoints.refuse_to_overwrite(output)
            lock.enter_context(run_lock(output))
            for folder in (output, output / "checkpoints"):
                remove_leftovers(folder)
            if checkpoint is None:
                save_config(config, output / "config.yaml")
            return checkpoint

        checkpoint = on_main(accelerator, prepare_output)
        set_seed(config.seed)  # the same on all processes, so that all start from the same weights
        with accelerator.main_process_first():
            run = build_run(config, writes=is_main)
            build_eval_data(config, run)
        if checkpoint is None:
            on_main(accelerator, lambda: check_images(config, run))
        else:
            checkpoints.check_lists(checkpoint, run.model, run.tokenizer)
        on_main(accelerator, lambda: check_disk_space(config, run, len(checkpoints.complete_checkpoints(output))))
        trainer = Trainer(config, accelerator, run, checkpoint)
        finished = trainer.finished_metrics()
        if finished is not None:
            if is_main:
                print(finished_text(output, trainer.step), flush=True)
            accelerator.end_training()
            return finished
        try:
            return trainer.run(started)
        except torch.OutOfMemoryError as error:
            error.add_note("Raise train.accumulate, lower data.texts_per_image, or set train.activation_checkpointing.")
            raise


class Trainer:
    """One run in progress: its position and everything that changes with it.

    Attributes:
        step: optimiser steps that are done.
        images_seen: in these steps, over all processes.
        loss_sums: sum and number of each logged value since the last line of the log.
        seconds_training: without evaluations and checkpoints.
    """

    POSITION = ("step", "images_seen", "loss_sums", "seconds_training")  # attributes that a checkpoint keeps

    def __init__(self, config: RunConfig, accelerator: Accelerator, run: Run, checkpoint: Path | None):
        settings = config.train
        self.config, self.accelerator, self.built, self.checkpoint = config, accelerator, run, checkpoint
        self.output = Path(config.output)
        self.stop = StopSignals()
        self.sampler = GroupedBatchSampler(
            run.train_data.groups,
            images_per_batch=settings.images_per_batch // settings.accumulate,
            accumulate=settings.accumulate,
            texts_per_image=config.data.texts_per_image,
            seed=config.seed,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )
        self.steps_per_epoch = self.sampler.batches_per_epoch // settings.accumulate
        optimizer = build_optimizer(run.model, settings, on_cpu=accelerator.device.type == "cpu")
        if settings.activation_checkpointing:
            run.model.recompute_activations()
        if settings.channels_last:
            run.model.detector.to(memory_format=torch.channels_last)
        self.model, self.optimizer = accelerator.prepare(LossesOnly(run.model), optimizer)
        self.check_finite = FiniteCheck(scaled=accelerator.scaler is not None)
        # what evaluations during training look at; None: all images, as the last one
        limit = config.eval.max_images
        looks_at_all = limit is None or all(len(one.groups) <= limit for one in run.eval_data.values())
        self.eval_images = None if looks_at_all else limit
        self.best = BestModel(self.output / "best", settings.keep_best, settings.patience)
        if settings.keep_best is not None:  # a wrong name is found before training, and before the generators are set
            self.best.check_name(evaluate_splits(config, run, accelerator, max_images=config.eval.images_per_batch))
        # After the weights: processes draw different dropout masks and RoI samples, but reproducibly.
        set_seed(config.seed, device_specific=True)
        self.step = self.images_seen = 0
        self.seconds_training = 0.0
        self.loss_sums: dict[str, tuple[float, int]] = {}
        self.saved_step = 0  # of the newest checkpoint
        self.ahead = 0  # steps of today's size to the place in the data, less the steps that were made
        if checkpoint is not None:
            saved = checkpoints.load_state(accelerator, optimizer, checkpoint)
            vars(self).update({name: saved[name] for name in self.POSITION})
            self.saved_step = self.step
            self.ahead = steps_to(saved["place"], self.sampler) - self.step
            self.best.load_state_dict(saved["best"])
        self.total_steps = settings.max_steps or math.ceil(settings.epochs * self.steps_per_epoch) - self.ahead
        self.schedule = build_schedule(optimizer, settings, self.total_steps, steps_done=self.step)

    def finished_metrics(self) -> dict[str, Any] | None:
        """`metrics.json` of a resumed run that has ended and written everything; None if something is left to do."""
        path, patience = self.output / "metrics.json", self.config.train.patience
        if self.checkpoint is None or not path.is_file() or not (self.output / "report.html").is_file():
            return None
        metrics = read_json(path)
        has_waited = patience is not None and metrics.get("stopped_early", 0) >= patience
        is_over = self.step >= self.total_steps or has_waited
        return metrics if metrics.get("steps") == self.step and is_over else None

    def run(self, started: float) -> dict[str, Any]:
        """Train until the last step, or until no better model comes; then evaluate, save and report."""
        settings, is_main = self.config.train, self.accelerator.is_main_process
        if is_main:
            save_config(self.config, self.output / "config.yaml")
            with atomic_files(self.output / "tokenizer", "tokenizer_config.json") as part:
                self.built.tokenizer.save_pretrained(part)
            print(start_text(self.config, self.built, self.accelerator, self.step, self.total_steps), flush=True)
        resume_step = self.step if self.checkpoint is not None else None
        self.log = RunLog(self.output / "log.jsonl", enabled=is_main, resume_step=resume_step)
        start_trackers(self.accelerator, self.config)
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            desc="training",
            unit="step",
            delay=1,  # seconds; a shorter one would only flash up
            disable=not self.accelerator.is_local_main_process,
        )
        with self.stop, bar:  # the bar is closed on errors too, so that their message starts a line
            if 0 < self.step < self.total_steps and self.is_due(self.config.eval.every_epochs):
                self.evaluate(self.eval_images)  # as the run did after the checkpoint
            since = time.perf_counter()
            for micro_batches in self.batches():
                values, signal_number = self.train_step(micro_batches)
                self.step += 1
                self.images_seen += settings.images_per_batch
                bar.update()
                self.log_training(values, bar)
                self.seconds_training += time.perf_counter() - since
                if signal_number:
                    self.save()
                    self.accelerator.end_training()
                    raise stopped_by(signal_number, f"--resume continues from step {self.step}.")
                if self.step == self.total_steps:
                    break
                # before evaluating: whatever happens there, nothing is lost
                if self.is_due(settings.save_every_epochs):
                    self.save()
                if self.is_due(self.config.eval.every_epochs):
                    self.evaluate(self.eval_images)
                since = time.perf_counter()
            self.save()
            if self.best.metric is not None and self.best.judged_step != self.step and self.eval_images:
                self.evaluate(self.eval_images)  # on the images that the earlier models were judged by
            metrics = self.evaluate(None, final=True)
        return self.finish(metrics, started)

    def batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each optimiser step still to be done, across epochs."""
        accumulate = self.config.train.accumulate
        loader = BatchLoader(
            self.built.train_data,
            self.sampler,
            self.built.collate,
            workers=self.config.data.workers,
            keep_workers=True,
        )
        while self.step < self.total_steps and not self.best.is_over:
            epoch, done = divmod(self.step + self.ahead, self.steps_per_epoch)
            self.sampler.set_epoch(epoch, start_batch=done * accumulate)
            micro_batches: list[Batch] = []
            for batch in loader:
                micro_batches.append(batch)
                if len(micro_batches) == accumulate:
                    yield micro_batches
                    micro_batches = []
                    if self.step >= self.total_steps or self.best.is_over:
                        return

    def train_step(self, micro_batches: list[Batch]) -> tuple[dict[str, float], int]:
        """One optimiser step.

        Returns:
            The losses, the weighted sum `loss` that was minimised, the gradient norm and the learning rates; and the
            number of a signal that came to any process, or 0.
        """
        accelerator, settings = self.accelerator, self.config.train
        self.model.train()
        logged: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches, start=1):
            # processes exchange gradients in the last backward pass of the step only
            is_last = number == len(micro_batches)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.model):
                task_losses, detection_losses = self.model(batch.to(accelerator.device))
                losses = dict(sorted({**task_losses, **detection_losses}.items()))
                weights = loss_weights(self.config, task_losses, detection_losses)
                # the mean of a loss is over its items on all processes
                own = [torch.stack([one.total.detach().float(), one.count.float()]) for one in losses.values()]
                totals, counts = accelerator.reduce(torch.stack(own), reduction="sum").unbind(dim=1)
                loss = torch.zeros((), device=accelerator.device)
                for (name, one), total, count in zip(losses.items(), totals, counts, strict=True):
                    divisor = count.clamp(min=1) * len(micro_batches)
                    # DDP averages gradients over processes, hence the factor
                    loss = loss + weights[name] * one.total * accelerator.num_processes / divisor
                    logged[name] = logged.get(name, 0) + total / divisor
                    logged["loss"] = logged.get("loss", 0) + weights[name] * total / divisor
                accelerator.backward(loss)
        limit = math.inf if settings.clip_norm is None else settings.clip_norm
        logged["grad_norm"] = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        stop = torch.full((1,), float(self.stop.number or 0), device=accelerator.device)
        logged["stop"] = accelerator.gather(stop).max()
        # the host waits for the device once, here, so that an update is never made with numbers that are not finite
        numbers = torch.stack([value.float() for value in logged.values()]).tolist()
        values = dict(zip(logged, numbers, strict=True))
        signal_number = int(values.pop("stop"))
        is_finite = self.check_finite(values, self.step + 1, micro_batches)
        self.optimizer.step()  # in fp16 the scaler skips it if gradients overflowed
        self.optimizer.zero_grad(set_to_none=True)
        if not is_finite:
            del values["grad_norm"]
        if accelerator.scaler is not None:
            values["skipped_steps"] = float(not is_finite)
        values |= {f"lr_{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        self.schedule.step()
        return values, signal_number

    def is_due(self, every_epochs: float) -> bool:
        return every_epochs > 0 and (self.step + self.ahead) % max(round(every_epochs * self.steps_per_epoch), 1) == 0

    def log_training(self, values: dict[str, float], bar: tqdm) -> None:
        """Write the averages since the last line, and the rates of the last step, every `log_every` steps."""
        for name, value in values.items():
            total, number = self.loss_sums.get(name, (0.0, 0))
            self.loss_sums[name] = total + value, number + 1
        if self.step % self.config.train.log_every and self.step != self.total_steps:
            return
        means = {name: total / number for name, (total, number) in self.loss_sums.items()}
        means |= {name: value for name, value in values.items() if name.startswith("lr_")}
        self.loss_sums = {}
        self.log.write(self.step, "train", {"epoch": (self.step + self.ahead) / self.steps_per_epoch, **means})
        self.track({f"train/{name}": value for name, value in means.items()})
        bar.set_postfix({"loss": f"{means['loss']:.3f}"}, refresh=False)

    def track(self, values: Mapping[str, float | None]) -> None:
        self.accelerator.log(without_constants(self.config, values), step=self.step)

    def evaluate(self, max_images: int | None, *, final: bool = False) -> dict[str, Any]:
        """Evaluate the model as it is, log the metrics, and keep it if it is the best so far.

        Args:
            max_images: most images of each split; None = all.
            final: predictions are written, too.
        """
        self.stop.at_once = self.saved_step == self.step
        metrics = evaluate_splits(
            self.config,
            self.built,
            self.accelerator,
            max_images=max_images,
            output=self.output if final else None,
            show=lambda records, name: track_pictures(
                self.accelerator, self.built.model.task, records, name, self.step
            ),
        )
        self.stop.at_once = False
        is_comparable = max_images == self.eval_images  # only evaluations of the same images are
        self.log.write(self.step, "eval" if is_comparable else "final", metrics)
        if is_comparable:
            self.track(metrics)
            if self.best.judge(self.step, metrics) and self.accelerator.is_main_process:
                self.best.write(lambda folder: checkpoints.save_model(folder, *self.parts))
        return metrics

    def save(self) -> None:
        """Save a checkpoint of this step, unless there is one; a resumed run does what follows it, evaluation too."""
        if self.saved_step == self.step:
            return
        folder = self.output / "checkpoints" / f"step_{self.step:08d}"
        position = {name: getattr(self, name) for name in self.POSITION}
        position |= {"place": place_after(self.step + self.ahead, self.sampler), "best": self.best.state_dict()}
        keep = self.config.train.keep_checkpoints
        checkpoints.save_state(self.accelerator, folder, *self.parts, position=position, keep=keep)
        self.saved_step = self.step

    @property
    def parts(self) -> tuple:
        """What `save_model` writes."""
        return self.config, self.built.model, self.built.tokenizer

    def finish(self, metrics: dict[str, Any], started: float) -> dict[str, Any]:
        """Write the model, the metrics and the report of the whole run."""
        model, best, is_main = self.built.model, self.best, self.accelerator.is_main_process
        summary = {
            **metrics,
            "steps": self.step,
            "seconds": time.perf_counter() - started,
            "seconds_training": self.seconds_training,
            "images_per_second": self.images_seen / max(self.seconds_training, 1e-9),
            "processes": self.accelerator.num_processes,
            "parameters": parameter_counts(model),
        }
        self.accelerator.wait_for_everyone()  # the main process may still be writing the best model
        if best.found is not None and best.folder.is_dir():
            images = best.judged_images(self.built.eval_data, self.eval_images)
            summary["best"] = {**read_json(best.folder / "best.json"), "images": images}
            if summary["best"]["step"] != self.step:  # all images, by the best model
                _, best_model, _ = checkpoints.load_model(best.folder)
                built = dataclasses.replace(self.built, model=best_model.to(self.accelerator.device))
                summary["best"]["metrics"] = evaluate_splits(self.config, built, self.accelerator)
        if best.is_over and self.step < self.total_steps:
            summary["stopped_early"] = best.waited
        if is_main:
            with atomic_folder(self.output / "model") as folder:
                checkpoints.save_model(folder, *self.parts)
            write_json(self.output / "metrics.json", without_nan(summary))
            from e2e_vl.run.report import write_report  # late: matplotlib takes seconds

            report = write_report(self.output, self.config, model.task)
            print(end_text(summary, self.output, report), flush=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return summary


# Where a run is in its data, counted in images, so that a resumed run may have batches of another size.


def place_after(steps: int, sampler: GroupedBatchSampler) -> dict[str, Any]:
    """The place in the data after `steps` steps of the sampler's size, as a checkpoint keeps it."""
    epoch, done = divmod(steps, sampler.batches_per_epoch // sampler.accumulate)
    per_step = sampler.images_per_batch * sampler.accumulate
    return {"epoch": epoch, "images": done * per_step, "images_per_step": per_step, "order": _order(sampler)}


def steps_to(place: Mapping[str, Any], sampler: GroupedBatchSampler) -> int:
    """The number of steps of the sampler's size that lead to a place which `place_after` gave.

    Raises:
        UserError: no number of whole steps does, or images come in another order now.
    """
    per_step, images = sampler.images_per_batch * sampler.accumulate, place["images"]
    if images and place["order"] != _order(sampler):
        changed = ", ".join(name for name, value in _order(sampler).items() if place["order"].get(name) != value)
        raise UserError(
            f"Cannot resume inside of epoch {place['epoch'] + 1}, after {images} of its images: they would come in "
            f"another order now ({changed} differ), and some would be repeated or left out; resume with the earlier "
            "settings."
        )
    if images % per_step:
        raise UserError(
            f"Cannot resume with train.images_per_batch={per_step}: the checkpoint lies after {images} images of epoch "
            f"{place['epoch'] + 1}, which is no whole number of batches, so images would be repeated or left out; "
            f"choose a divisor of {images}, such as the earlier {place['images_per_step']}."
        )
    return place["epoch"] * (sampler.batches_per_epoch // sampler.accumulate) + images // per_step


def _order(sampler: GroupedBatchSampler) -> dict[str, Any]:
    """What decides in which order images come."""
    return {
        "data.texts_per_image": sampler.texts_per_image,
        "seed": sampler.seed,
        "number of images": sampler.num_groups,
    }
