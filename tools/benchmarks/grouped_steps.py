"""How long training steps take with k texts of an image in one batch, against the same texts in k batches."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from detector.errors import UserError
from e2e_vl.config import RunConfig
from e2e_vl.data.batching import GroupedBatchSampler, Request
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import Run, build_run, resolve
from e2e_vl.run.optim import build_optimizer
from e2e_vl.structures import Batch, ModelOutput
from measuring import machine_facts, print_sizes, random_boxes, spread, take_turns

TOLERANCE = 1e-3  # of the loss, relative to it, and of gradients, relative to the largest one


def benchmark_training(
    config: RunConfig, *, rois: Sequence[int | None], image_size: tuple[int, int] | None, repetitions: int, warm_up: int
) -> dict[str, Any]:
    """Time one optimiser step over I x k texts, grouped and not.

    "grouped": one forward and backward pass over I images with k texts each. "ungrouped": k passes over the same I
    images with one text each, gradients accumulated; a task loss is divided by its count over all k passes. Both end in
    one clipped step of the optimiser, so both are the same update (up to dropout and sampled boxes). Batches are
    collated before the clock starts; the two ways take turns.

    Args:
        config: a run; I = `train.images_per_batch` / `train.accumulate`, k = `data.texts_per_image`. If it draws its
            data (`data.synthetic`), a few scenes are drawn into a temporary folder. No file of the run is written.
        rois: boxes per image, one measurement each: the run's predicted boxes, cut off or filled up with random ones. None =
            the run's predicted boxes as they are.
        image_size: pad images to this (height, width), pixels; None = to the largest of the batch.
        repetitions, warm_up: measured steps of each way, and steps of each way before the measured ones.

    Returns:
        `machine`; `settings`; `cases`, one per entry of `rois`, each with `checks` (see `compare_gradients`) and what
        `Stepper.measure` returns; and the first case's entries once more at the top.

    Raises:
        ValueError, FileNotFoundError: settings or data that do not fit.
    """
    _check(config, rois, repetitions, warm_up)
    config, run, grouped, singles = build_batches(config, image_size)
    accelerator = Accelerator(mixed_precision=config.train.mixed_precision)
    run.model.to(accelerator.device)
    batches = [
        [batch.to(accelerator.device) for batch in with_rois([grouped, *singles], number, config.seed)]
        for number in rois
    ]
    checks = [compare_gradients(run.model, case[0], case[1:]) for case in batches]
    stepper = Stepper(config, run.model, accelerator)
    cases = [
        {"rois": number, **stepper.measure(case[0], case[1:], repetitions, warm_up), "checks": check}
        for number, case, check in zip(rois, batches, checks, strict=True)
    ]
    settings = {
        **common_settings(config, run, grouped),
        "repetitions": repetitions,
        "warm_up": warm_up,
        "rois": list(rois),
        "texts_per_image": config.data.texts_per_image,
        "mixed_precision": config.train.mixed_precision,
    }
    first = {key: value for key, value in cases[0].items() if key != "rois"}
    return {"machine": machine_facts(accelerator.device), "settings": settings, **first, "cases": cases}


def _check(config: RunConfig, rois: Sequence[int | None], repetitions: int, warm_up: int) -> None:
    """Raise a ValueError for settings that cannot be measured."""
    if not isinstance(config.data.texts_per_image, int) or config.data.texts_per_image < 2:
        raise UserError(f"data.texts_per_image is {config.data.texts_per_image}; set a number of at least 2.")
    if repetitions < 1 or warm_up < 0:
        raise UserError(f"{repetitions} repetitions and {warm_up} warm-up steps cannot be measured.")
    if config.data.boxes.train == "online" and any(number is not None for number in rois):
        raise UserError(
            "The detector finds its predicted boxes (data.boxes.train=online), so their number cannot be set."
        )


def build_batches(config: RunConfig, image_size: tuple[int, int] | None) -> tuple[RunConfig, Run, Batch, list[Batch]]:
    """The settings of `without_chance`, a run that is built from them, and the batches of `grouped_and_single`."""
    with tempfile.TemporaryDirectory() as folder:
        config = without_chance(resolve(config), Path(folder))
        set_seed(config.seed)
        run = build_run(config)
        if config.train.channels_last:
            run.model.detector.to(memory_format=torch.channels_last)
        return config, run, *grouped_and_single(config, run, image_size)


def common_settings(config: RunConfig, run: Run, batch: Batch) -> dict[str, Any]:
    """The settings that every measurement of training steps has."""
    return {
        "images_per_batch": len(batch.images),
        "image_size": list(batch.images.pixels.shape[-2:]),
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
    }


def without_chance(config: RunConfig, folder: Path) -> RunConfig:
    """The run with one image size and no mirroring, so that all batches see the same pixels; it writes to `folder`."""
    resize = dataclasses.replace(config.data.resize, short_edge=config.data.resize.short_edge[-1:])
    data = dataclasses.replace(config.data, resize=resize, flip=0.0, workers=0)
    if data.synthetic.scenes:
        images = config.train.images_per_batch // config.train.accumulate
        scenes = {data.train_split: 4 * images + 8}  # not every scene has k texts
        synthetic = dataclasses.replace(data.synthetic, scenes=scenes)
        data = dataclasses.replace(data, root=str(folder / "data"), synthetic=synthetic)
    return dataclasses.replace(config, data=data, output=str(folder / "run"))


def grouped_and_single(
    config: RunConfig, run: Run, image_size: tuple[int, int] | None = None
) -> tuple[Batch, list[Batch]]:
    """One batch of I images x k texts, and the same texts as k batches of I images x 1 text.

    Raises:
        ValueError: too few images have k texts.
    """
    dataset, texts = run.train_data, config.data.texts_per_image
    number = config.train.images_per_batch // config.train.accumulate
    rich = [group[:texts] if len(group) >= texts else [] for group in dataset.groups]
    found = sum(bool(group) for group in rich)
    if found < number:
        raise UserError(
            f"Only {found} of {len(rich)} images have {texts} texts, but a batch takes {number} images; lower "
            "data.texts_per_image or train.images_per_batch."
        )
    requests = next(iter(GroupedBatchSampler(rich, number, texts, shuffle=False)))
    parts = [[Request(request.group, request.texts[i : i + 1]) for request in requests] for i in range(texts)]
    grouped, *singles = (run.collate([dataset[one] for one in part], pad_to=image_size) for part in (requests, *parts))
    return grouped, singles


def with_rois(batches: Sequence[Batch], number: int | None, seed: int) -> list[Batch]:
    """Batches of the same images with `number` boxes each: the first of their own, then random ones, the same ones."""
    if number is None:
        return list(batches)
    if number < 1:
        raise UserError(f"{number} boxes per image cannot be measured; give a positive number.")
    generator = torch.Generator().manual_seed(seed)
    boxes = []
    for own, size in zip(batches[0].boxes, batches[0].images.sizes, strict=True):
        random = random_boxes(number, generator) * size.flip(0).repeat(2)
        boxes.append(torch.cat([own, random])[:number])
    return [dataclasses.replace(batch, boxes=boxes) for batch in batches]


def compare_gradients(model: VisionLanguageModel, grouped: Batch, singles: Sequence[Batch]) -> dict[str, float]:
    """How far apart the task losses and the gradients of both ways are, without dropout, in float32.

    Each loss is its total over the batches, divided by its count in the grouped batch. The model stays in evaluation
    mode.

    Returns:
        `loss`: the loss of the grouped batch; 0 if nothing is labelled. `loss_difference`: the absolute difference from
        the single batches. `max_gradient_difference`: the largest difference of any gradient entry, relative to the
        largest gradient entry.
    """
    model.eval()
    losses, gradients = [], []
    counts: dict[str, Tensor] = {}
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        for batches in ([grouped], singles):
            model.zero_grad(set_to_none=True)
            total = 0.0
            for batch in batches:
                output = model(dataclasses.replace(batch, detection_targets=None))
                counts = counts or task_counts(output)  # the grouped batch comes first
                loss = task_loss(output, counts)
                loss.backward()
                total += loss.item()
            losses.append(total)
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    ours, theirs = gradients
    if ours.keys() != theirs.keys():
        raise RuntimeError("The grouped and the single batches reach different parameters.")
    largest = max(gradient.abs().max().item() for way in gradients for gradient in way.values())
    difference = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    return {
        "loss": losses[0],
        "loss_difference": abs(losses[0] - losses[1]),
        "max_gradient_difference": difference / largest if largest else 0.0,
    }


def task_counts(output: ModelOutput) -> dict[str, Tensor]:
    """What each task loss is divided by: its count, at least 1."""
    return {name: loss.count.clamp(min=1) for name, loss in output.task.losses.items()}


def task_loss(output: ModelOutput, counts: dict[str, Tensor]) -> Tensor:
    """Sum of the task losses, each divided by the given count."""
    return sum(loss.total / counts[name] for name, loss in output.task.losses.items())


class Stepper:
    """A model with its optimiser, as in training."""

    def __init__(self, config: RunConfig, model: VisionLanguageModel, accelerator: Accelerator):
        self.config, self.accelerator = config, accelerator
        self.model, self.optimizer = accelerator.prepare(model, build_optimizer(model, config.train))

    def measure(self, grouped: Batch, singles: Sequence[Batch], repetitions: int, warm_up: int) -> dict[str, Any]:
        """Time both ways.

        Returns:
            `times` (seconds); `texts_per_second`; `ratios`: `grouped_<k>_over_1` is the median time of the grouped step
            divided by the median time of the ungrouped one, below 1 = grouping is faster.
        """
        counts = self.counts(grouped)
        ways = {"grouped": partial(self.step, [grouped], counts), "ungrouped": partial(self.step, singles, counts)}
        times = spread(take_turns(ways, repetitions, warm_up, self.accelerator.device, "repetitions"))
        medians = {name: values["median"] for name, values in times.items()}
        return {
            "times": times,
            "texts_per_second": {name: len(grouped) / median for name, median in medians.items()},
            "ratios": {f"grouped_{len(singles)}_over_1": medians["grouped"] / medians["ungrouped"]},
        }

    @torch.no_grad()
    def counts(self, grouped: Batch) -> dict[str, Tensor]:
        """Counts of the task losses in training: the same for the grouped batch and for all single batches in total."""
        return task_counts(self.model.train()(grouped))

    def step(self, batches: Sequence[Batch], counts: dict[str, Tensor]) -> None:
        """One update from all batches; their task losses have the given counts in total.

        Every batch has all images, so the detection losses are averaged over the batches.
        """
        self.model.train()
        settings = self.config.detector
        for batch in batches:
            output = self.model(batch)
            losses = output.regions.losses
            detection = sum(settings.loss_weights.get(name, 1.0) * loss.mean for name, loss in losses.items())
            loss = task_loss(output, counts) + settings.loss_weight * detection / len(batches)
            self.accelerator.backward(loss)
        if self.config.train.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def is_same_update(result: dict[str, Any]) -> bool:
    """Whether losses and gradients agree in every case."""
    return all(
        check["loss_difference"] <= TOLERANCE * abs(check["loss"]) and check["max_gradient_difference"] <= TOLERANCE
        for check in (case["checks"] for case in result["cases"])
    )


def show(result: dict[str, Any]) -> int:
    """Print a short table; returns the exit status."""
    settings = result["settings"]
    texts = settings["texts_per_image"]
    print_sizes(result, f" with {texts} texts each")
    for case in result["cases"]:
        if case["rois"] is not None:
            print(f"{case['rois']} boxes per image:")
        for name, label in (("grouped", f"1 batch of {texts} texts"), ("ungrouped", f"{texts} batches of 1 text")):
            times, speed = case["times"][name], case["texts_per_second"][name]
            bounds = f"({times['min']:.3f} .. {times['max']:.3f})"
            print(f"  {label:24s} {times['median']:8.3f} s {bounds:22s} {speed:8.2f} texts/s")
        for group in ("ratios", "checks"):
            for name, value in case[group].items():
                print(f"  {group}.{name:32s} {value:.4g}")
    if not all(case["checks"]["loss"] for case in result["cases"]):
        print("The loss before training is 0 (no region fits a text), so the check of the update says nothing.")
    if is_same_update(result):
        return 0
    print("The grouped and the ungrouped batches do not give the same loss and gradients.", file=sys.stderr)
    return 1
