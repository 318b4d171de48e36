"""The interface of the classes that write one file format each, and the settings that decide what they write."""

from __future__ import annotations

import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import cv2
import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic.config import (
    COLOURS,
    SHAPES,
    SIZES,
    TEXTURES,
    ImitatedDetectorConfig,
    LanguageConfig,
    SceneConfig,
)
from e2e_vl.synthetic.language import Reference
from e2e_vl.synthetic.scenes import Appearance, Scene, SceneFacts, SceneObject, box_iou

# What every format is written from: the names and ids of a data set, and one record per scene without its pixels.


Drawn = TypeVar("Drawn")
CATEGORIES = [{"supercategory": "shape", "id": i + 1, "name": name} for i, name in enumerate(SHAPES)]
ATTRIBUTES = [{"id": i, "name": name} for i, name in enumerate([*COLOURS, *TEXTURES, *SIZES])]
CATEGORY_NAMES = {entry["id"]: entry["name"] for entry in CATEGORIES}
CATEGORY_IDS = {name: category_id for category_id, name in CATEGORY_NAMES.items()}
_ATTRIBUTE_IDS = {entry["name"]: entry["id"] for entry in ATTRIBUTES}


@dataclass(frozen=True)
class ScenePlace:
    """The place of a scene in the data set."""

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
    outlines: list[list[int]]  # per visible part x, y, x, y, ... in pixels (see ``polygons``)

    @classmethod
    def of(cls, item: SceneObject) -> ObjectRecord:
        """The record of a drawn object."""
        x1, y1, x2, y2 = item.box
        return cls(
            item.appearance, [float(x1), float(y1), float(x2 - x1), float(y2 - y1)], item.area, polygons(item.visible)
        )

    @property
    def category_id(self) -> int:
        """Id of its shape in ``CATEGORIES``."""
        return CATEGORY_IDS[self.appearance.shape]

    @property
    def attribute_ids(self) -> list[int]:
        """Indices of its colour, texture and size in ``ATTRIBUTES``."""
        return [
            _ATTRIBUTE_IDS[value] for value in (self.appearance.colour, self.appearance.texture, self.appearance.size)
        ]


@dataclass(frozen=True)
class SceneRecord(ScenePlace, Generic[Drawn]):
    """One scene as the writers see it."""

    size: tuple[int, int]  # (height, width), pixels
    objects: list[ObjectRecord]  # back to front
    references: list[Reference]  # about single objects; ``target`` is an index into ``objects``
    captions: list[str]  # up to five true sentences
    detections: list[dict[str, Any]]  # what ``draw_detections`` returned
    drawn: Drawn  # what the ``draw`` of a writer returned
    first_annotation_id: int = 1  # of the first object, in the whole data set; the other objects follow
    first_sentence_id: int = 0  # of the first reference, in the whole data set; the other references follow


def with_ids(records: Iterable[SceneRecord[Drawn]]) -> Iterator[SceneRecord[Drawn]]:
    """The records, in the order of their image ids, with the ids of their annotations and sentences."""
    annotation_id, sentence_id = 1, 0
    for record in records:
        yield replace(record, first_annotation_id=annotation_id, first_sentence_id=sentence_id)
        annotation_id += len(record.objects)
        sentence_id += len(record.references)


def by_split(scenes: Iterable[SceneRecord[Drawn]]) -> dict[str, list[SceneRecord[Drawn]]]:
    """The scenes of each split that has any, in the order of their image ids."""
    splits: dict[str, list[SceneRecord[Drawn]]] = {}
    for scene in scenes:
        splits.setdefault(scene.split, []).append(scene)
    return splits


