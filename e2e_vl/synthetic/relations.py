"""What is true of a scene's objects, and clearly so.

Every fact has three values: true, false, or unclear when a person could hesitate. Sets of objects are bit masks
(bit i is object i), so that a description is one ``&`` and counting is one ``bit_count``.
"""

from __future__ import annotations

import cv2
import numpy as np

from e2e_vl.synthetic.scenes import Scene

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
        self.looks = [item.look for item in objects]
        self.everything = (1 << self.count) - 1
        self.attribute_masks: dict[tuple[str, str], int] = {}
        for i, look in enumerate(self.looks):
            for slot in ("shape", "colour", "texture", "size"):
                key = (slot, getattr(look, slot))
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
