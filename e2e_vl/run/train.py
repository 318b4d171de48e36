"""The training loop: batches in, a run directory out.

A run directory holds `config.yaml`, `log.jsonl`, `metrics.json`, TensorBoard events, `checkpoints/step_*`, `model/`
(the final model in `save_pretrained` form), `predictions_*.json` and `report.html`; with `train.keep_best` also `best/`
(the best model, see `e2e_vl/run/best.py`). Where a step's numbers were NaN, `failed_step/` has what is known of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, gather_object, set_seed
from torch import Tensor
from tqdm.auto import tqdm

from detector.errors import UserError
from detector.io import atomic_files, atomic_folder, remove_leftovers, write_json
from e2e_vl.cli.common import StoppedRunError
from e2e_vl.config import RunConfig, save_config
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler
from e2e_vl.io import RunLog, without_nan
from e2e_vl.run import checkpoint as checkpoints
from e2e_vl.run import checkpoint as saving
from e2e_vl.run import failed_step
from e2e_vl.run import optim as gradients
from e2e_vl.run.agreement import Agreement
from e2e_vl.run.best import BestModel
from e2e_vl.run.build import Run, build_eval_data, build_run
from e2e_vl.run.default_settings import part_defaults
from e2e_vl.run.evaluate import EvaluationStoppedError, evaluate_splits
from e2e_vl.run.gradient_exchange import GradientExchange
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.optim import build_optimizer, build_schedule, total_loss
from e2e_vl.run.preflight import Preflight, look_ahead
from e2e_vl.run.run_lock import RunLock
from e2e_vl.run.step_memory import MemoryGuard, StepStart, StepUndoneError
from e2e_vl.run.stopping import StopRequest, all_or_none, exit_status, faults_as_sentences, let_workers_die
from e2e_vl.run.trackers import (
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

# How the processes of a run begin together, and take its run directory.


def look_ahead_together(
    config: RunConfig, accelerator: Accelerator, held: contextlib.ExitStack, *, resume: bool
) -> Preflight:
    """`look_ahead` on all processes, of which the main one raises what any of them found; the others leave silently.

    Args:
        held: holds the run directory from here on. Nothing is written into it before the last check.
    """
    known, findings, output, is_main = None, None, Path(config.output), accelerator.is_main_process
    with accelerator.main_process_first():
        try:
            if is_main and output.is_dir():
                held.enter_context(RunLock(output))
            known = look_ahead(config, accelerator.num_processes, resume=resume, looks_at_output=is_main)
            if is_main:
                _take_output(known, held)
        except (ValueError, OSError) as error:
            findings = str(error)
    found = next(filter(None, gather_object([findings])), None)
    if found is None:
        known.resume_from = gather_object([known.resume_from])[0]
        return known
    if is_main:
        raise UserError(found)
    raise SystemExit(2)


def _take_output(known: Preflight, held: contextlib.ExitStack) -> None:
    """Make the run directory and write the settings of a new run, by which it is known as one."""
    output = Path(known.config.output)
    if not output.is_dir():
        held.enter_context(RunLock(output))
        checkpoints.refuse_to_overwrite(output)  # another run may have been quicker
    for folder in (output, output / "checkpoints"):
        remove_leftovers(folder)
    if known.resume_from is None:
        save_config(known.config, output / "config.yaml")


def build_sampler(config: RunConfig, run: Run, accelerator: Accelerator) -> GroupedBatchSampler:
    """Deals the images of the training split to micro-batches and processes."""
    settings = config.train
    return GroupedBatchSampler(
        run.train_data.groups,
        images_per_batch=settings.images_per_batch // settings.accumulate,
        accumulate=settings.accumulate,
        texts_per_image=config.data.texts_per_image,
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )


# Where a run is in its data, counted in images, so that a resumed run may have batches of another size.


def place_after(steps: int, sampler: GroupedBatchSampler) -> dict[str, Any]:
    """The place in the data after `steps` steps of the sampler's size, as a checkpoint keeps it."""
    per_step = _images_per_step(sampler)
    epoch, done = divmod(steps, _steps_per_epoch(sampler))
    return {"epoch": epoch, "images": done * per_step, "images_per_step": per_step, "order": _order(sampler)}


def steps_to(place: Mapping[str, Any], sampler: GroupedBatchSampler) -> int:
    """The number of steps of the sampler's size that lead to a place which `place_after` gave.

    Raises:
        ValueError: no number of whole steps does, or images come in another order now.
    """
    per_step, images = _images_per_step(sampler), place["images"]
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
    return place["epoch"] * _steps_per_epoch(sampler) + images // per_step


