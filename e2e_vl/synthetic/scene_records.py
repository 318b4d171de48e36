"""What every format is written from: the names and ids of a data set, and one record per scene without its pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import cv2
import numpy as np

from e2e_vl.synthetic.references import Reference
from e2e_vl.synthetic.scenes import COLOURS, SHAPES, SIZES, TEXTURES, Look, SceneObject

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

    look: Look
    box: list[float]  # [x, y, width, height] of the visible part, pixels
    area: int  # number of visible pixels
    outlines: list[list[int]]  # per visible part x, y, x, y, ... in pixels (see ``polygons``)

    @classmethod
    def of(cls, item: SceneObject) -> ObjectRecord:
        """The record of a drawn object."""
        x1, y1, x2, y2 = item.box
        return cls(item.look, [float(x1), float(y1), float(x2 - x1), float(y2 - y1)], item.area, polygons(item.visible))

    @property
    def category_id(self) -> int:
        """Id of its shape in ``CATEGORIES``."""
        return CATEGORY_IDS[self.look.shape]

    @property
    def attribute_ids(self) -> list[int]:
        """Indices of its colour, texture and size in ``ATTRIBUTES``."""
        return [_ATTRIBUTE_IDS[value] for value in (self.look.colour, self.look.texture, self.look.size)]


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
