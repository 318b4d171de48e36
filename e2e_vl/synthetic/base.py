"""Base class of the format writers, and the scene records that they write."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from e2e_vl.synthetic.config import (
    COLOURS,
    SHAPES,
    SIZES,
    TEXTURES,
    ImitatedDetectorConfig,
    LanguageConfig,
    RenderingConfig,
    SceneConfig,
)
from e2e_vl.synthetic.language import Reference
from e2e_vl.synthetic.scenes import Appearance, Scene, SceneGraph, SceneObject, box_iou

CATEGORIES = [{"supercategory": "shape", "id": i, "name": name} for i, name in enumerate(SHAPES, start=1)]
ATTRIBUTES = [{"id": i, "name": name} for i, name in enumerate([*COLOURS, *TEXTURES, *SIZES])]
CATEGORY_NAMES = {entry["id"]: entry["name"] for entry in CATEGORIES}
CATEGORY_IDS = {name: category_id for category_id, name in CATEGORY_NAMES.items()}
_ATTRIBUTE_IDS = {entry["name"]: entry["id"] for entry in ATTRIBUTES}
_ATTEMPTS = 50
_BISECTIONS = 20
_MIN_IOU = 0.6  # of a detection with its object
_MAX_FALSE_IOU = 0.4  # of a false alarm with any object


@dataclass(frozen=True)
class Recipe:
    """All settings that decide the content of the files (see `make_scenes`), in their order in `synthetic.json`."""

    scenes: dict[str, int]
    seed: int
    image_format: str
    scene: SceneConfig
    language: LanguageConfig
    detections: ImitatedDetectorConfig
    rendering: RenderingConfig

    def generator(self, *names: str | int) -> np.random.Generator:
        """Return a random number generator that depends on the seed and these names and numbers only."""
        seeds = [self.seed]
        for name in names:
            seeds.append(name if isinstance(name, int) else zlib.crc32(name.encode()))
        return np.random.default_rng(seeds)


@dataclass(frozen=True)
class ScenePosition:
    """The position of a scene in the data set."""

    split: str
    number: int  # in its split, from 0
    image_id: int  # number among all splits, from 1
    image_file: Path  # named like an image of COCO train2014


@dataclass(frozen=True)
class ObjectRecord:
    """One object as COCO annotates it."""

    appearance: Appearance
    box: list[float]  # [x, y, width, height] of the visible part, pixels
    area: int  # number of visible pixels
    outlines: list[list[int]]  # per visible part x, y, x, y, ... in pixels (see `polygons`)

    @classmethod
    def from_object(cls, item: SceneObject) -> ObjectRecord:
        """Make the record of a drawn object."""
        x1, y1, x2, y2 = map(float, item.box)
        return cls(item.appearance, [x1, y1, x2 - x1, y2 - y1], item.area, polygons(item.visible))

    @property
    def category_id(self) -> int:
        """Id of its shape in `CATEGORIES`."""
        return CATEGORY_IDS[self.appearance.shape]

    @property
    def attribute_ids(self) -> list[int]:
        """Indices of its colour, texture and size in `ATTRIBUTES`."""
        look = self.appearance
        return [_ATTRIBUTE_IDS[value] for value in (look.colour, look.texture, look.size)]


@dataclass(frozen=True)
class SceneRecord(ScenePosition):
    """One scene as the writers see it, without its pixels."""

    size: tuple[int, int]  # (height, width), pixels
    objects: list[ObjectRecord]  # back to front
    references: list[Reference]  # about single objects; `target` is an index into `objects`
    without_target: list[Reference]  # about none
    captions: list[str]  # up to five true sentences
    detections: list[dict[str, Any]]  # what `draw_detections` returned
    drawn: Any  # what the `draw` of a writer returned
    first_annotation_id: int = 1  # of the first object, in the whole data set; the other objects follow
    first_sentence_id: int = 0  # of the first reference, in the whole data set; the others and `without_target` follow


class FormatWriter(ABC):
    """Writes one file format into a folder of its own.

    `draw` is called once per scene, perhaps in another process, and `write` once at the end. So a writer must be
    picklable and must not collect anything in `draw`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @classmethod
    def require_packages(cls) -> None:
        """Raise a MissingPackageError if an optional package that `write` needs is not installed."""
        return

    def draw(self, scene: SceneRecord, graph: SceneGraph) -> Any:
        """Draw what only this format needs about a scene; `write` finds it in `scene.drawn`.

        Random numbers must come from `self.recipe.generator(scene.split, scene.number, NAME)` with a name that no
        other format uses, so that no format changes the files of another. The ids of `scene` are not set yet.
        """
        return None

    @abstractmethod
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        """Write all files of the format into a folder of its name.

        `scenes`: the scenes of all splits, in the order of their image ids.
        """


def by_split(scenes: Iterable[SceneRecord]) -> dict[str, list[SceneRecord]]:
    """Return the scenes of each split that has any, in the order of their image ids."""
    splits: dict[str, list[SceneRecord]] = {}
    for scene in scenes:
        splits.setdefault(scene.split, []).append(scene)
    return splits


