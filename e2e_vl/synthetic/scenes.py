"""Drawn scenes: objects that differ in shape, colour, size and texture, partly occluded, on a textured ground.

Objects are painted in order, later ones over earlier ones. An object's mask and box cover its visible part only, as in
COCO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import cv2
import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic import painting
from e2e_vl.synthetic.config import SceneConfig

_ATTEMPTS_PER_OBJECT = 40
_ATTEMPTS_PER_SCENE = 200
_MAX_ROTATION = 0.2  # radians; less than a square needs to look like a diamond
_MIN_VISIBLE_SIDE = 0.85  # share of an object's longer side: a big object never shrinks to a small one's box
_MIN_OVERLAP = 0.04  # share of the smaller object: objects overlap visibly or keep apart, never graze
_MIN_GAP = 3  # pixels between objects that keep apart


@dataclass(frozen=True)
class Appearance:
    """The four attributes that words can name."""

    shape: str
    colour: str
    texture: str
    size: str  # "small" or "big"


@dataclass(frozen=True, eq=False)
class SceneObject:
    """One object of a scene."""

    appearance: Appearance
    extent: float  # longer side of its unoccluded outline, pixels
    full: np.ndarray  # bool [height, width], its pixels before anything was painted over it
    visible: np.ndarray  # bool [height, width], its pixels that can be seen
    box: tuple[int, int, int, int]  # xyxy around the visible pixels, edges of pixels, so x2 - x1 is the width

    @property
    def area(self) -> int:
        """Number of visible pixels."""
        return int(np.count_nonzero(self.visible))

    @property
    def visible_extent(self) -> int:
        """Longer side of the box, pixels."""
        return max(self.box[2] - self.box[0], self.box[3] - self.box[1])


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and its objects."""

    image: np.ndarray  # uint8 [height, width, 3], RGB
    objects: list[SceneObject]  # in the order of painting: later objects lie in front of earlier ones


def draw_scene(config: SceneConfig, rng: np.random.Generator) -> Scene:
    """Draw one scene; the same generator state gives the same scene.

    Raises:
        ValueError: the objects do not fit into a scene of this size.
    """
    h, w = (int(side) for side in rng.integers(config.min_side, config.max_side + 1, 2))
    count = int(rng.integers(config.min_objects, config.max_objects + 1))
    for _ in range(_ATTEMPTS_PER_SCENE):
        placed = _place_objects(config, h, w, count, rng)
        if placed is not None:
            break
    else:
        raise UserError(
            f"{count} objects do not fit into a scene of {w} x {h} pixels: use fewer or smaller objects, a larger "
            "scene, or a lower scene.min_visible"
        )
    image = painting.paint_background(h, w, rng)
    for item, patch in placed:
        painting.paint(image, patch, item.appearance.colour, item.appearance.texture, rng)
    image += rng.standard_normal((h, w), np.float32)[..., None] * 2.5
    image = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return Scene(image=image, objects=[item for item, _ in placed])


def _place_objects(
    config: SceneConfig, h: int, w: int, count: int, rng: np.random.Generator
) -> list[tuple[SceneObject, painting.Patch]] | None:
    """Looks and places of all objects, or None when one of them found no place."""
    objects: list[SceneObject] = []
    patches: list[painting.Patch] = []
    for _ in range(count):
        appearance = _draw_look(config, [item.appearance for item in objects], rng)
        extent = float(rng.uniform(*(config.small if appearance.size == "small" else config.big)))
        points = painting.outline(appearance.shape, extent, rng.uniform(-_MAX_ROTATION, _MAX_ROTATION))
        for _ in range(_ATTEMPTS_PER_OBJECT):
            centre = _draw_centre(config, h, w, points, objects, rng)
            if centre is None or _boxes_overlap_too_much(points, centre, objects, config.max_box_iou):
                continue
            patch = painting.cover(points, centre)
            full = np.zeros((h, w), bool)
            (x0, y0), (ph, pw) = patch[2], patch[0].shape
            full[y0 : y0 + ph, x0 : x0 + pw] = patch[0] >= 0.5
            updated = _put_in_front(objects, SceneObject(appearance, extent, full, full, _tight_box(full)), config)
            if updated is not None:
                objects = updated
                patches.append(patch)
                break
        else:
            return None
    return list(zip(objects, patches, strict=True))


