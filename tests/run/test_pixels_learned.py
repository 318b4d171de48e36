"""LXMERT learns to name hidden regions from raw pixels, with the detector trained along.

Of each drawn thing four regions are given, its quarters, and what is hidden of them is hidden in the pixels. All texts
are alike, so the colour of a hidden quarter can be told from the visible pixels of the others and from nothing else.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from e2e_vl.config import RunConfig
from e2e_vl.data.batching import Request
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_collate, build_examples
from e2e_vl.run.checkpoint import load_model
from e2e_vl.structures import Batch
from e2e_vl.synthetic import make_scenes
from e2e_vl.synthetic.config import SceneConfig
from tests.run.test_objectives_learned import LOOKS, learned, on_saved_features

QUARTERS = np.array([[0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]], dtype=np.float32)
TYPES = (np.int64, np.float32, np.int64, np.float32)  # classes and attributes, each with its confidences
BOXES, FEATURES = 8, 9  # columns

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.timeout(600)]  # a machine may be busy


def in_quarters(line: str) -> str:
    """A line of a file of features with the four quarters of its first box, and what was found in that box."""
    cells = line.split("\t")

    def first(column: int, kind: type, width: int = 1) -> np.ndarray:
        return np.frombuffer(base64.b64decode(cells[column]), dtype=kind).reshape(-1, width)[:1]

    def write(column: int, values: np.ndarray) -> None:
        cells[column] = base64.b64encode(np.ascontiguousarray(values)).decode()

    box = first(BOXES, np.float32, 4)
    features = len(base64.b64decode(cells[FEATURES])) // (4 * int(cells[BOXES - 1]))
    for column, kind in enumerate(TYPES, start=3):
        write(column, first(column, kind).repeat(4, axis=0))
    write(FEATURES, first(FEATURES, np.float32, features).repeat(4, axis=0))
    corner, size = np.tile(box[:, :2], 2), np.tile(box[:, 2:] - box[:, :2], 2)
    write(BOXES, corner + QUARTERS * size)
    cells[BOXES - 1] = "4"
    return "\t".join(cells)


@pytest.fixture(scope="module")
def quarters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of one thing each, in quarters, with the same caption about all."""
    folder = tmp_path_factory.mktemp("quarters") / "data"
    config = SceneConfig(min_objects=1, max_objects=1, **LOOKS)
    make_scenes(folder, scenes={"train": 200, "val": 100}, config=config, formats=["lxmert"])
    for split in ("train", "val"):
        features, sentences = (folder / "lxmert" / f"{split}{end}" for end in ("_obj36.tsv", ".json"))
        features.write_text("\n".join(map(in_quarters, features.read_text().splitlines())) + "\n")
        images = json.loads(sentences.read_text())
        sentences.write_text(json.dumps([{**one, "sentf": {"mscoco": ["A shape."]}, "labelf": {}} for one in images]))
    return folder


def from_pixels(data: Path, output: Path, *words: str) -> RunConfig:
    return on_saved_features(
        *(data, output),
        "attribute_labels: {weight: 1.0, regions: masked}",
        "detector.backend=builtin",
        "task.config={region_probability: 0.3, mask_pixels: true}",
        "data={files: {images: images/train2014}, boxes: {train: detections}, texts_per_image: 1}",
        "data.files.detections=lxmert/{split}_obj36.tsv",
        "data.boxes.selection={min_score: 0.0, min_regions: 4, max_regions: 4}",
        "data.resize={short_edge: [64], long_edge: 64}",
        "eval.boxes=[detections]",
        "encoder.config={masked_region_feature: false, x_layers: 1, initializer_range: 0.08}",
        "train={images_per_batch: 16, max_steps: 160, lr: 2.0e-3, detector_lr: 2.0e-3, keep_best: null}",
        *words,
    )


def share_found(config: RunConfig, change: Callable[[Batch], Batch]) -> tuple[float, VisionLanguageModel, Batch]:
    """Of the hidden regions of the validation scenes, in changed batches; with the model and the last batch."""
    config, model, tokenizer = load_model(Path(config.output))
    data = build_examples(config, model, tokenizer, "val", boxes="detections")
    collate = build_collate(config, model)
    right, count = 0, 0
    for first in range(0, len(data.groups), 25):
        batch = collate([data[Request(number, tuple(data.groups[number]))] for number in range(first, first + 25)])
        with torch.no_grad():
            details = model(change(batch)).task.details
        right += int(details["attribute_labels_right"].sum())
        count += int(details["attribute_labels"].sum())
    return right / count, model, batch


def without_pixels(batch: Batch) -> Batch:
    return dataclasses.replace(
        batch, images=dataclasses.replace(batch.images, pixels=torch.zeros_like(batch.images.pixels))
    )


def test_colours_of_regions_hidden_in_the_pixels(quarters, tmp_path):
    config = from_pixels(quarters, tmp_path / "run")
    found, guessed = learned(config)["attribute_labels"]
    assert guessed < 0.4 and found > 0.7, (found, guessed)
    blind, model, batch = share_found(config, without_pixels)
    assert blind < 0.4, "what is found comes from the pixels"
    sum(loss.mean for loss in model.train()(batch).task.losses.values()).backward()
    first = next(model.detector.parameters())
    assert first.requires_grad and first.grad.abs().sum() > 0, "the detector learns from the hidden regions"
