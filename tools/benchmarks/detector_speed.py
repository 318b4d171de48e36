"""How fast the built-in detector is, against another model with the same config, weights and inputs.

The other one is torchvision's for the settings of its detectors, and Detectron2's for all others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detector.errors import UserError
from detector.structures import DetectionTargets, ImageBatch
from e2e_vl.run.build import DETECTORS
from measuring import machine_facts, print_machine, random_boxes, spread, take_turns
from torchvision_rival import RIVALS, make_pair

OBJECTS = 8  # annotated objects of each image in the training step
SAMPLED_ROIS = 64  # of each image, for the detection losses of the training step
SEED = 0
TOLERANCE = 1e-3  # of the features, relative to the largest one


def benchmark_detector(
    config: Path,
    *,
    image_size: tuple[int, int],
    images: int,
    rois: Sequence[int],
    repetitions: int,
    warm_up: int,
    training: bool,
) -> dict[str, Any]:
    """Time features of given boxes, and training steps, in float32; the backends take turns.

    Images and boxes are random: the time does not depend on what they show. Where there is no other model, only the
    built-in detector is measured.

    Args:
        config: Detectron2 YAML file of a C4 or an FPN model.
        image_size: (height, width), pixels of the network input; images: N.
        rois: numbers of given boxes R, one measurement each; the training step uses the first.
        repetitions, warm_up: measured calls of each backend, and calls before the measured ones.
        training: also measure training steps.

    Returns:
        `machine`, `settings`, `backends`, `cases` (by name, such as "features_36" or "train": `times` of each backend
        in seconds and, with two backends, `ratio` = the other's median / ours, above 1 = ours is faster), and
        `max_feature_difference`, relative to the largest feature; None with one backend.

    Raises:
        ValueError: a number that is not positive, or a config that the detectors refuse.
    """
    if repetitions < 1 or warm_up < 0 or images < 1 or not rois or min(rois) < 1:
        raise UserError("Repetitions, images and boxes must be positive numbers.")
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    detectors = {name: detector.to(device) for name, detector in make_detectors(config).items()}
    detectors["builtin"].to(memory_format=torch.channels_last)  # as `train.channels_last` does; the other as it comes
    pixels, sizes = torch.randn(images, 3, *image_size) * 50, torch.tensor([image_size] * images)
    batch = ImageBatch(pixels, sizes, sizes, [f"image {index}" for index in range(images)]).to(device)
    calls = _calls(detectors, batch, rois, training)
    difference = _feature_difference(calls[f"features_{rois[0]}"])
    settings = {"config": config.name, "image_size": list(image_size), "images": images, "sampled_rois": SAMPLED_ROIS}
    settings |= {"repetitions": repetitions, "warm_up": warm_up, "seed": SEED}
    return {
        "machine": machine_facts(device),
        "settings": settings,
        "backends": list(detectors),
        "cases": {name: _measure(one, repetitions, warm_up, device, name) for name, one in calls.items()},
        "max_feature_difference": difference,
    }


def make_detectors(config: Path) -> dict[str, nn.Module]:
    """The built-in detector and, with the same weights, torchvision's, or Detectron2's where it can be imported."""
    tree = {"_BASE_": str(config.resolve()), "MODEL": {"ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": SAMPLED_ROIS}}}
    if config.stem in RIVALS:
        return make_pair(tree, config.stem)
    detectors: dict[str, nn.Module] = {}
    for name in ("builtin", "detectron2"):
        try:
            detector_class = DETECTORS[name]()
        except ValueError:  # not installed
            continue
        detectors[name] = detector_class(detector_class.config_class.from_yaml(tree))
    if "detectron2" in detectors:
        detectors["detectron2"].load_state_dict(detectors["builtin"].state_dict())
    return detectors


def _calls(
    detectors: dict[str, nn.Module], batch: ImageBatch, rois: Sequence[int], training: bool
) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is timed: by case, then by backend."""
    scale = batch.sizes[0].flip(0).repeat(2)
    makers = [(f"features_{number}", number, _feature_call) for number in rois]
    if training:  # last, because it changes the weights
        makers.append(("train", rois[0], _training_call))
    cases: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, number, make in makers:
        boxes = [random_boxes(number).to(scale.device) * scale for _ in range(len(batch))]
        cases[name] = {backend: make(detector, batch, boxes) for backend, detector in detectors.items()}
    return cases


def _feature_difference(calls: dict[str, Callable[[], Tensor]]) -> float | None:
    """The largest difference of the backends' features, relative to the largest feature; None with one backend."""
    if len(calls) < 2:
        return None
    ours, theirs = (call() for call in calls.values())
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _feature_call(detector: nn.Module, batch: ImageBatch, boxes: list[Tensor]) -> Callable[[], Tensor]:
    @torch.no_grad()
    def call() -> Tensor:
        detector.eval()
        return torch.cat(detector(batch, boxes).features)

    return call


def _training_call(detector: nn.Module, batch: ImageBatch, boxes: list[Tensor]) -> Callable[[], None]:
    """A training step: forward with detection losses and features of the boxes, backward of both, and a step of SGD."""
    objects = [rows[:OBJECTS] for rows in boxes]
    classes = [torch.arange(len(rows), device=rows.device) % detector.num_classes for rows in objects]
    targets = DetectionTargets(objects, classes)
    optimizer = torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=1e-6)

    def call() -> None:
        detector.train()
        regions = detector(batch, boxes, targets)
        loss = sum(loss.mean for loss in regions.losses.values()) + torch.cat(regions.features).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return call


def _measure(
    calls: dict[str, Callable[[], Any]], repetitions: int, warm_up: int, device: torch.device, label: str
) -> dict[str, Any]:
    """`times` of each backend and, with both, their `ratio`."""
    times = spread(take_turns(calls, repetitions, warm_up, device, label))
    if len(times) < 2:
        return {"times": times}
    ours, theirs = times.values()
    return {"times": times, "ratio": theirs["median"] / ours["median"]}


def show(result: dict[str, Any]) -> int:
    """Print a short table; returns the exit status."""
    settings = result["settings"]
    height, width = settings["image_size"]
    print_machine(result["machine"])
    print(f"{settings['config']}, {settings['images']} x {height} x {width} pixels, float32")
    for name, case in result["cases"].items():
        for backend, times in case["times"].items():
            print(f"  {name:14s} {backend:12s} {times['median']:8.3f} s ({times['min']:.3f} .. {times['max']:.3f})")
        if "ratio" in case:
            print(f"  {name:14s} {'ratio':12s} {case['ratio']:8.3f}")
    if len(result["backends"]) < 2:
        print("Detectron2 is not installed: only the built-in detector was measured.")
    difference = result["max_feature_difference"]
    if difference is None or difference <= TOLERANCE:
        return 0
    print(f"The backends' features differ by {difference:.2g}.", file=sys.stderr)
    return 1