def _draw_look(config: SceneConfig, earlier: list[Appearance], rng: np.random.Generator) -> Appearance:
    if not earlier or rng.random() >= config.share:
        return Appearance(**{name: values[rng.integers(len(values))] for name, values in config.values.items()})
    appearance = earlier[rng.integers(len(earlier))]
    if rng.random() < config.twin:
        return appearance
    choices = list(config.values.items())
    for i in rng.permutation(len(choices))[: rng.integers(1, 3)]:
        name, values = choices[i]
        others = [value for value in values if value != getattr(appearance, name)]
        if others:
            appearance = replace(appearance, **{name: others[rng.integers(len(others))]})
    return appearance


def _draw_centre(
    config: SceneConfig, h: int, w: int, points: np.ndarray, objects: list[SceneObject], rng: np.random.Generator
) -> tuple[float, float] | None:
    """A centre (x, y) that keeps the whole outline inside the scene, or None."""
    margin_x, margin_y = points.max(axis=0) + 2
    if objects and rng.random() < config.touch:
        other = objects[rng.integers(len(objects))]
        x1, y1, x2, y2 = other.box
        reach = (points.max() + other.extent / 2) * rng.uniform(0.6, 1.2)
        angle = rng.uniform(0, 2 * np.pi)
        x, y = (x1 + x2) / 2 + reach * np.cos(angle), (y1 + y2) / 2 + reach * np.sin(angle)
    else:
        x, y = rng.uniform(margin_x, w - margin_x), rng.uniform(margin_y, h - margin_y)
    inside = margin_x <= x <= w - margin_x and margin_y <= y <= h - margin_y
    return (float(x), float(y)) if inside else None


def _boxes_overlap_too_much(
    points: np.ndarray, centre: tuple[float, float], objects: list[SceneObject], limit: float
) -> bool:
    """A cheap check before anything is rasterised."""
    (x1, y1), (x2, y2) = points.min(axis=0) + centre, points.max(axis=0) + centre
    return any(box_iou((x1, y1, x2, y2), item.box) > limit for item in objects)


def _put_in_front(objects: list[SceneObject], new: SceneObject, config: SceneConfig) -> list[SceneObject] | None:
    """The objects with ``new`` in front of them all, or None when that hides too much or leaves an unclear contact."""
    updated = []
    reach = _MIN_GAP
    nx1, ny1, nx2, ny2 = new.box
    window = (slice(max(ny1 - reach, 0), ny2 + reach), slice(max(nx1 - reach, 0), nx2 + reach))
    grown = cv2.dilate(new.full[window].view(np.uint8), np.ones((2 * reach + 1,) * 2, np.uint8)) > 0
    for item in objects:
        overlap = np.count_nonzero(item.full[window] & new.full[window])
        if overlap == 0:
            if (grown & item.full[window]).any():
                return None
            updated.append(item)
            continue
        full_area = np.count_nonzero(item.full)
        if overlap < _MIN_OVERLAP * min(full_area, new.area) or overlap > 0.75 * new.area:
            return None
        visible = item.visible & ~new.full
        if np.count_nonzero(visible) < config.min_visible * full_area:
            return None
        item = replace(item, visible=visible, box=_tight_box(visible))
        if item.visible_extent < _MIN_VISIBLE_SIDE * item.extent:
            return None
        updated.append(item)
    updated.append(new)
    is_crowded = any(box_iou(one.box, other.box) > config.max_box_iou for one, other in combinations(updated, 2))
    return None if is_crowded else updated


def _tight_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    x, y, w, h = cv2.boundingRect(mask.view(np.uint8))
    return x, y, x + w, y + h


def box_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """IoU of two boxes (x1, y1, x2, y2)."""
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    inter = w * h
    return inter / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter)


# What is true of a scene's objects, and clearly so.


# Thresholds, all on what can be seen.
BIGGER_SIDE, BIGGER_AREA = 1.15, 1.2  # clearly bigger: the ratios of the longer sides and of the areas, at least
NOT_BIGGER = 0.95  # clearly not bigger: both ratios, at most
NEAR, NOT_NEAR = 6.0, 13.0  # clearly near: gap in pixels, at most; clearly not near: at least
CLOSER = 1.3  # clearly closer: the ratio of the distances between centres, at least
CLOSER_GAP = 4.0  # clearly closer: the difference of the gaps in pixels, at least
CONTACT = 1.5  # objects that touch: gap in pixels, at most


