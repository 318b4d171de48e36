"""Detections as a good but imperfect detector would give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic.scene_records import CATEGORIES, CATEGORY_IDS, CATEGORY_NAMES
from e2e_vl.synthetic.scenes import Scene, box_iou

_ATTEMPTS = 50


@dataclass(frozen=True)
class ImitatedDetectorConfig:
    """How the imitated detector errs.

    Raises:
        ValueError: a value is impossible; the message names it.
    """

    missed: float = 0.04  # share of objects without a detection
    wrong_category: float = 0.05  # share of detections with another category
    min_iou: float = 0.6  # smallest IoU of a detection with its object
    false_alarms: int = 3  # largest number of boxes per image that show no object
    max_false_iou: float = 0.4  # largest IoU of such a box with any object

    def __post_init__(self) -> None:
        for name in ("missed", "wrong_category", "min_iou", "max_false_iou"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"detections.{name} must lie in [0, 1]; found {getattr(self, name)}")
        if self.false_alarms < 0:
            raise UserError(f"detections.false_alarms must not be negative; found {self.false_alarms}")


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
        category = CATEGORY_IDS[scene.objects[i].look.shape]
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
