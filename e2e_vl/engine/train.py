"""The training loop: batches in, a run directory out.

A run directory holds `config.yaml`, `log.jsonl`, `metrics.json`, TensorBoard events, `checkpoints/step_*`, `model/`
(the final model in `save_pretrained` form), `predictions_*.json` and `report.html`; with `train.keep_best` also `best/`
(the best model, see `e2e_vl/engine/best.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, gather_object, set_seed
from torch import Tensor, nn
from tqdm.auto import tqdm

from detector.structures import Loss
from e2e_vl.config import RunConfig, save_config
from e2e_vl.data.loading.batches import BatchLoader
from e2e_vl.data.loading.grouping import GroupedBatchSampler
from e2e_vl.engine import saving
from e2e_vl.engine.best import BestModel
from e2e_vl.engine.default_settings import part_defaults
from e2e_vl.engine.evaluate import evaluate_splits
from e2e_vl.engine.launch import make_accelerator
from e2e_vl.engine.loss_sums import task_weights
from e2e_vl.engine.optim import build_optimizer, build_schedule
from e2e_vl.engine.preflight import Preflight, look_ahead
from e2e_vl.engine.run import Run, build_eval_data, build_run
from e2e_vl.engine.summary import end_text, start_text
from e2e_vl.engine.trackers import installed_trackers, start_trackers, track_pictures, without_constants
from e2e_vl.metric_names import MetricName
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run_files import RunLog, write_json
from e2e_vl.structures import Batch

POSITION = ("step", "steps_summed", "loss_sums", "seconds_training")  # attributes of a run that a checkpoint keeps


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train as the config says; `config.output` becomes the run directory.

    With `resume`, training continues from the newest checkpoint there, exactly as if the run had not stopped.

    Returns:
        What `metrics.json` holds.

    Raises:
        ValueError, FileNotFoundError: settings, data or a checkpoint that do not fit, in one sentence.
    """
    started = time.perf_counter()
    output = Path(config.output)
    accelerator = make_accelerator(
        config.train.mixed_precision,
        log_with=[name for name in config.train.trackers if name in installed_trackers()] or None,
        project_config=ProjectConfiguration(str(output), logging_dir=str(output / "tensorboard")),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    known = _look_ahead_together(config, accelerator, resume=resume)
    config, resume_from = known.config, known.resume_from
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
    set_seed(config.seed)  # the same on all processes, so that all start from the same weights
    with accelerator.main_process_first():
        run = build_run(config, known.datasets, known.shared)
        if resume_from is not None:
            saving.check_lists(resume_from, run.model, run.tokenizer)
        # settings that do not fit are found before training, not after it
        build_eval_data(config, run, known.datasets, known.shared)
    del known  # the data sets keep what they need of the files
    if accelerator.is_main_process:
        save_config(config, output / "config.yaml")
        run.tokenizer.save_pretrained(output / "tokenizer")
    return _Training(config, accelerator, run, resume_from).run(started)


def _look_ahead_together(config: RunConfig, accelerator: Accelerator, *, resume: bool) -> Preflight:
    """`look_ahead` on all processes, of which the main one raises what any of them found; the others leave silently."""
    known, findings = None, None
    with accelerator.main_process_first():
        try:
            known = look_ahead(config, accelerator.num_processes, resume=resume)
        except ValueError as error:
            findings = str(error)
    found = next(filter(None, gather_object([findings])), None)
    if found is None:
        return known
    if accelerator.is_main_process:
        raise ValueError(found)
    raise SystemExit(2)


class _Losses(nn.Module):
    """The model as DistributedDataParallel may see it: it returns nothing but what gradients come from.

    (From the parameters behind any other output it would wait for gradients that never come.)
    """

    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[dict[str, Loss], dict[str, Loss]]:
        """Task losses (with those of phrases) and detection losses, unweighted."""
        output = self.model(batch)
        return output.task_losses, output.regions.losses


class _Training:
    """One run in progress: its position (epoch, batch, step) and everything that changes with it."""

    def __init__(self, config: RunConfig, accelerator: Accelerator, run: Run, resume_from: Path | None):
        self.config, self.accelerator, self.built = config, accelerator, run
        settings = config.train
        self.output = Path(config.output)
        self.sampler = GroupedBatchSampler(
            run.train_data.groups,
            images_per_batch=settings.images_per_batch // settings.accumulate,
            accumulate=settings.accumulate,
            texts_per_image=config.data.texts_per_image,
            seed=config.seed,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )
        self.steps_per_epoch = len(self.sampler) // settings.accumulate
        self.total_steps = settings.max_steps or math.ceil(settings.epochs * self.steps_per_epoch)
        optimizer = build_optimizer(run.model, settings)
        if settings.activation_checkpointing:
            run.model.recompute_activations()
        if settings.channels_last:
            run.model.detector.to(memory_format=torch.channels_last)
        self.model, self.optimizer = accelerator.prepare(_Losses(run.model), optimizer)
        # what evaluations during training look at; None: all images, as the last one
        limit = config.eval.max_images
        looks_at_all = limit is None or all(len(one.groups) <= limit for one in run.eval_data.values())
        self.eval_images = None if looks_at_all else limit
        self.best = BestModel(self.output / "best", settings.keep_best, settings.patience)
        if settings.keep_best is not None:  # a wrong name is found before training, and before the generators are set
            self.best.check_name(evaluate_splits(config, run, accelerator, max_images=config.eval.images_per_batch))
        # After the weights: processes draw different dropout masks and RoI samples, but reproducibly.
        set_seed(config.seed, device_specific=True)
        self.step = 0
        self.seconds_training = 0.0
        self.steps_summed, self.loss_sums = 0, {}  # since the last logged step
        self.rates: dict[str, float] = {}  # learning rates of the last step
        if resume_from:
            position = saving.load_state(accelerator, optimizer, resume_from)
            vars(self).update({name: position[name] for name in POSITION})
            self.best.go_on(position.get("best", {}), resume_from, is_writer=accelerator.is_main_process)
        self.schedule = build_schedule(optimizer, settings, self.total_steps, steps_done=self.step)
        self.log = RunLog(
            self.output / "log.jsonl",
            enabled=accelerator.is_main_process,
            resume_step=self.step if resume_from else None,
        )
        start_trackers(accelerator, config)

    @property
    def is_over(self) -> bool:
        """No step is left to be done."""
        return self.step >= self.total_steps or self.best.is_over

    def run(self, started: float) -> dict[str, Any]:
        if self.accelerator.is_main_process:
            print(start_text(self.config, self.built, self.accelerator, self.step, self.total_steps), flush=True)
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            desc="training",
            unit="step",
            delay=1,  # seconds; a shorter one would only flash up
            disable=not self.accelerator.is_local_main_process,
        )
        since = time.perf_counter()
        with bar:  # closed on errors too, so that their message starts a line
            for micro_batches in self._steps():
                values = self._update(micro_batches)
                self.step += 1
                bar.update()
                self._log_training(values, bar)
                if self.step == self.total_steps:
                    break
                self.seconds_training += time.perf_counter() - since
                # before saving: a resumed run does not evaluate this step again
                if self._is_due(self.config.eval.every_epochs):
                    self._evaluate(self.eval_images)
                if self._is_due(self.config.train.save_every_epochs):
                    self._save()
                since = time.perf_counter()
        self.seconds_training += time.perf_counter() - since
        self._save()
        if self.best.metric is not None and self.best.judged_step != self.step and self.eval_images:
            self._evaluate(self.eval_images)  # on the images that the earlier models were judged by
        metrics = self._evaluate(None, final=True)
        return self._finish(metrics, started)

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
            epoch, done = divmod(self.step, per_epoch)
            self.sampler.set_epoch(epoch, start_batch=done * accumulate)
            micro_batches: list[Batch] = []
            for batch in loader:
                micro_batches.append(batch)
                if len(micro_batches) == accumulate:
                    yield micro_batches
                    micro_batches = []
                    if self.is_over:
                        return
                    if self.step % per_epoch == 0:
                        break

    def _update(self, micro_batches: list[Batch]) -> dict[str, float]:
        """One optimiser step; returns the (weighted) losses that were minimised and the gradient norm."""
        self.model.train()
        logged: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                task_losses, detection_losses = self.model(batch.to(self.accelerator.device))
                loss = self._total_loss(task_losses, detection_losses, logged, len(micro_batches))
                self.accelerator.backward(loss)
        if self.config.train.clip_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
            logged["grad_norm"] = torch.as_tensor(norm, dtype=torch.float32)
        self.rates = {f"lr_{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        values = {name: float(value) for name, value in logged.items()}
        bad = [name for name, value in values.items() if name != "grad_norm" and not math.isfinite(value)]
        if bad:
            names = [name for batch in micro_batches for name in batch.images.names]
            raise ValueError(
                f"{', '.join(bad)} became NaN or infinite in step {self.step + 1} (images {', '.join(names[:4])}, "
                "...); lower train.lr, set train.clip_norm, or look at these images' annotations."
            )
        return values

    def _total_loss(
        self,
        task_losses: dict[str, Loss],
        detection_losses: dict[str, Loss],
        logged: dict[str, Tensor],
        micro_batches: int,
    ) -> Tensor:
        """Weighted sum of all losses, each divided by the number of its items on *all* processes."""
        losses = {**task_losses, **detection_losses}
        weights = task_weights(self.config, task_losses) | self._detection_weights(detection_losses)
        names = sorted(losses)
        sums = torch.stack(
            [torch.stack([losses[name].total.detach().float(), losses[name].count.float()]) for name in names]
        )
        everywhere = self.accelerator.reduce(sums, reduction="sum")
        total = torch.zeros((), device=sums.device)
        for name, (loss_sum, count) in zip(names, everywhere, strict=True):
            divisor = count.clamp(min=1) * micro_batches
            # DDP averages gradients over processes, hence the factor
            total = total + weights[name] * losses[name].total * self.accelerator.num_processes / divisor
            logged[name] = logged.get(name, 0) + loss_sum / divisor
            logged["loss"] = logged.get("loss", 0) + weights[name] * loss_sum / divisor
        return total

    def _detection_weights(self, losses: dict[str, Loss]) -> dict[str, float]:
        settings = self.config.detector
        unknown = sorted(set(settings.loss_weights) - set(losses)) if losses else []
        if unknown:
            raise ValueError(
                f"detector.loss_weights names '{unknown[0]}'; the losses of this detector are {', '.join(losses)}."
            )
        return {name: settings.loss_weight * settings.loss_weights.get(name, 1.0) for name in losses}

    def _is_due(self, every_epochs: float) -> bool:
        return every_epochs > 0 and self.step % max(round(every_epochs * self.steps_per_epoch), 1) == 0

    def _log_training(self, values: dict[str, float], bar: tqdm) -> None:
        """Write the averages since the last line, every `log_every` steps."""
        self.steps_summed += 1
        for name, value in values.items():
            self.loss_sums[name] = self.loss_sums.get(name, 0.0) + value
        if self.step % self.config.train.log_every and self.step != self.total_steps:
            return
        epoch = self.step / self.steps_per_epoch
        averages = {name: value / self.steps_summed for name, value in self.loss_sums.items()}
        self.steps_summed, self.loss_sums = 0, {}
        values = {**averages, **self.rates}
        self.log.write(self.step, "train", {"epoch": epoch, **values})
        self._track({f"train/{name}": value for name, value in values.items()})
        bar.set_postfix({"loss": f"{values['loss']:.3f}"}, refresh=False)

    def _evaluate(self, max_images: int | None, *, final: bool = False) -> dict[str, Any]:
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
        compares = max_images == self.eval_images  # only evaluations of the same images do
        self.log.write(self.step, "eval" if compares else "final", metrics)
        if compares:
            self._track(metrics)
        if compares and self.best.judge(self.step, metrics):
            if self.accelerator.is_main_process:
                own = (self.config, self.built.model, self.built.tokenizer)
                self.best.write(lambda folder: saving.save_model(folder, *own))
            self.accelerator.wait_for_everyone()
        return metrics

    def _track(self, values: dict[str, float | None]) -> None:
        self.accelerator.log(without_constants(self.config, values), step=self.step)

    def _save(self) -> None:
        folder = self.output / "checkpoints" / f"step_{self.step:08d}"
        saving.save_state(
            self.accelerator,
            folder,
            self.config,
            self.built.model,
            self.built.tokenizer,
            position={**{name: getattr(self, name) for name in POSITION}, "best": self.best.position()},
            keep=self.config.train.keep_checkpoints,
        )
        self.best.checkpoint = folder

    def _judged_images(self) -> int:
        """Number of images behind the value that the best model was chosen by."""
        name = MetricName.read(self.best.metric)
        number = len(self.built.eval_data[name.split, name.source].groups)
        return number if self.eval_images is None else min(number, self.eval_images)

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
        parts = {"detector": model.detector, "encoder": model.encoder, "task": model.task, "phrases": model.phrase_head}
        summary = {
            **metrics,
            "steps": self.step,
            "seconds": time.perf_counter() - started,
            "seconds_training": self.seconds_training,
            "images_per_second": self.step * self.config.train.images_per_batch / max(self.seconds_training, 1e-9),
            "processes": self.accelerator.num_processes,
            "parameters": {
                name: sum(p.numel() for p in part.parameters()) for name, part in parts.items() if part is not None
            },
        }
        if self.best.found is not None:
            summary["best"] = {**self.best.found, "images": self._judged_images(), **self._evaluate_best()}
        if self.best.is_over and self.step < self.total_steps:
            summary["stopped_early"] = self.best.waited
        if self.accelerator.is_main_process:
            saving.save_model(self.output / "model", self.config, model, self.built.tokenizer)
            write_json(self.output / "metrics.json", summary)
            from e2e_vl.report.page import write_report  # late: matplotlib takes seconds

            report = write_report(self.output, self.config, model.task, part_defaults(self.config))
            print(end_text(summary, self.output, report), flush=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return summary