def check_same_size(saved: RunConfig, settings: RunConfig) -> None:
    """A checkpoint of an earlier version does not know its place in images.

    Raises:
        ValueError: the batches have another size now.
    """
    if saved.train.images_per_batch != settings.train.images_per_batch:
        raise UserError(
            f"Cannot resume with train.images_per_batch={settings.train.images_per_batch}: the checkpoint is of an "
            f"earlier version of this project, which saved no place in the data; resume with the earlier "
            f"{saved.train.images_per_batch}."
        )


def _images_per_step(sampler: GroupedBatchSampler) -> int:
    return sampler.images_per_batch * sampler.accumulate


def _steps_per_epoch(sampler: GroupedBatchSampler) -> int:
    return sampler.batches_per_epoch // sampler.accumulate


def _order(sampler: GroupedBatchSampler) -> dict[str, Any]:
    """What decides in which order images come."""
    return {
        "data.texts_per_image": sampler.texts_per_image,
        "seed": sampler.seed,
        "number of images": sampler.num_groups,
    }


# attributes of a run that a checkpoint keeps
POSITION = ("step", "steps_summed", "loss_sums", "seconds_training", "images_seen")


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train as the config says; `config.output` becomes the run directory.

    With `resume`, training continues from the newest whole checkpoint there, exactly as if the run had not stopped; a
    finished run is left as it is. SIGTERM, SIGHUP and Ctrl-C end a run after its current step and a checkpoint.

    Returns:
        What `metrics.json` holds.

    Raises:
        ValueError, OSError, FloatingPointError, MemoryError: settings, data or a checkpoint that do not fit, a full
            disk, losses or gradients that are not finite, or too little memory, in one sentence.
        StoppedRunError: the run was asked to stop.
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
    where = "Nothing that was saved is lost; --resume continues from the newest checkpoint."
    with StopRequest() as stop, contextlib.ExitStack() as held, faults_as_sentences(accelerator, where):
        known = look_ahead_together(config, accelerator, held, resume=resume)
        config, resume_from = known.config, known.resume_from
        set_seed(config.seed)  # the same on all processes, so that all start from the same weights
        with accelerator.main_process_first():
            run = build_run(config, known.datasets, known.shared, writes=accelerator.is_main_process)
            if resume_from is not None:
                checkpoints.check_lists(resume_from, run.model, run.tokenizer)
            # settings that do not fit are found before training, not after it
            build_eval_data(config, run, known.datasets, known.shared)
        del known  # the data sets keep what they need of the files
        training = _Training(config, accelerator, run, resume_from)
        training.stop = stop
        finished = training.finished_metrics()
        if finished is None:
            return training.run(started)
        if accelerator.is_main_process:
            print(finished_text(output, training.step), flush=True)
        accelerator.end_training()
        return finished


