"""What the comparisons with arrays recorded from stock Detectron2 share: the set, and the stages run on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from detector.boxes import is_larger
from detector.checkpoint import load_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import TwoStageDetector
from detector.images import make_image_batch, normalise_images
from detector.structures import ImageBatch, Regions
from tests.parity.tolerances import NETWORK

BATCH_NORMS = ("BN", "SyncBN")


@dataclasses.dataclass
class GoldenSet:
    config: dict[str, Any]
    meta: dict[str, Any]
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]  # of all other files
    detector_class: type[TwoStageDetector]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def noise(self) -> float:
        """Factor of the tolerances in training mode."""
        config = DetectorConfig.from_yaml(self.config)
        norms = [config.fpn.norm, config.box_head.norm, config.resnet.norm if config.resnet.freeze_at < 5 else ""]
        return 10.0 if set(norms) & set(BATCH_NORMS) else 1.0

    @property
    def num_images(self) -> int:
        return len(self.meta["image_sizes_hw"])

    def of_images(self, pattern: str) -> list[Tensor]:
        """The tensors of all images; `pattern` has {} where the image number goes."""
        return [self[pattern.format(f"image{number}")] for number in range(self.num_images)]

    def rows(self, prefix: str, *names: str) -> list[Tensor]:
        return [self[prefix + name] for name in names]

    def description(self, name: str) -> str:
        return next(notes[name]["description"] for notes in self.meta["tensors"].values() if name in notes)

    def images(self, names: str = "input.{}.bgr_u8") -> ImageBatch:
        arrays = [image.numpy() for image in self.of_images(names)]
        config = DetectorConfig.from_yaml(self.config).input
        names = [f"image{number}" for number in range(self.num_images)]
        return normalise_images(make_image_batch(arrays, [array.shape[:2] for array in arrays], names), config)

    def detector(self, **keys: Any) -> TwoStageDetector:
        """A detector with the set's weights, in evaluation mode; `keys` (MODEL__X__Y=value) change the config."""
        tree = json.loads(json.dumps(self.config))
        for key, value in keys.items():
            node = tree
            *parents, leaf = key.split("__")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        model = self.detector_class(DetectorConfig.from_yaml(tree))
        load_weights(model, self.weights, "state_dict.safetensors")
        return model.eval()


def read_set(folder: Path, detector_class: type[TwoStageDetector]) -> GoldenSet:
    names = ("eval", "train", "mask", "resize", "extras")
    return GoldenSet(
        config=yaml.safe_load((folder / "config.yaml").read_text()),
        meta=json.loads((folder / "meta.json").read_text()),
        weights=load_file(folder / "state_dict.safetensors"),
        tensors={key: value for name in names for key, value in load_file(folder / f"{name}.safetensors").items()},
        detector_class=detector_class,
    )


def with_area(given: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The boxes that have an area, which `Detector.forward` demands, and their rows in the joined boxes."""
    rows = is_larger(torch.cat(given)).nonzero()[:, 0]
    return [boxes[is_larger(boxes)] for boxes in given], rows


def detections_of(regions: Regions, number: int) -> list[Tensor]:
    return [regions.boxes[number], regions.scores[number], regions.classes[number]]


def assert_same_rows(found: Sequence[Tensor], recorded: Sequence[Tensor], tolerance: float = NETWORK) -> Tensor:
    """Boxes, scores and, of detections, classes, by descending score; rounding may swap rows of nearly equal scores.

    Returns the row of `found` for each row of `recorded`.
    """
    boxes, scores, *_ = found
    assert boxes.shape == recorded[0].shape
    keys = [
        torch.cat([boxes, scores[:, None], *(1e4 * labels[:, None] for labels in classes)], dim=1).double()
        for boxes, scores, *classes in (found, recorded)
    ]
    rows: list[int] = []
    for distances in torch.cdist(keys[1], keys[0]):
        distances[rows] = torch.inf
        rows.append(int(distances.argmin()))
    assert (scores.diff() <= 0).all()
    assert_near(boxes[rows], recorded[0], tolerance)
    assert_near(scores[rows], recorded[1], tolerance)
    for labels, expected in zip(found[2:], recorded[2:], strict=True):
        assert torch.equal(labels[rows], expected)
    return torch.tensor(rows, dtype=torch.int64)


@pytest.fixture(scope="module")
def model(golden: GoldenSet) -> TwoStageDetector:
    return golden.detector()


@pytest.fixture(scope="module")
def images(golden: GoldenSet) -> ImageBatch:
    return golden.images()


@pytest.fixture(scope="module")
def sizes(images: ImageBatch) -> list[tuple[int, int]]:
    return [tuple(size) for size in images.sizes.tolist()]


@pytest.fixture(scope="module")
def features(model: TwoStageDetector, images: ImageBatch) -> Any:
    with torch.no_grad():
        return model.features(images)


@pytest.fixture(scope="module")
def rpn_output(model: TwoStageDetector, features: Any) -> Any:
    with torch.no_grad():
        return model.run_rpn(features)


@pytest.fixture(scope="module")
def given(golden: GoldenSet) -> list[Tensor]:
    return golden.of_images("given.{}.boxes")


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = NETWORK) -> None:
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    largest = expected.double().abs().max().item()
    worst = (actual.double() - expected.double()).abs().max().item()
    assert worst <= tolerance * largest, f"differs by {worst:.3g}; the largest value is {largest:.3g}"
