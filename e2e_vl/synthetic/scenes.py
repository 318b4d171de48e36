"""Synthetic scenes: objects that differ in shape, colour, size and texture, partly occluded, on a textured ground.

Objects are painted in order, later ones over earlier ones. An object's mask and box cover its visible part only, as in
COCO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import cv2
import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic.config import RenderingConfig, SceneConfig

_ATTEMPTS_PER_OBJECT = 40
_ATTEMPTS_PER_SCENE = 200
_MAX_ROTATION = 0.2  # radians; too little to turn a square into a diamond
_MIN_VISIBLE_SIDE = 0.85  # share of an object's longer side: a big object never shrinks to a small one's box
_MIN_OVERLAP = 0.04  # share of the smaller object: objects overlap visibly or keep apart, never graze
_MIN_GAP = 3  # pixels between objects that keep apart
_MIN_VISIBLE = 0.65  # smallest visible share of an object's pixels
MAX_BOX_IOU = 0.4  # of two objects; below 0.5, so that IoU 0.5 identifies one object
_REPEATS = 0.65  # chance that an object repeats attributes of an earlier one, which requires longer expressions
_REPEATS_ALL = 0.06  # chance that such an object repeats all of them
_TOUCHES = 0.4  # chance that an object is put close to or over an earlier one


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
    full: np.ndarray  # bool [height, width], its pixels before occlusion
    visible: np.ndarray  # bool [height, width], its visible pixels
    box: tuple[int, int, int, int]  # xyxy around the visible pixels, edges of pixels, so x2 - x1 is the width

    @property
    def area(self) -> int:
        """The number of its visible pixels."""
        return int(np.count_nonzero(self.visible))

    @property
    def visible_extent(self) -> int:
        """The longer side of its box, pixels."""
        x1, y1, x2, y2 = self.box
        return max(x2 - x1, y2 - y1)


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and its objects."""

    image: np.ndarray  # uint8 [height, width, 3], RGB
    objects: list[SceneObject]  # in the order of painting: later objects lie in front of earlier ones


def draw_scene(
    config: SceneConfig, rng: np.random.Generator, palette: Mapping[str, tuple[int, int, int]] | None = None
) -> Scene:
    """Draw one scene; the same generator state gives the same scene.

    `palette`: RGB values that replace some of `RGB`; they change nothing but the image.
    """
    colours = {**RGB, **(palette or {})}
    h, w = (int(side) for side in rng.integers(config.min_side, config.max_side + 1, 2))
    count = int(rng.integers(config.min_objects, config.max_objects + 1))
    for _ in range(_ATTEMPTS_PER_SCENE):
        objects_and_patches = _place_objects(config, h, w, count, rng)
        if objects_and_patches is not None:
            break
    else:
        raise UserError(
            f"{count} objects do not fit into a scene of {w} x {h} pixels: use fewer, smaller objects, or a larger one"
        )
    image = paint_background(h, w, rng)
    for item, patch in objects_and_patches:
        paint(image, patch, item.appearance.colour, item.appearance.texture, rng, colours)
    image += rng.standard_normal((h, w), np.float32)[..., None] * 2.5
    image = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return Scene(image=image, objects=[item for item, _ in objects_and_patches])


def _place_objects(
    config: SceneConfig, h: int, w: int, count: int, rng: np.random.Generator
) -> list[tuple[SceneObject, Patch]] | None:
    """Draw the appearance and position of all objects; None if one of them does not fit."""
    objects: list[SceneObject] = []
    patches: list[Patch] = []
    for _ in range(count):
        appearance = _draw_appearance(config, [item.appearance for item in objects], rng)
        low, high = config.small if appearance.size == "small" else config.big
        extent = float(rng.uniform(low, high))
        points = outline(appearance.shape, extent, rng.uniform(-_MAX_ROTATION, _MAX_ROTATION))
        for _ in range(_ATTEMPTS_PER_OBJECT):
            centre = _draw_centre(h, w, points, objects, rng)
            if centre is None:
                continue
            x1, y1 = points.min(axis=0) + centre
            x2, y2 = points.max(axis=0) + centre
            if any(box_iou((x1, y1, x2, y2), item.box) > MAX_BOX_IOU for item in objects):
                continue  # before anything is rasterised
            patch = cover(points, centre)
            fill, _, (x0, y0) = patch
            patch_height, patch_width = fill.shape
            full = np.zeros((h, w), bool)
            full[y0 : y0 + patch_height, x0 : x0 + patch_width] = fill >= 0.5
            new = SceneObject(appearance, extent, full, visible=full, box=_tight_box(full))
            updated = _put_in_front(objects, new)
            if updated is not None:
                objects = updated
                patches.append(patch)
                break
        else:
            return None
    return list(zip(objects, patches, strict=True))


