"""The training loop.

A run directory holds `config.yaml`, `log.jsonl`, `metrics.json`, TensorBoard events, `checkpoints/step_*`, `model/`
(the final model in `save_pretrained` form), `predictions_*.json`, `report.html`, `tokenizer/` (a vocabulary built from
the texts) and `.lock`; with `train.metric_for_best_model` also `best/` (the best model, see `BestModel`).

`Trainer.train_step` is one optimiser step, `Trainer.run` the loop around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm

from detector.errors import UserError
from detector.io import atomic_files, atomic_folder, read_json, remove_leftovers, write_json
from detector.structures import Loss
from e2e_vl import __version__
from e2e_vl.config import RunConfig, check_batch_size
from e2e_vl.config_files import save_config
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler
from e2e_vl.io import RunLog, refuse_to_overwrite, replace_nan
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run import checkpoint as checkpoints
from e2e_vl.run.build import Run, build_run, resolve_config
from e2e_vl.run.casting import cast_layer_weights
from e2e_vl.run.compilation import compile_blocks, explain_too_many_graphs
from e2e_vl.run.ema import WeightAverage
from e2e_vl.run.evaluate import Evaluator, InterruptedEvaluationError, task_loss_weights
from e2e_vl.run.guards import FiniteCheck, StopSignals, check_images, run_lock, warn_of_shared_images
from e2e_vl.run.launch import make_accelerator, on_main
from e2e_vl.run.metric_names import MetricName, Metrics, choose_metric, metrics_to_json
from e2e_vl.run.optim import build_optimizer, build_schedule, objective_weights
from e2e_vl.run.trackers import (
    describe_finished_run,
    describe_results,
    describe_run,
    flatten_settings,
    track_pictures,
    tracker_options,
)
from e2e_vl.structures import Batch
from e2e_vl.terminal import STOP_SIGNALS, lasting_output, make_stopped_error
from e2e_vl.weights.loading import check_answers, check_vocabulary

logger = logging.getLogger(__name__)


@lasting_output()
def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train a model in the run directory `config.output`.

    With `resume`, training continues from the newest complete checkpoint there, exactly as if it had not stopped; a
    finished run is not changed. SIGTERM, SIGHUP and Ctrl-C end a run after its current step and a checkpoint. After an
    error on one process, the launcher ends the others. Returns the content of `metrics.json`.
    """
    started = time.perf_counter()
    output = Path(config.output)
    installed = {str(name) for name in get_available_trackers()}
    for name in config.train.trackers:
        if name not in installed:
            raise UserError(f"train.trackers has '{name}'; installed trackers are {', '.join(sorted(installed))}.")
    accelerator = make_accelerator(
        config.train.mixed_precision,
        tf32=config.train.tf32,
        log_with=config.train.trackers or None,
        project_config=ProjectConfiguration(str(output), logging_dir=str(output / "tensorboard")),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,
                comm_hook=DDPCommunicationHookType.BF16 if config.train.bf16_gradients else DDPCommunicationHookType.NO,
            )
        ],
        max_wait_minutes=config.train.max_wait_minutes,
    )
    is_main = accelerator.is_main_process
    check_batch_size(config, accelerator.num_processes)
    config = resolve_config(config)
    with contextlib.ExitStack() as lock:

        def prepare_output() -> Path | None:
            """Lock the run directory, and return the checkpoint to resume."""
            checkpoint = checkpoints.find_resumable(output, config, accelerator.num_processes) if resume else None
            if checkpoint is None:
                refuse_to_overwrite(output)
            lock.enter_context(run_lock(output))
            for folder in (output, output / "checkpoints"):
                remove_leftovers(folder)
            if checkpoint is None:
                save_config(config, output / "config.yaml")
            return checkpoint

        checkpoint = on_main(accelerator, prepare_output)
        set_seed(config.seed)  # the same on all processes, for the same initial weights
        with accelerator.main_process_first():
            run = build_run(config, writes=is_main, evaluates=True)
        if checkpoint is None:
            on_main(accelerator, lambda: check_images(config, run))
            on_main(accelerator, lambda: warn_of_shared_images(config, run))
        else:  # the vocabulary and the answers were read or built again: their indices must not have changed
            check_vocabulary(checkpoint / "model" / "encoder", run.tokenizer)
            check_answers(checkpoint / "model" / "task", run.model.task)
        trainer = Trainer(config, accelerator, run, checkpoint)
        finished = trainer.finished_metrics()
        if finished is None:
            with explain_too_many_graphs():
                return trainer.run(started)
        if is_main:
            print(describe_finished_run(output, trainer.step), flush=True)
        accelerator.end_training()
        return finished


