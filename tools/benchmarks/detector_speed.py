"""How fast a detector is: the built-in one against Detectron2's model of the same config, weights and inputs.

Shape legend
    N   images of a batch
    R   given boxes of one image
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from detector.interface import Detector
from detector.structures import DetectionTargets, ImageBatch
from e2e_vl.engine.benchmark import machine_facts
from e2e_vl.engine.build import DETECTORS

OBJECTS = 8  # annotated objects of each image in the training step


def benchmark_detector(
    config: Path,
    *,
    image_size: tuple[int, int] = (600, 1000),
    images: int = 1,
    rois: Sequence[int] = (36, 100),
    repetitions: int = 5,
    warm_up: int = 1,
    training: bool = True,
    sampled_rois: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """Time features of given boxes, and training steps, in float32; the backends take turns.

    A training step is a forward pass with detection losses and features of the given boxes, the backward pass of both,
    and an SGD step. Images and boxes are random: the time does not depend on what they show. Without Detectron2 only
    the built-in detector is measured.

    Args:
        config: Detectron2 YAML file of a C4 model.
        image_size: (height, width), pixels of the network input.
        images: N.
        rois: numbers of given boxes R, one measurement each; the training step has the first.
        repetitions, warm_up: measured calls of each backend, and calls before them.
        training: also measure training steps, with `sampled_rois` RoIs of each image for the detection losses.

    Returns:
        `machine`, `settings`, `backends`, `cases` (one per name, e.g. "features_36" or "train": `times` of each
        backend in seconds and, with both backends, `ratio` = Detectron2's median / ours, above 1 = ours is faster), and
        `max_feature_difference` relative to the largest feature.
    """
    if repetitions < 1 or warm_up < 0 or images < 1 or not rois or min(rois) < 1:
        raise ValueError("Repetitions, images and boxes must be positive numbers.")
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    detectors = make_detectors(config, sampled_rois)
    for detector in detectors.values():
        detector.to(device)
    detectors["builtin"].to(memory_format=torch.channels_last)  # as `train.channels_last` does; Detectron2 as it comes
    batch = random_images(images, image_size).to(device)
    cases: dict[str, dict[str, Callable[[], Any]]] = {}
    for number in rois:
        boxes = random_boxes(images, number, image_size, device)
        cases[f"features_{number}"] = {
            name: _feature_call(detector, batch, boxes) for name, detector in detectors.items()
        }
    difference = None
    if len(detectors) == 2:
        ours, theirs = (call() for call in cases[f"features_{rois[0]}"].values())
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    results = {name: _measure(calls, repetitions, warm_up, device, name) for name, calls in cases.items()}
    if training:
        boxes = random_boxes(images, rois[0], image_size, device)
        calls = {name: _training_call(detector, batch, boxes) for name, detector in detectors.items()}
        results["train"] = _measure(calls, repetitions, warm_up, device, "train")
    return {
        "machine": machine_facts(device),
        "settings": {
            "config": config.name,
            "image_size": list(image_size),
            "images": images,
            "sampled_rois": sampled_rois,
            "repetitions": repetitions,
            "warm_up": warm_up,
            "seed": seed,
        },
        "backends": list(detectors),
        "cases": results,
        "max_feature_difference": difference,
    }


def make_detectors(config: Path, sampled_rois: int) -> dict[str, Detector]:
    """The built-in detector and, where it can be imported, Detectron2's with the same weights."""
    tree = {"_BASE_": str(config.resolve()), "MODEL": {"ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": sampled_rois}}}
    detectors: dict[str, Detector] = {}
    for name in ("builtin", "detectron2"):
        try:
            detector_class = DETECTORS[name]()
        except ValueError:  # not installed
            continue
        detectors[name] = detector_class(detector_class.config_class.from_yaml(tree))
    if "detectron2" in detectors:
        detectors["detectron2"].load_state_dict(detectors["builtin"].state_dict())
    return detectors


def random_images(number: int, size: tuple[int, int]) -> ImageBatch:
    sizes = torch.tensor([size] * number)
    pixels = torch.randn(number, 3, *size) * 50
    return ImageBatch(pixels, sizes, sizes, [f"image {index}" for index in range(number)])


def random_boxes(images: int, number: int, size: tuple[int, int], device: torch.device) -> list[Tensor]:
    """Boxes with sides of 10 to 50 % of the image's sides."""
    height, width = size
    scale = torch.tensor([width, height, width, height], dtype=torch.float32)
    corners = torch.rand(images, number, 2) * 0.5
    sides = 0.1 + torch.rand(images, number, 2) * 0.4
    return list((torch.cat([corners, corners + sides], dim=2) * scale).to(device))


def _feature_call(detector: Detector, batch: ImageBatch, boxes: list[Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        detector.eval()
        with torch.no_grad():
            return torch.cat(detector(batch, boxes).features)

    return call


def _training_call(detector: Detector, batch: ImageBatch, boxes: list[Tensor]) -> Callable[[], None]:
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
    """Seconds of every call; the backends take turns, and so does the one that begins."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in tqdm(range(warm_up + repetitions), desc=label, leave=False):
        for name in list(calls) if repetition % 2 == 0 else list(calls)[::-1]:
            _synchronize(device)
            started = time.perf_counter()
            calls[name]()
            _synchronize(device)
            if repetition >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "times": {
            name: {"median": medians[name], "min": min(values), "max": max(values), "all": values}
            for name, values in seconds.items()
        }
    }
    if len(medians) == 2:
        result["ratio"] = medians["detectron2"] / medians["builtin"]
    return result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