class SceneFacts:
    """Attributes, sizes, distances and overlaps of a scene's objects.

    Attributes:
        count: number of objects, n.
        looks: their looks.
        everything: bit mask of all objects.
        attribute_masks: (slot, value) -> bit mask, for example ("colour", "red").
        gap: float [n, n], pixels between the visible pixels of two objects; neighbouring pixels are 1 apart.
        distance: float [n, n], pixels between the centres of two boxes.
        holds, fails: relation -> per anchor, the bit mask of the objects that clearly stand, or clearly do not stand,
            in that relation to it. Relations: bigger, smaller, near, overlapping, in front, behind.
    """

    def __init__(self, scene: Scene) -> None:
        objects = scene.objects
        self.count = len(objects)
        self.appearances = [item.appearance for item in objects]
        self.everything = (1 << self.count) - 1
        self.attribute_masks: dict[tuple[str, str], int] = {}
        for i, appearance in enumerate(self.appearances):
            for slot in ("shape", "colour", "texture", "size"):
                key = (slot, getattr(appearance, slot))
                self.attribute_masks[key] = self.attribute_masks.get(key, 0) | 1 << i

        self.gap = _gaps(scene)
        box = np.array([item.box for item in objects], float)
        centre = (box[:, :2] + box[:, 2:]) / 2
        self.distance = np.linalg.norm(centre[:, None] - centre[None], axis=2)

        tables = self._size_tables(scene) | self._overlap_tables(scene)
        tables["near"] = (self.gap <= NEAR, self.gap >= NOT_NEAR)
        self.holds = {name: _columns(true) for name, (true, _) in tables.items()}
        self.fails = {name: _columns(false) for name, (_, false) in tables.items()}

    @staticmethod
    def _size_tables(scene: Scene) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        extent = np.array([item.extent for item in scene.objects])
        visible_extent = np.array([item.visible_extent for item in scene.objects], float)
        area = np.array([item.area for item in scene.objects], float)
        ratios = np.stack([values[:, None] / values[None] for values in (extent, visible_extent, area)])
        limits = np.array([BIGGER_SIDE, BIGGER_SIDE, BIGGER_AREA])[:, None, None]
        bigger, not_bigger = (ratios >= limits).all(axis=0), (ratios <= NOT_BIGGER).all(axis=0)
        return {"bigger": (bigger, not_bigger), "smaller": (bigger.T, not_bigger.T)}

    def _overlap_tables(self, scene: Scene) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        painted_over = _painted_over(scene)
        contact = self.gap <= CONTACT
        in_front = painted_over & contact
        behind = in_front.T
        apart = ~(painted_over | painted_over.T)
        return {
            "in front": (in_front, apart | behind),
            "behind": (behind, apart | in_front),
            "overlapping": (in_front | behind, apart),
        }

    def extreme(self, candidates: int, anchor: int, far: bool) -> int | None:
        """The candidate clearly closest to the anchor, or clearly farthest from it; None when there is none."""
        items = members(candidates)
        if not items:
            return None
        distance, gap = self.distance[anchor], self.gap[anchor]
        best = (max if far else min)(items, key=lambda i: distance[i])
        for other in items:
            if other == best:
                continue
            near_one, far_one = (other, best) if far else (best, other)
            if distance[far_one] < CLOSER * distance[near_one] or gap[far_one] < gap[near_one] + CLOSER_GAP:
                return None
        return best


def members(mask: int) -> list[int]:
    """Indices of the set bits, ascending."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _columns(table: np.ndarray) -> list[int]:
    """bool [n, n] -> n bit masks; bit i of mask j is table[i, j]. The diagonal is left out."""
    return [sum(1 << int(i) for i in np.flatnonzero(column) if i != j) for j, column in enumerate(table.T)]


def _gaps(scene: Scene) -> np.ndarray:
    """Distances between the visible pixels of every two objects, float [n, n], within 2 per cent;
    neighbouring pixels are 1 apart."""
    n = len(scene.objects)
    gaps = np.zeros((n, n))
    pixels = [np.flatnonzero(item.visible) for item in scene.objects]
    for i, item in enumerate(scene.objects[:-1]):
        distance = cv2.distanceTransform((~item.visible).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5).ravel()
        for j in range(i + 1, n):
            gaps[i, j] = gaps[j, i] = distance[pixels[j]].min()
    return gaps


def _painted_over(scene: Scene) -> np.ndarray:
    """bool [n, n]: object i is painted over a part of object j."""
    n = len(scene.objects)
    shared = np.zeros((n, n), bool)
    for j, item in enumerate(scene.objects):
        pixels = np.flatnonzero(item.full)
        for i in range(j + 1, n):
            shared[i, j] = scene.objects[i].full.ravel()[pixels].any()
    return shared