class LossesOnly(nn.Module):
    """The model with the losses as its only output.

    DistributedDataParallel waits for gradients through every output, and only losses get them.
    """

    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[dict[str, Loss], dict[str, Loss]]:
        """Return the losses of the task (with those of phrases) and of detection, unweighted."""
        output = functional_call(self.model, cast_layer_weights(self.model), batch, tie_weights=False)
        return output.task_losses, output.regions.losses


class Trainer:
    """A run and its current state.

    Attributes:
        step: completed optimiser steps.
        images_seen: images in these steps, over all processes.
        skipped_steps: steps without an update, because gradients overflowed in fp16; the schedule ignores them.
        average: the weights that are evaluated and saved, see `train.ema_decay`.
        loss_sums: sum and count of each logged value since the last line of the log.
        seconds_training: without evaluations and checkpoints.
    """

    # attributes saved in checkpoints
    POSITION = ("step", "images_seen", "skipped_steps", "loss_sums", "seconds_training")

    def __init__(self, config: RunConfig, accelerator: Accelerator, run: Run, checkpoint: Path | None):
        settings = config.train
        self.config = config
        self.accelerator = accelerator
        self.built = run
        self.checkpoint = checkpoint
        self.output = Path(config.output)
        self.stop = StopSignals()
        self.sampler = GroupedBatchSampler(
            run.train_data.groups,
            images_per_batch=settings.micro_batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            texts_per_image=config.data.texts_per_image,
            seed=config.seed,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )
        self.steps_per_epoch = self.sampler.batches_per_epoch // settings.gradient_accumulation_steps
        self.order = {  # determines the images of each step; must not change in a resumed run
            "train.images_per_batch": settings.images_per_batch,
            "data.texts_per_image": config.data.texts_per_image,
            "seed": config.seed,
            "number of images": self.sampler.num_groups,
            # another version may read the same records into other fields: then they are not compared
            f"records of the training split (e2e-vl {__version__})": run.train_data.fingerprint(),
        }
        optimizer = build_optimizer(run.model, settings)
        if settings.activation_checkpointing:
            run.model.recompute_activations()
        if settings.channels_last:
            run.model.detector.to(memory_format=torch.channels_last)
        if settings.torch_compile:
            compile_blocks(run.model)
        accelerator.ddp_handler.find_unused_parameters = run.model.encoder.has_optional_outputs
        # only batch statistics change during training
        accelerator.ddp_handler.broadcast_buffers = any(
            isinstance(module, _BatchNorm) for module in run.model.modules()
        )
        self.model, self.optimizer = accelerator.prepare(LossesOnly(run.model), optimizer)
        self.task_weights = task_loss_weights(config)  # other losses of the task have weight 1
        self.check_finite = FiniteCheck(scaled=accelerator.scaler is not None)
        # maximum number of images per split in an evaluation during training; None: all, as in the final one
        limit = config.eval.max_images
        is_limited = limit is not None and any(len(dataset.groups) > limit for dataset in run.eval_data.values())
        self.eval_images = limit if is_limited else None
        metric = None
        if settings.metric_for_best_model is not None:  # check the name before training, and before the seeds are set
            measured = Evaluator(config, accelerator).evaluate_splits(run, max_images=config.eval.images_per_batch)
            metric = choose_metric(settings.metric_for_best_model, measured, "train.metric_for_best_model")
        self.best = BestModel(self.output / "best", metric, settings.patience)
        # after weight initialisation: a different but reproducible seed for dropout and RoI sampling on each process
        set_seed(config.seed, device_specific=True)
        self.step = 0
        self.images_seen = 0
        self.skipped_steps = 0
        self.seconds_training = 0.0
        self.loss_sums: dict[str, tuple[float, int]] = {}
        self.saved_step = 0  # of the newest checkpoint
        if checkpoint is not None:
            self._restore(checkpoints.load_state(accelerator, run.model, optimizer, checkpoint))
        self.average = WeightAverage(run.model, settings.ema_decay)
        if checkpoint is not None:
            checkpoints.load_average(self.average, run.model, checkpoint)
        self.total_steps = settings.max_steps or math.ceil(settings.epochs * self.steps_per_epoch)
        updates = self.step - self.skipped_steps
        self.schedule = build_schedule(optimizer, settings, self.total_steps, steps_done=updates)

    def _restore(self, position: Mapping[str, Any]) -> None:
        """Restore the position of a checkpoint; raise a UserError if the images would come in another order."""
        changed = [name for name, value in self.order.items() if position["order"].get(name, value) != value]
        if changed:
            raise UserError(
                f"Cannot resume from {self.checkpoint}: {', '.join(changed)} changed, so some images would be repeated "
                "and others skipped; resume with the original settings and data."
            )
        for name in self.POSITION:
            setattr(self, name, position[name])
        num_processes = self.accelerator.num_processes
        if position["processes"] != num_processes:  # its random states are those of other processes
            set_seed(self.config.seed + self.step * num_processes, device_specific=True)
        self.saved_step = self.step
        self.best.load_state_dict(position["best"])
        lost_step = self.best.forget_lost_model()
        if lost_step is not None and self.accelerator.is_main_process:
            logger.warning(
                "%s is missing: the best model so far, of step %d, is lost, and the best of the following evaluations "
                "is kept instead.",
                self.best.folder,
                lost_step,
            )

    def finished_metrics(self) -> dict[str, Any] | None:
        """Return the content of `metrics.json` if a resumed run is already complete; else None."""
        path = self.output / "metrics.json"
        patience = self.config.train.patience
        if self.checkpoint is None or not path.is_file() or not (self.output / "report.html").is_file():
            return None
        metrics = read_json(path)
        has_waited = patience is not None and metrics.get("stopped_early", 0) >= patience
        is_over = self.step >= self.total_steps or has_waited
        return metrics if metrics.get("steps") == self.step and is_over else None

    def run(self, started: float) -> dict[str, Any]:
        """Train until the last step or early stopping; then evaluate, save and report."""
        settings = self.config.train
        is_main = self.accelerator.is_main_process
        if is_main:
            save_config(self.config, self.output / "config.yaml")
            with atomic_files(self.output / "tokenizer", "tokenizer_config.json") as part:
                self.built.tokenizer.save_pretrained(part)
            print(describe_run(self.config, self.built, self.accelerator, self.step, self.total_steps), flush=True)
        resume_step = self.step if self.checkpoint is not None else None
        _, steps_after_line = self.loss_sums.get("loss", (0.0, 0))
        self.log = RunLog(
            self.output / "log.jsonl",
            enabled=is_main,
            resume_step=resume_step,
            logged_step=self.step - steps_after_line,
        )
        self.accelerator.init_trackers(
            settings.tracking.project,
            config=dict(flatten_settings(msgspec.to_builtins(self.config))),
            init_kwargs=tracker_options(self.config),
        )
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            desc="training",
            unit="step",
            delay=1,  # seconds; a short training shows no bar
            disable=not self.accelerator.is_local_main_process,
        )
        with self.stop, bar:  # closes the bar before an error message
            if 0 < self.step < self.total_steps and self.is_due(self.config.eval.every_epochs):
                self.evaluate(self.eval_images)  # the evaluation that followed the checkpoint
            since = time.perf_counter()
            for micro_batches in self.batches():
                values, signal_number = self.train_step(micro_batches)
                self.step += 1
                self.images_seen += settings.images_per_batch
                bar.update()
                self.log_training(values, bar)
                self.seconds_training += time.perf_counter() - since
                if signal_number:
                    self.stop_run(signal_number)
                if self.step == self.total_steps:
                    break
                # save before the evaluation, so that its failure loses nothing
                if self.is_due(settings.save_every_epochs):
                    self.save()
                if self.is_due(self.config.eval.every_epochs):
                    self.evaluate(self.eval_images)
                since = time.perf_counter()
            self.save()
            if self.best.metric is not None and self.best.judged_step != self.step and self.eval_images:
                self.evaluate(self.eval_images)  # on the same images as the earlier models
            metrics = self.evaluate(None, final=True)
        return self.finish(metrics, started)

    def batches(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each remaining optimiser step, across epochs."""
        accumulation_steps = self.config.train.gradient_accumulation_steps
        loader = BatchLoader(
            self.built.train_data, self.sampler, self.built.collate, workers=self.config.data.workers, keep_workers=True
        )
        while self.step < self.total_steps and not self.best.is_over:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            self.sampler.set_epoch(epoch, start_batch=done * accumulation_steps)
            micro_batches: list[Batch] = []
            for batch in loader:
                micro_batches.append(batch)
                if len(micro_batches) == accumulation_steps:
                    yield micro_batches
                    micro_batches = []
                    if self.step >= self.total_steps or self.best.is_over:
                        return

    def train_step(self, micro_batches: list[Batch]) -> tuple[dict[str, float], int]:
        """Take one optimiser step.

        Returns the losses, their weighted sum `loss`, the gradient norm and the learning rates; and the number of a
        signal that any process received, or 0.
        """
        accelerator = self.accelerator
        detector = self.config.detector
        objectives = objective_weights(self.config, self.total_steps, self.step)
        self.model.train()
        logged: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches, start=1):
            # all-reduce gradients in the last backward pass of the step only
            is_last = number == len(micro_batches)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.model):
                task_losses, detection_losses = self.model(batch.to(accelerator.device))
                weights = {name: self.task_weights.get(name, 1.0) for name in task_losses}
                weights |= {name: 0.0 for name, weight in objectives.items() if not weight}  # they have not begun
                for name in detection_losses:
                    weights[name] = detector.loss_weight * detector.loss_weights.get(name, 1.0)
                losses = sorted({**task_losses, **detection_losses}.items())
                # means are over the items of a micro-batch on all processes; micro-batches have equal weights
                sums = [torch.stack([summand.total.detach().float(), summand.count.float()]) for _, summand in losses]
                # the signals that processes have received travel with the losses: how many have received each kind
                received = self.stop.received()
                stops = torch.tensor([[float(number == received), 0.0] for number in STOP_SIGNALS])
                sums.extend(stops.to(accelerator.device, non_blocking=True))
                rows = accelerator.reduce(torch.stack(sums), reduction="sum")
                totals, counts = rows[: len(losses)].unbind(dim=1)
                for stop_signal, processes in zip(STOP_SIGNALS, rows[len(losses) :, 0], strict=True):
                    logged[stop_signal.name] = processes
                loss = torch.zeros((), device=accelerator.device)
                divisors = counts.clamp(min=1) * len(micro_batches)
                for (name, summand), total, divisor in zip(losses, totals, divisors, strict=True):
                    # the factor num_processes cancels DDP's average over processes
                    loss = loss + weights[name] * accelerator.num_processes * summand.total / divisor
                    logged[name] = logged.get(name, 0) + total / divisor
                    logged["loss"] = logged.get("loss", 0) + weights[name] * total / divisor
                accelerator.backward(loss)
        max_grad_norm = self.config.train.max_grad_norm
        max_norm = math.inf if max_grad_norm is None else max_grad_norm
        logged["grad_norm"] = accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        # the only host-device synchronisation in this function: the values are checked before the update
        numbers = torch.stack([value.float() for value in logged.values()]).tolist()
        values = dict(zip(logged, numbers, strict=True))
        stop_signals = [number for number in STOP_SIGNALS if values.pop(number.name)]
        is_finite = self.check_finite(values, self.step + 1, micro_batches)
        self.optimizer.step()  # skipped by the scaler in fp16 if gradients overflowed
        self.optimizer.zero_grad(set_to_none=True)
        values |= {f"lr_{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        values |= {f"weight_{name}": weight for name, weight in objectives.items()}
        if accelerator.scaler is not None:
            values["skipped_steps"] = float(not is_finite)
        if is_finite:
            self.schedule.step()
            self.average.update()
        else:
            del values["grad_norm"]
            self.skipped_steps += 1
        return values, stop_signals[0] if stop_signals else 0

    def is_due(self, every_epochs: float) -> bool:
        return every_epochs > 0 and self.step % max(round(every_epochs * self.steps_per_epoch), 1) == 0

    def log_training(self, values: dict[str, float], bar: tqdm) -> None:
        """Log mean values since the last line, and the current learning rates, every `log_every` steps."""
        for name, value in values.items():
            total, number = self.loss_sums.get(name, (0.0, 0))
            self.loss_sums[name] = total + value, number + 1
        if self.step % self.config.train.log_every and self.step != self.total_steps:
            return
        means = {name: total / number for name, (total, number) in self.loss_sums.items()}
        means |= {name: value for name, value in values.items() if name.startswith(("lr_", "weight_"))}
        self.loss_sums = {}
        self.log.write(self.step, "train", {"epoch": self.step / self.steps_per_epoch, **means})
        self.accelerator.log({f"train/{name}": value for name, value in means.items()}, step=self.step)
        bar.set_postfix({"loss": f"{means['loss']:.3f}"}, refresh=False)

    def evaluate(self, max_images: int | None, *, final: bool = False) -> Metrics:
        """Evaluate the current model, log the metrics, and save it if it is the best so far.

        `max_images`: maximum number of images per split; None = all. A signal ends the evaluation and the run, after a
        checkpoint if there is none of this step; --resume makes the evaluation again.
        """
        self.stop.at_once = self.saved_step == self.step
        try:
            with self.average.applied():
                metrics = Evaluator(self.config, self.accelerator, self.stop.received).evaluate_splits(
                    self.built,
                    max_images=max_images,
                    output=self.output if final else None,
                    show=lambda predictions, name: track_pictures(
                        self.accelerator, self.built.model.task, predictions, name, self.step
                    ),
                )
        except InterruptedEvaluationError as interrupted:
            self.stop_run(interrupted.signal_number)
        self.stop.at_once = False
        is_comparable = max_images == self.eval_images  # metrics over different images are not comparable
        named_values = metrics_to_json(metrics)
        self.log.write(self.step, "eval" if is_comparable else "final", named_values)
        if is_comparable:
            measured_values = {name: value for name, value in named_values.items() if value is not None}
            self.accelerator.log(measured_values, step=self.step)
            if self.best.judge(self.step, metrics) and self.accelerator.is_main_process:
                self.best.write(self.save_model)
        return metrics

    def stop_run(self, signal_number: int) -> NoReturn:
        """Save a checkpoint and end the run, after a signal."""
        self.save()
        self.accelerator.end_training()
        raise make_stopped_error(signal_number, f"--resume continues from step {self.step}.")

    def save(self) -> None:
        """Save a checkpoint of this step, unless there is one; the log goes to disk first, so that both agree."""
        if self.saved_step == self.step:
            return
        self.log.flush_to_disk()
        folder = self.output / "checkpoints" / f"step_{self.step:08d}"
        position = {name: getattr(self, name) for name in self.POSITION}
        position |= {"order": self.order, "best": self.best.state_dict()}
        keep = self.config.train.save_total_limit
        checkpoints.save_state(
            self.accelerator, folder, *self.parts, average=self.average, position=position, keep=keep
        )
        self.saved_step = self.step

    def save_model(self, folder: Path) -> None:
        """Write the model as it is evaluated."""
        with self.average.applied():
            checkpoints.save_model(folder, *self.parts)

    @property
    def parts(self) -> tuple:
        return self.config, self.built.model, self.built.tokenizer

    def finish(self, metrics: Metrics, started: float) -> dict[str, Any]:
        """Write the last model, the metrics and the report; return the content of `metrics.json`."""
        model = self.built.model
        best = self.best
        is_main = self.accelerator.is_main_process
        named_values = metrics_to_json(metrics)
        summary = {
            **named_values,
            "steps": self.step,
            "seconds": time.perf_counter() - started,
            "seconds_training": self.seconds_training,
            "images_per_second": self.images_seen / max(self.seconds_training, 1e-9),
            "processes": self.accelerator.num_processes,
            "parameters": {
                name: sum(parameter.numel() for parameter in module.parameters())
                for name, module in model.named_children()
            },
        }
        self.accelerator.wait_for_everyone()  # the main process may still be writing the best model
        if best.summary is not None and best.folder.is_dir():
            images = len(self.built.eval_data[best.metric.split, best.metric.source].groups)
            if self.eval_images is not None:
                images = min(images, self.eval_images)
            summary["best"] = {**read_json(best.folder / "best.json"), "images": images}
            if summary["best"]["step"] != self.step:  # evaluate the best model on all images
                _, best_model, _ = checkpoints.load_model(best.folder)
                built = dataclasses.replace(self.built, model=best_model.to(self.accelerator.device))
                best_metrics = Evaluator(self.config, self.accelerator).evaluate_splits(built)
                summary["best"]["metrics"] = metrics_to_json(best_metrics)
            if is_main:
                write_json(best.folder / "metrics.json", replace_nan(summary["best"].get("metrics", named_values)))
        if best.is_over and self.step < self.total_steps:
            summary["stopped_early"] = best.waited
        if is_main:
            with atomic_folder(self.output / "model") as folder:
                self.save_model(folder)
                write_json(folder / "metrics.json", replace_nan(named_values))
            write_json(self.output / "metrics.json", replace_nan(summary))
            from e2e_vl.run.report import write_report  # late: importing matplotlib takes seconds

            report = write_report(self.output, self.config, model.task)
            print(describe_results(summary, self.output, report), flush=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return summary


# The best model of a run so far, and early stopping


@dataclasses.dataclass
class BestModel:
    """Tracks the best evaluation of a run. All processes have the same copy; the main process writes."""

    STATE: ClassVar[tuple[str, ...]] = ("step", "value", "judged_step", "waited")  # saved in checkpoints

    folder: Path  # of the best model
    metric: MetricName | None = None  # higher is better, but of a loss lower; None: nothing is tracked
    patience: int | None = None  # training ends after this many evaluations in a row without a better value
    step: int | None = None  # of the best evaluation; None before the first one
    value: float | None = None
    judged_step: int | None = None  # of the last evaluation
    waited: int = 0  # evaluations since the best one

    @property
    def is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    @property
    def summary(self) -> dict[str, Any] | None:
        """Metric, value and step of the best model; None before the first evaluation."""
        if self.step is None:
            return None
        return {"metric": str(self.metric), "value": self.value, "step": self.step}

    def judge(self, step: int, metrics: Metrics) -> bool:
        """Record an evaluation and return whether its model is the best so far; False for a step that was judged."""
        if self.metric is None or step == self.judged_step:
            return False
        value = metrics.get(self.metric)
        is_best = value is not None and math.isfinite(value)
        if is_best and self.value is not None:
            is_best = value < self.value if self.metric.is_loss else value > self.value
        self.judged_step = step
        self.waited += 1
        if is_best:
            self.waited = 0
            self.step = step
            self.value = float(value)
        return is_best

    def write(self, save: Callable[[Path], None]) -> None:
        """Write the current model; `save` writes it into the folder that it is given."""
        with atomic_folder(self.folder) as part:
            save(part)
            write_json(part / "best.json", self.summary)

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.STATE}
        state["metric"] = None if self.metric is None else str(self.metric)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint, unless it belongs to another metric."""
        if self.metric is not None and state["metric"] == str(self.metric):
            for name in self.STATE:
                setattr(self, name, state[name])

    def forget_lost_model(self) -> int | None:
        """Let the next evaluation be the best one if the files of the best model are gone; return its step."""
        if self.step is None or (self.folder / "best.json").is_file():
            return None
        lost_step = self.step
        self.step = None
        self.value = None
        return lost_step