class _Training:
    """One run in progress: its position (epoch, batch, step) and everything that changes with it."""

    def __init__(self, config: RunConfig, accelerator: Accelerator, run: Run, resume_from: Path | None):
        self.config, self.accelerator, self.built, self.resume_from = config, accelerator, run, resume_from
        self.stop = StopRequest()
        settings = config.train
        self.agreement = Agreement(accelerator, settings.max_wait_minutes)
        self.output = Path(config.output)
        self.sampler = build_sampler(config, run, accelerator)
        self.steps_per_epoch = len(self.sampler) // settings.accumulate
        optimizer = build_optimizer(run.model, settings, on_cpu=accelerator.device.type == "cpu")
        if settings.activation_checkpointing:
            run.model.recompute_activations()
        if settings.channels_last:
            run.model.detector.to(memory_format=torch.channels_last)
        self.model, self.optimizer = accelerator.prepare(gradients.LossesOnly(run.model), optimizer)
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
        self.saved_step = 0  # of the newest checkpoint
        self.ahead = 0  # steps of today's size to the place in the data, less the steps that were made
        self.start = StepStart(run.model, accelerator.device)
        self.memory = MemoryGuard(accelerator, self.agreement, run.model)
        self.exchange = GradientExchange(self.model)
        self.check = gradients.NumberCheck(scaled=accelerator.scaler is not None)
        self.seconds_training = 0.0
        self.steps_summed, self.loss_sums = 0, {}  # since the last logged step
        self.rates: dict[str, float] = {}  # learning rates of the last step
        if resume_from:
            self._go_on(optimizer, resume_from)
        self.total_steps = settings.max_steps or math.ceil(settings.epochs * self.steps_per_epoch) - self.ahead
        self.schedule = build_schedule(optimizer, settings, self.total_steps, steps_done=self.step)

    def _go_on(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Take weights, optimiser, random states and position from a checkpoint."""
        saved = checkpoints.load_state(self.accelerator, optimizer, folder)
        vars(self).update({name: saved[name] for name in POSITION if name in saved})
        self.saved_step = self.step
        if "place" in saved:
            self.ahead = steps_to(saved["place"], self.sampler) - self.step
        else:  # of an earlier version
            check_same_size(saving.saved_settings(folder), self.config)
            self.images_seen = self.step * self.config.train.images_per_batch
        self.best.prepare(saved.get("best", {}), folder)

    def _begin(self) -> None:
        """Write what a run directory has from the start."""
        if self.resume_from is not None:
            self.best.go_on(is_writer=self.accelerator.is_main_process)
        if self.accelerator.is_main_process:
            save_config(self.config, self.output / "config.yaml")
            with atomic_files(self.output / "tokenizer", "tokenizer_config.json") as part:
                self.built.tokenizer.save_pretrained(part)
            print(start_text(self.config, self.built, self.accelerator, self.step, self.total_steps), flush=True)
        self.log = RunLog(
            self.output / "log.jsonl",
            enabled=self.accelerator.is_main_process,
            resume_step=self.step if self.resume_from else None,
        )
        start_trackers(self.accelerator, self.config)

    def finished_metrics(self) -> dict[str, Any] | None:
        """What a run that goes on has written at its end, if these settings leave nothing to do; else None."""
        if not self.resume_from:
            return None
        return checkpoints.finished_metrics(self.output, self.step, is_over=self.is_over, patience=self.best.patience)

    @property
    def is_over(self) -> bool:
        """No step is left to be done."""
        return self.step >= self.total_steps or self.best.is_over

    def run(self, started: float) -> dict[str, Any]:
        self._begin()
        self.stop.at_once = False
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            desc="training",
            unit="step",
            delay=1,  # seconds; a shorter one would only flash up
            disable=not self.accelerator.is_local_main_process,
        )
        with bar:  # closed on errors too, so that their message starts a line
            if 0 < self.step < self.total_steps:
                self._evaluate_if_due()  # as the run did after the checkpoint
            since = time.perf_counter()
            for micro_batches in self._steps():
                values = self._step(micro_batches)
                stopped = int(values.pop("stop", self.stop.number or 0))  # as all processes know it
                self.step += 1
                self.images_seen += self.config.train.images_per_batch
                bar.update()
                self._log_training(values, bar)
                self.seconds_training += time.perf_counter() - since
                if stopped:
                    self._stop(stopped)
                if self.step == self.total_steps:
                    break
                # before evaluating: whatever happens there, nothing is lost
                if self._is_due(self.config.train.save_every_epochs):
                    self._save()
                self._evaluate_if_due()
                since = time.perf_counter()
        self._save()
        if self.best.metric is not None and self.best.judged_step != self.step and self.eval_images:
            self._evaluate(self.eval_images)  # on the images that the earlier models were judged by
        metrics = self._evaluate(None, final=True)
        self.stop.at_once = True
        return self._finish(metrics, started)

    def _evaluate_if_due(self) -> None:
        if self._is_due(self.config.eval.every_epochs):
            self._evaluate(self.eval_images)

    def _stop(self, number: int) -> None:
        """Save and leave, because a signal asked for it; called on every process."""
        self._save()
        self.accelerator.end_training()
        name = signal.Signals(number).name
        sentence = f"stopped by {name} after step {self.step}. {checkpoints.newest_in_words(self.output)}"
        raise StoppedRunError(sentence if self.accelerator.is_main_process else "", exit_status(number))

    def _steps(self) -> Iterator[list[Batch]]:
        """Micro-batches of each optimiser step still to be done, across epochs."""
        accumulate = self.config.train.accumulate
        per_epoch = self.steps_per_epoch
        if self.is_over:
            return
        loader = BatchLoader(
            self.built.train_data,
            self.sampler,
            self.built.collate,
            workers=self.config.data.workers,
            keep_workers=True,
        )
        while True:
            epoch, done = divmod(self.step + self.ahead, per_epoch)
            self.sampler.set_epoch(epoch, start_batch=done * accumulate)
            micro_batches: list[Batch] = []
            for batch in self._saving_on_faults(loader):
                micro_batches.append(batch)
                if len(micro_batches) == accumulate:
                    self._leave_on_faults(failed=False)
                    yield micro_batches
                    micro_batches = []
                    if self.is_over:
                        return
                    if (self.step + self.ahead) % per_epoch == 0:
                        break

    def _saving_on_faults(self, loader: BatchLoader) -> Iterator[Batch]:
        """The batches; where one cannot be had, all processes save what they have before they give up."""
        batches = iter(loader)
        while True:
            try:
                batch = next(batches, None)
            except Exception:  # also a mistake in a data set of one's own, which keeps its traceback
                self._leave_on_faults(failed=True)
                raise
            if batch is None:
                return
            if self.config.data.workers:
                let_workers_die()
            yield batch

    def _leave_on_faults(self, *, failed: bool) -> None:
        """Before each step, on every process: if one cannot get its batches, all save and leave, and it says why."""
        standing = self.agreement.reach(failed=failed, signal=self.stop.number)
        if standing.first_failed is None:
            return
        self._save()
        if standing.signal:  # it also came to the workers
            self._stop(standing.signal)
        if standing.first_failed != self.accelerator.process_index:
            raise SystemExit(2)

    def _step(self, micro_batches: list[Batch]) -> dict[str, float]:
        """`_update`; where a process has too little memory for it, all save the last step and leave."""
        try:
            return self._update(micro_batches)
        except StepUndoneError as undone:
            error = undone.error
        # here the step itself holds no memory any more
        self.start.put_back()
        self.optimizer.zero_grad(set_to_none=True)
        self._save()
        raise SystemExit(2) if error is None else error

    def _update(self, micro_batches: list[Batch]) -> dict[str, float]:
        """One optimiser step; returns the (weighted) losses that were minimised and the gradient norm.

        The host waits for the device once, between gradients and update, so that what is not finite is never applied.

        Raises:
            ValueError: a loss or a gradient is NaN or infinite; `failed_step/` has the batches.
        """
        self.model.train()
        self.start.take()
        logged: dict[str, Tensor] = {}
        own: list[dict[str, Tensor]] = []  # losses of each micro-batch of this process
        try:
            for number, batch in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                    self._learn(batch, logged, own, len(micro_batches))
            if self.memory.error is not None:
                self.exchange.finish()
            self.memory.agree()
        except FloatingPointError as error:  # of the detector
            self._refuse([str(error).partition(" are ")[0]], micro_batches, own, alone=True)
        logged[gradients.NORM] = gradients.clip(
            self.accelerator, list(self.model.parameters()), self.config.train.clip_norm
        )
        if self.accelerator.num_processes > 1:
            asked = torch.full((1,), float(self.stop.number or 0), device=self.accelerator.device)
            logged["stop"] = self.accelerator.gather(asked).max()
        numbers = torch.stack([value.float() for value in logged.values()]).tolist()
        values = dict(zip(logged, numbers, strict=True))
        if bad := self.check.bad(values):
            self._refuse(bad, micro_batches, own)
        self.rates = {f"lr_{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return values

    def _learn(self, batch: Batch, logged: dict[str, Tensor], own: list, micro_batches: int) -> None:
        """Gradients of one micro-batch."""
        if self.memory.error is None:
            with self.memory:
                losses = self.model(batch.to(self.accelerator.device))
        self.memory.agree()
        loss = total_loss(self.accelerator, self.config, self.built.model, losses, logged, micro_batches)
        own.append({name: one.total.detach() for part in losses for name, one in part.items()})
        with self.memory:
            self.exchange.begin()
            self.accelerator.backward(loss)

    def _refuse(self, bad: list[str], batches: list[Batch], own: list, *, alone: bool = False):
        """Keep and tell what is known of a step whose numbers are not finite."""
        folder = self.output / failed_step.FOLDER
        failed = failed_step.FailedStep(folder, self.step + 1, bad, batches, own, self.start.random_state)
        advice = checkpoints.newest_in_words(self.output)
        failed_step.refuse(failed, self.accelerator, self.built.model, self.optimizer, advice=advice, alone=alone)

    def _is_due(self, every_epochs: float) -> bool:
        return every_epochs > 0 and (self.step + self.ahead) % max(round(every_epochs * self.steps_per_epoch), 1) == 0

    def _log_training(self, values: dict[str, float], bar: tqdm) -> None:
        """Write the averages since the last line, every `log_every` steps."""
        self.steps_summed += 1
        for name, value in values.items():
            self.loss_sums[name] = self.loss_sums.get(name, 0.0) + value
        if self.step % self.config.train.log_every and self.step != self.total_steps:
            return
        epoch = (self.step + self.ahead) / self.steps_per_epoch
        averages = gradients.averages(self.loss_sums, self.steps_summed)
        self.steps_summed, self.loss_sums = 0, {}
        values = {**averages, **self.rates}
        self.log.write(self.step, "train", {"epoch": epoch, **values})
        self._track({f"train/{name}": value for name, value in values.items()})
        bar.set_postfix({"loss": f"{values['loss']:.3f}"}, refresh=False)

    def _evaluate(self, max_images: int | None, *, final: bool = False) -> dict[str, Any]:
        try:
            metrics = evaluate_splits(
                *(self.config, self.built, self.accelerator),
                max_images=max_images,
                output=self.output if final else None,
                show=lambda records, name: track_pictures(
                    self.accelerator, self.built.model.task, records, name, self.step
                ),
                should_stop=lambda: self.stop.number,
                on_fault=self._save,
            )
        except EvaluationStoppedError as stopped:
            self._stop(stopped.args[0])
        compares = max_images == self.eval_images  # only evaluations of the same images do
        before = self.best.position()  # a run that goes on judges this step again
        with all_or_none(self.accelerator, lambda: self._save(best=before)):
            self.log.write(self.step, "eval" if compares else "final", metrics)
            if compares:
                self._track(metrics)
            if compares and self.best.judge(self.step, metrics) and self.accelerator.is_main_process:
                self.best.write(lambda folder: saving.save_model(folder, *self._own))
        return metrics

    def _track(self, values: dict[str, float | None]) -> None:
        self.accelerator.log(without_constants(self.config, values), step=self.step)

    def _save(self, best: dict[str, Any] | None = None) -> None:
        """Save a checkpoint of this step, unless there is one; a resumed run does what follows it, evaluation too."""
        if self.saved_step == self.step:
            return
        folder = self.output / "checkpoints" / f"step_{self.step:08d}"
        place = place_after(self.step + self.ahead, self.sampler)
        kept = {name: getattr(self, name) for name in POSITION}
        kept |= {"place": place, "best": best or self.best.position()}
        keep = self.config.train.keep_checkpoints
        checkpoints.save_state(self.accelerator, folder, *self._own, self.optimizer, position=kept, keep=keep)
        self.best.checkpoint, self.saved_step = folder, self.step

    @property
    def _own(self) -> tuple:
        """What `save_model` writes."""
        return self.config, self.built.model, self.built.tokenizer

    def _evaluate_best(self) -> dict[str, Any]:
        """The metrics of the best model over all images, unless it is the last model, or is lost."""
        self.accelerator.wait_for_everyone()  # the main process may still be writing it
        if self.best.step == self.step or not self.best.folder.is_dir():
            return {}
        _, model, _ = saving.load_model(self.best.folder)
        built = dataclasses.replace(self.built, model=model.to(self.accelerator.device))
        return {"metrics": evaluate_splits(self.config, built, self.accelerator)}

    def _finish(self, metrics: dict[str, Any], started: float) -> dict[str, Any]:
        model = self.built.model
        summary = {
            **metrics,
            "steps": self.step,
            "seconds": time.perf_counter() - started,
            "seconds_training": self.seconds_training,
            "images_per_second": self.images_seen / max(self.seconds_training, 1e-9),
            "processes": self.accelerator.num_processes,
            "parameters": parameter_counts(model),
        }
        if self.best.found is not None:
            judged = self.best.judged_images(self.built.eval_data, self.eval_images)
            summary["best"] = {**self.best.found, "images": judged, **self._evaluate_best()}
        if self.best.is_over and self.step < self.total_steps:
            summary["stopped_early"] = self.best.waited
        if self.accelerator.is_main_process:
            with atomic_folder(self.output / "model") as folder:
                saving.save_model(folder, *self._own)
            write_json(self.output / "metrics.json", without_nan(summary))
            from e2e_vl.run.report import write_report  # late: matplotlib takes seconds

            report = write_report(self.output, self.config, model.task, part_defaults(self.config))
            print(end_text(summary, self.output, report), flush=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return summary