def write_compact(path: Path, content: Any) -> None:
    """Write JSON without whitespace."""
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def link_image(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def polygons(mask: np.ndarray) -> list[list[int]]:
    """Trace the outlines of a mask (bool [height, width]) along the edges of its pixels.

    Returns one flat list x, y, x, y, ... per part. Rasterised by pycocotools they give the mask back exactly; holes are
    left out, because COCO's polygons cannot have any.
    """
    # In the doubled mask a contour runs through the first or the second half of a pixel; rounding up after halving
    # moves it to the pixel's edge on that side.
    pixels = mask.view(np.uint8)
    x, y, w, h = cv2.boundingRect(pixels)
    doubled = cv2.resize(pixels[y : y + h, x : x + w], (2 * w, 2 * h), interpolation=cv2.INTER_NEAREST)
    contours, _ = cv2.findContours(doubled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    outlines = []
    for contour in contours:
        path = (contour[:, 0] + 1) // 2
        corners = _corners(path) + np.array([x, y])
        outlines.append(corners.ravel().tolist())
    return outlines


def _corners(path: np.ndarray) -> np.ndarray:
    """Return the points at which a closed path of axis-parallel steps turns, int [points, 2] -> int [corners, 2]."""
    steps = np.diff(path, axis=0, append=path[:1])
    moves = steps.any(axis=1)
    path = path[moves]
    directions = np.sign(steps[moves])
    turns = (np.diff(directions, axis=0, prepend=directions[-1:]) != 0).any(axis=1)
    return path[turns]


def draw_detections(scene: Scene, config: ImitatedDetectorConfig, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Draw detections as from an imperfect detector, at least one.

    Returns dicts of `box` [x, y, w, h] in pixels, `category_id`, `category_name` and `score`.
    """
    height, width = scene.image.shape[:2]
    size = (width, height)
    object_boxes = np.array([item.box for item in scene.objects], float)  # xyxy
    detected = np.flatnonzero(rng.random(len(object_boxes)) >= config.missed)
    if not len(detected):
        detected = np.arange(1)
    detections = []
    for i in detected:
        if config.iou is None:
            box = _jitter_box(object_boxes[i], size, rng)
        else:
            box = move_box(object_boxes[i], size, config.iou, rng)
        category = CATEGORY_IDS[scene.objects[i].appearance.shape]
        if rng.random() < config.wrong_category:
            category = CATEGORIES[rng.integers(len(CATEGORIES))]["id"]
        detections.append(_detection(box, category, rng.uniform(0.75, 1.0)))
    for _ in range(int(rng.integers(0, config.false_alarms + 1))):
        box = _draw_false_alarm(object_boxes, size, rng)
        if box is not None:
            category = CATEGORIES[rng.integers(len(CATEGORIES))]["id"]
            detections.append(_detection(box, category, rng.uniform(0.65, 0.9)))
    return detections


def _detection(box: np.ndarray, category: int, score: float) -> dict[str, Any]:
    x1, y1, x2, y2 = np.round(box, 4).tolist()
    return {
        "box": [x1, y1, round(x2 - x1, 4), round(y2 - y1, 4)],
        "category_id": category,
        "category_name": CATEGORY_NAMES[category],
        "score": round(float(score), 6),
    }


def _jitter_box(box: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    sides = np.tile(box[2:] - box[:2], 2)
    for _ in range(_ATTEMPTS):
        moved = np.clip(box + rng.normal(0, 0.06, 4) * sides, 0, np.tile(size, 2))
        if box_iou(moved, box) >= _MIN_IOU:
            return moved
    return box


def move_box(
    box: np.ndarray, size: tuple[int, int], iou_range: tuple[float, float], rng: np.random.Generator
) -> np.ndarray:
    """Move the edges of a box in random directions until its IoU with the original is in a range, drawn uniformly."""
    sides = np.tile(box[2:] - box[:2], 2)
    limits = np.tile(size, 2)
    lowest, highest = iou_range
    while True:
        target = rng.uniform(lowest, highest)
        direction = rng.normal(size=4) * sides
        nearest = 0.0
        farthest = 1.0
        for _ in range(_BISECTIONS):
            step = (nearest + farthest) / 2
            moved = np.clip(box + step * direction, 0, limits)
            is_box = (moved[2:] > moved[:2]).all()
            if is_box and box_iou(moved, box) >= target:
                nearest = step
            else:
                farthest = step
        moved = np.clip(box + nearest * direction, 0, limits)
        if lowest <= box_iou(moved, box) <= highest:
            return moved


def _draw_false_alarm(object_boxes: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray | None:
    sides = object_boxes[:, 2:] - object_boxes[:, :2]
    for _ in range(_ATTEMPTS):
        centre = rng.uniform(0, size)
        half = sides[rng.integers(len(sides))] * rng.uniform(0.7, 1.3, 2) / 2
        box = np.clip(np.concatenate([centre - half, centre + half]), 0, np.tile(size, 2))
        if (box[2:] - box[:2]).min() < 6:
            continue
        if max(box_iou(box, other) for other in object_boxes) <= _MAX_FALSE_IOU:
            return box
    return None