def _draw_appearance(config: SceneConfig, earlier: list[Appearance], rng: np.random.Generator) -> Appearance:
    """Draw an appearance, often one that repeats some attributes of an earlier object."""
    if not earlier or rng.random() >= _REPEATS:
        return Appearance(**{slot: values[rng.integers(len(values))] for slot, values in config.values.items()})
    appearance = earlier[rng.integers(len(earlier))]
    if rng.random() < _REPEATS_ALL:
        return appearance
    slots = list(config.values)
    shuffled = rng.permutation(len(slots))
    for index in shuffled[: rng.integers(1, 3)]:
        slot = slots[index]
        others = [value for value in config.values[slot] if value != getattr(appearance, slot)]
        if others:
            appearance = replace(appearance, **{slot: others[rng.integers(len(others))]})
    return appearance


def _draw_centre(
    h: int, w: int, points: np.ndarray, objects: list[SceneObject], rng: np.random.Generator
) -> tuple[float, float] | None:
    """Draw a centre (x, y); None if it does not keep the whole outline inside the scene."""
    margin_x, margin_y = points.max(axis=0) + 2
    if objects and rng.random() < _TOUCHES:
        other = objects[rng.integers(len(objects))]
        x1, y1, x2, y2 = other.box
        reach = (points.max() + other.extent / 2) * rng.uniform(0.6, 1.2)
        angle = rng.uniform(0, 2 * np.pi)
        x = (x1 + x2) / 2 + reach * np.cos(angle)
        y = (y1 + y2) / 2 + reach * np.sin(angle)
    else:
        x = rng.uniform(margin_x, w - margin_x)
        y = rng.uniform(margin_y, h - margin_y)
    is_inside = margin_x <= x <= w - margin_x and margin_y <= y <= h - margin_y
    return (float(x), float(y)) if is_inside else None


def _put_in_front(objects: list[SceneObject], new: SceneObject) -> list[SceneObject] | None:
    """Put `new` in front of all objects; None when that hides too much or leaves an unclear contact."""
    updated = []
    x1, y1, x2, y2 = new.box
    window = (slice(max(y1 - _MIN_GAP, 0), y2 + _MIN_GAP), slice(max(x1 - _MIN_GAP, 0), x2 + _MIN_GAP))
    reach = 2 * _MIN_GAP + 1
    grown = cv2.dilate(new.full[window].view(np.uint8), np.ones((reach, reach), np.uint8)) > 0
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
        if np.count_nonzero(visible) < _MIN_VISIBLE * full_area:
            return None
        item = replace(item, visible=visible, box=_tight_box(visible))
        if item.visible_extent < _MIN_VISIBLE_SIDE * item.extent:
            return None
        updated.append(item)
    updated.append(new)
    if any(box_iou(first.box, second.box) > MAX_BOX_IOU for first, second in combinations(updated, 2)):
        return None
    return updated


def _tight_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    x, y, w, h = cv2.boundingRect(mask.view(np.uint8))
    return x, y, x + w, y + h