def polygons(mask: np.ndarray) -> list[list[int]]:
    """Outlines of a mask (bool [height, width]) along the edges of its pixels, per part one flat list x, y, x, y, ...

    Rasterised by pycocotools they give the mask back exactly; holes are left out, because COCO's polygons cannot have
    any.
    """
    # In the doubled picture a contour runs through the first or the second half of a pixel; rounding up after halving
    # moves it to the pixel's edge on that side.
    x, y, w, h = cv2.boundingRect(mask.view(np.uint8))
    doubled = cv2.resize(mask[y : y + h, x : x + w].view(np.uint8), (2 * w, 2 * h), interpolation=cv2.INTER_NEAREST)
    contours, _ = cv2.findContours(doubled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    origin = np.array([x, y])
    return [(_corners((contour[:, 0] + 1) // 2) + origin).ravel().tolist() for contour in contours]


def _corners(path: np.ndarray) -> np.ndarray:
    """The points of a closed path of axis-parallel steps at which it turns, int [points, 2] -> int [corners, 2]."""
    steps = np.diff(path, axis=0, append=path[:1])
    moved = steps.any(axis=1)
    path, steps = path[moved], np.sign(steps[moved])
    turned = (np.diff(steps, axis=0, prepend=steps[-1:]) != 0).any(axis=1)
    return path[turned]


# Detections as a good but imperfect detector would give them.


_ATTEMPTS = 50


def draw_detections(scene: Scene, config: ImitatedDetectorConfig, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Detections of a scene, at least one: ``box`` [x, y, w, h] in pixels, ``category_id``, its name and ``score``."""
    size = scene.image.shape[1], scene.image.shape[0]
    truth = np.array([item.box for item in scene.objects], float)
    found = np.flatnonzero(rng.random(len(truth)) >= config.missed)
    if not len(found):
        found = np.arange(1)
    detections = []
    for i in found:
        box = _jittered(truth[i], size, config.min_iou, rng)
        category = CATEGORY_IDS[scene.objects[i].appearance.shape]
        if rng.random() < config.wrong_category:
            category = CATEGORIES[rng.integers(len(CATEGORIES))]["id"]
        detections.append(_record(box, category, rng.uniform(0.75, 1.0)))
    for _ in range(int(rng.integers(0, config.false_alarms + 1))):
        box = _elsewhere(truth, size, config.max_false_iou, rng)
        if box is not None:
            category = CATEGORIES[rng.integers(len(CATEGORIES))]["id"]
            detections.append(_record(box, category, rng.uniform(0.65, 0.9)))
    return detections


def _record(box: np.ndarray, category: int, score: float) -> dict[str, Any]:
    x1, y1, x2, y2 = np.round(box, 4)
    return {
        "box": [float(x1), float(y1), round(float(x2 - x1), 4), round(float(y2 - y1), 4)],
        "category_id": category,
        "category_name": CATEGORY_NAMES[category],
        "score": round(float(score), 6),
    }


def _jittered(box: np.ndarray, size: tuple[int, int], min_iou: float, rng: np.random.Generator) -> np.ndarray:
    sides = np.tile(box[2:] - box[:2], 2)
    for _ in range(_ATTEMPTS):
        moved = _clipped(box + rng.normal(0, 0.06, 4) * sides, size)
        if box_iou(moved, box) >= min_iou:
            return moved
    return box


def _elsewhere(truth: np.ndarray, size: tuple[int, int], max_iou: float, rng: np.random.Generator) -> np.ndarray | None:
    sides = truth[:, 2:] - truth[:, :2]
    for _ in range(_ATTEMPTS):
        centre = rng.uniform(0, size)
        half = sides[rng.integers(len(sides))] * rng.uniform(0.7, 1.3, 2) / 2
        box = _clipped(np.concatenate([centre - half, centre + half]), size)
        if (box[2:] - box[:2]).min() >= 6 and max(box_iou(box, other) for other in truth) <= max_iou:
            return box
    return None


def _clipped(box: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.clip(box, 0, np.tile(size, 2))


IMAGE_FORMATS = {"jpg": [cv2.IMWRITE_JPEG_QUALITY, 95], "png": [cv2.IMWRITE_PNG_COMPRESSION, 3]}


@dataclass(frozen=True)
class Recipe:
    """All settings that decide the content of the files (see ``make_scenes``), in their order in ``synthetic.json``.

    Raises:
        ValueError: a value is impossible; the message names it.
    """

    scenes: dict[str, int]
    seed: int
    image_format: str
    scene: SceneConfig
    language: LanguageConfig
    detections: ImitatedDetectorConfig

    def __post_init__(self) -> None:
        if sum(self.scenes.values()) < 1 or min(self.scenes.values()) < 0 or not all(self.scenes):
            raise UserError(
                f"scenes must name splits and their numbers of scenes, at least 1 in all; found {self.scenes}"
            )
        if self.seed < 0:
            raise UserError(f"seed must not be negative; found {self.seed}")
        if self.image_format not in IMAGE_FORMATS:
            raise UserError(f"image_format must be one of {', '.join(IMAGE_FORMATS)}; found {self.image_format!r}")

    def places(self, folder: Path) -> list[ScenePlace]:
        """The places of all scenes, in the order of their image ids; their images lie in ``folder``."""
        numbered = [(split, number) for split, count in self.scenes.items() for number in range(count)]
        return [
            ScenePlace(split, number, image_id, folder / f"COCO_train2014_{image_id:012d}.{self.image_format}")
            for image_id, (split, number) in enumerate(numbered, start=1)
        ]

    def generator(self, *names: str | int) -> np.random.Generator:
        """A random number generator that depends on the seed and these names and numbers only."""
        numbers = [name if isinstance(name, int) else zlib.crc32(name.encode()) for name in names]
        return np.random.default_rng([self.seed, *numbers])


class FormatWriter(ABC, Generic[Drawn]):
    """Writes one file format into a folder of its own.

    ``draw`` is called once per scene, perhaps in another process, and ``write`` once at the end. So a writer must be
    picklable and must not collect anything in ``draw``.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def draw(self, scene: SceneRecord[Any], facts: SceneFacts) -> Drawn:
        """What is drawn about a scene for this format alone; ``write`` finds it in ``scene.drawn``.

        Random numbers must come from ``self.recipe.generator(scene.split, scene.number, NAME)`` with a name that is not
        used by another format, so that no format changes the files of another. The ids of ``scene`` are not set yet.
        A format that draws nothing of its own keeps this method.
        """
        return None

    @abstractmethod
    def write(self, folder: Path, scenes: Sequence[SceneRecord[Drawn]]) -> dict[str, Any] | None:
        """Write all files of the format.

        Args:
            folder: an existing folder, named after the format.
            scenes: the scenes of all splits, in the order of their image ids (see ``by_split``).

        Returns:
            statistics for ``synthetic.json``, where they stand under the format's name; None for none.
        """


def link_image(source: Path, target: Path) -> None:
    """A hard link, or a copy where the disk has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