def box_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the IoU of two boxes (x1, y1, x2, y2)."""
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    intersection = w * h
    area_a = (a[2] - a[0]) * (a[3] - a[1])
    area_b = (b[2] - b[0]) * (b[3] - b[1])
    return intersection / (area_a + area_b - intersection)


# How objects and the ground behind them are painted. Coordinates are pixels of the scene, continuous, with the origin
# at the top-left corner.

RGB: dict[str, tuple[int, int, int]] = {
    "red": (214, 36, 44),
    "yellow": (247, 212, 38),
    "green": (34, 150, 62),
    "blue": (38, 84, 214),
    "purple": (146, 58, 178),
    "white": (246, 246, 242),
}
# A striped or dotted object mixes its colour with one other; light on the dark colours, dark on the light ones,
# so that the hue stays readable at 16 pixels.
_LIGHT = (250, 250, 250)
_SECOND_COLOURS: dict[str, tuple[int, int, int]] = {"yellow": (150, 104, 8), "white": (92, 92, 96)}

_SUPERSAMPLING = 4
_MEDIUM_GREY = 127.5
_PATTERN_PERIOD = 5.6  # pixels; the smallest objects still show three stripes


def _regular(corners: int, inner: float | None = None) -> np.ndarray:
    """Return the corners of a regular polygon, or of a star when the radius of the inner corners is given."""
    count = corners if inner is None else 2 * corners
    angles = -np.pi / 2 + np.arange(count) * 2 * np.pi / count
    radii = np.ones(count)
    if inner is not None:
        radii[1::2] = inner
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


_ARM = 0.36  # half the width of a cross's arms, where its whole width is 2
_CROSS_HALF = [(_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM), (_ARM, 1.0)]
OUTLINES: dict[str, np.ndarray] = {  # float64 [corners, 2], at any place and size
    "circle": _regular(48),
    "square": np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]),
    "triangle": np.array([[0.0, -1.0], [1.08, 0.9], [-1.08, 0.9]]),
    "star": _regular(5, inner=0.45),
    "cross": np.array(_CROSS_HALF + [(-x, -y) for x, y in _CROSS_HALF]),
    "diamond": np.array([[0.0, -1.0], [0.72, 0.0], [0.0, 1.0], [-0.72, 0.0]]),
}


def outline(shape: str, size: float, angle: float) -> np.ndarray:
    """Return the outline of a shape of `OUTLINES` around the centre of its box, float64 [corners, 2], x and y.

    Args:
        size: longer side of the outline's box after rotation, pixels.
        angle: rotation, radians.
    """
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    points = OUTLINES[shape] @ turn.T
    low = points.min(axis=0)
    high = points.max(axis=0)
    return (points - (low + high) / 2) * (size / (high - low).max())


Patch = tuple[np.ndarray, np.ndarray, tuple[int, int]]  # see `cover`


def cover(points: np.ndarray, centre: tuple[float, float]) -> Patch:
    """Return the share of each pixel that an outline covers; its sides are accurate to a quarter of a pixel.

    Args:
        points: float [corners, 2] outline around its centre, pixels.
        centre: x and y in the scene, pixels.

    Returns:
        cover float32 [h, w] in [0, 1]; edge float32 [h, w], the part of it within a pixel of the outline; and
        (x, y) of the patch's first pixel in the scene.
    """
    absolute = points + np.asarray(centre)
    x0, y0 = np.floor(absolute.min(axis=0)).astype(int) - 1
    x1, y1 = np.ceil(absolute.max(axis=0)).astype(int) + 1
    fixed_point_bits = 4
    scaled = (absolute - (x0, y0)) * _SUPERSAMPLING - 0.5
    scaled = np.round(scaled * 2**fixed_point_bits).astype(np.int32)[None]
    fill = np.zeros(((y1 - y0) * _SUPERSAMPLING, (x1 - x0) * _SUPERSAMPLING), np.uint8)
    edge = np.zeros_like(fill)
    cv2.fillPoly(fill, scaled, 255, cv2.LINE_8, fixed_point_bits)
    cv2.polylines(edge, scaled, True, 255, 2 * _SUPERSAMPLING, cv2.LINE_8, fixed_point_bits)
    cv2.bitwise_and(edge, fill, dst=edge)
    shape = (x1 - x0, y1 - y0)
    fill_small = cv2.resize(fill, shape, interpolation=cv2.INTER_AREA).astype(np.float32) / 255
    edge_small = cv2.resize(edge, shape, interpolation=cv2.INTER_AREA).astype(np.float32) / 255
    return fill_small, edge_small, (int(x0), int(y0))


def paint(
    image: np.ndarray,
    patch: Patch,
    colour: str,
    texture: str,
    rng: np.random.Generator,
    colours: Mapping[str, tuple[int, int, int]] = RGB,
) -> None:
    """Paint an object over `image` (float32 [height, width, 3], RGB 0..255), in place.

    `colours`: RGB values by name.
    """
    fill, edge, (x0, y0) = patch
    h, w = fill.shape
    main = np.asarray(colours[colour], np.float32) + rng.uniform(-9, 9, 3).astype(np.float32)
    second = np.asarray(_SECOND_COLOURS.get(colour, _LIGHT), np.float32)
    amount = _pattern(texture, h, w, rng)[..., None]
    shade = 1 - 0.12 * np.linspace(0, 1, h, dtype=np.float32)[:, None, None]  # a little darker towards the bottom
    surface = (main * (1 - amount) + second * amount) * shade
    surface = surface * (1 - 0.55 * edge[..., None])  # a dark rim keeps overlapping objects of one colour apart
    target = image[y0 : y0 + h, x0 : x0 + w]
    target += (surface - target) * fill[..., None]


def _pattern(texture: str, h: int, w: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the share of the second colour, float32 [h, w], or [1, 1] when it is the same everywhere."""
    if texture == "plain":
        return np.zeros((1, 1), np.float32)
    period = _PATTERN_PERIOD * rng.uniform(0.92, 1.08)
    angle = rng.uniform(0, np.pi)
    phase = rng.uniform(0, 2 * np.pi, 2)
    y, x = np.mgrid[0:h, 0:w].astype(np.float32) * (2 * np.pi / period)
    along = np.sin(x * np.cos(angle) + y * np.sin(angle) + phase[0])
    if texture == "striped":
        return np.clip(0.45 + 1.6 * along, 0, 0.85).astype(np.float32)
    across = np.sin(y * np.cos(angle) - x * np.sin(angle) + phase[1])  # dotted
    return np.clip(2.2 * (along + across - 0.75), 0, 0.85).astype(np.float32)


def paint_background(h: int, w: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a dull, low-contrast ground of one of four kinds, float32 [h, w, 3], RGB 0..255.

    It has little saturation and medium brightness, so that no part of it looks like an object of `RGB`.
    """
    base = rng.uniform(88, 142) + rng.uniform(-13, 13, 3)
    kind = rng.integers(4)
    y, x = np.mgrid[0:h, 0:w].astype(np.float32)
    angle = rng.uniform(0, np.pi)
    cos = np.float32(np.cos(angle))
    sin = np.float32(np.sin(angle))
    along = x * cos + y * sin
    if kind == 0:  # clouds
        coarse = cv2.resize(rng.standard_normal((5, 5), np.float32), (w, h), interpolation=cv2.INTER_CUBIC)
        fine = cv2.resize(rng.standard_normal((16, 16), np.float32), (w, h), interpolation=cv2.INTER_LINEAR)
        relief = 11 * coarse + 6 * fine
    elif kind == 1:  # gradient
        relief = 52 * (along - along.mean()) / (np.ptp(along) + 1e-6)
    elif kind == 2:  # wide, faint bands
        relief = 9 * np.sin(along * (2 * np.pi / rng.uniform(10, 22)))
    else:  # faint checks
        side = rng.uniform(9, 16)
        across = y * cos - x * sin
        relief = 8 * np.sign(np.sin(along * (np.pi / side)) * np.sin(across * (np.pi / side)))
    grain = rng.standard_normal((h, w), np.float32) * np.float32(rng.uniform(2, 6))
    return (base.astype(np.float32) + (relief + grain)[..., None]).astype(np.float32)


def degrade(image: np.ndarray, rendering: RenderingConfig, rng: np.random.Generator) -> np.ndarray:
    """Return a picture (uint8 [height, width, 3], RGB) blurred, with other contrast and brightness, and noisy.

    `rng` gives the noise alone. With the default rendering, the picture stays as it is.
    """
    changed = image.astype(np.float32)
    if rendering.blur > 0:
        changed = cv2.GaussianBlur(changed, (0, 0), rendering.blur)
    changed = (changed - _MEDIUM_GREY) * rendering.contrast + _MEDIUM_GREY + rendering.brightness
    changed += rng.standard_normal(changed.shape, np.float32) * rendering.noise
    return np.clip(np.rint(changed), 0, 255).astype(np.uint8)


# Unambiguous relations between the objects of a scene.
# All thresholds concern visible pixels.
BIGGER_SIDE = 1.15  # clearly bigger: the ratio of the longer sides, at least
BIGGER_AREA = 1.2  # and that of the areas
NOT_BIGGER = 0.95  # clearly not bigger: both ratios, at most
NEAR = 6.0  # clearly near: gap in pixels, at most
NOT_NEAR = 13.0  # clearly not near: gap in pixels, at least
CLOSER = 1.3  # clearly closer: the ratio of the distances between centres, at least
CLOSER_GAP = 4.0  # clearly closer: the difference of the gaps in pixels, at least
CONTACT = 1.5  # objects that touch: gap in pixels, at most


class SceneGraph:
    """Attributes, sizes, distances and overlaps of a scene's objects.

    Attributes:
        count: number of objects, n.
        everything: bit mask of all objects.
        attribute_masks: (slot, value) -> bit mask, for example ("colour", "red").
        gap: float [n, n], pixels between the visible pixels of two objects; neighbouring pixels are 1 apart.
        distance: float [n, n], pixels between the centres of two boxes.
        related, unrelated: relation -> per anchor, the bit mask of the objects that clearly are, or clearly are not, in
            that relation to it. Relations: bigger, smaller, near, away, overlapping, in front, behind.
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
                self.attribute_masks[key] = self.attribute_masks.get(key, 0) | (1 << i)

        self.gap = _gaps(scene)
        box = np.array([item.box for item in objects], float)
        centre = (box[:, :2] + box[:, 2:]) / 2
        self.distance = np.linalg.norm(centre[:, None] - centre[None], axis=2)

        tables = self._size_tables(scene) | self._overlap_tables(scene)
        is_near = self.gap <= NEAR
        is_away = self.gap >= NOT_NEAR
        tables["near"] = (is_near, is_away)
        tables["away"] = (is_away, is_near)
        self.related = {name: _columns(true) for name, (true, _) in tables.items()}
        self.unrelated = {name: _columns(false) for name, (_, false) in tables.items()}

    @staticmethod
    def _size_tables(scene: Scene) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        extent = np.array([item.extent for item in scene.objects])
        visible_extent = np.array([item.visible_extent for item in scene.objects], float)
        area = np.array([item.area for item in scene.objects], float)
        ratios = np.stack([values[:, None] / values[None] for values in (extent, visible_extent, area)])
        limits = np.array([BIGGER_SIDE, BIGGER_SIDE, BIGGER_AREA])[:, None, None]
        bigger = (ratios >= limits).all(axis=0)
        not_bigger = (ratios <= NOT_BIGGER).all(axis=0)
        return {"bigger": (bigger, not_bigger), "smaller": (bigger.T, not_bigger.T)}

    def _overlap_tables(self, scene: Scene) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        painted_over = np.zeros((self.count, self.count), bool)  # object i is painted over a part of object j
        for j, item in enumerate(scene.objects):
            pixels = np.flatnonzero(item.full)
            for i in range(j + 1, self.count):
                painted_over[i, j] = scene.objects[i].full.ravel()[pixels].any()
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
        """Return the candidate clearly closest to the anchor, or clearly farthest from it; None when there is none."""
        items = members(candidates)
        if not items:
            return None
        distance = self.distance[anchor]
        gap = self.gap[anchor]
        choose = max if far else min
        best = choose(items, key=lambda index: distance[index])
        for other in items:
            if other == best:
                continue
            nearer, farther = (other, best) if far else (best, other)
            if distance[farther] < CLOSER * distance[nearer] or gap[farther] < gap[nearer] + CLOSER_GAP:
                return None
        return best


def members(mask: int) -> list[int]:
    """Return the objects of a bit mask."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _columns(table: np.ndarray) -> list[int]:
    """Return bool [n, n] as n bit masks; bit i of mask j is table[i, j]. The diagonal is left out."""
    masks = []
    for j, column in enumerate(table.T):
        masks.append(sum(1 << int(i) for i in np.flatnonzero(column) if i != j))
    return masks


def _gaps(scene: Scene) -> np.ndarray:
    """Return the distances between the visible pixels of every two objects, float [n, n], within 2 per cent.

    Neighbouring pixels are 1 apart.
    """
    n = len(scene.objects)
    gaps = np.zeros((n, n))
    pixels = [np.flatnonzero(item.visible) for item in scene.objects]
    for i, item in enumerate(scene.objects[:-1]):
        distance = cv2.distanceTransform((~item.visible).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5).ravel()
        for j in range(i + 1, n):
            gaps[i, j] = gaps[j, i] = distance[pixels[j]].min()
    return gaps
