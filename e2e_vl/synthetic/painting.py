"""How one object and the ground behind it are painted.

Coordinates are pixels of the scene, continuous, origin at the top-left corner; colours are RGB.
"""

from __future__ import annotations

import cv2
import numpy as np

COLOURS: dict[str, tuple[int, int, int]] = {
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
_PATTERN_PERIOD = 5.6  # pixels; the smallest objects still show three stripes


def _regular(corners: int, inner: float | None = None) -> np.ndarray:
    """Corners of a regular polygon, or of a star when the radius of the inner corners is given."""
    count = corners if inner is None else 2 * corners
    angles = -np.pi / 2 + np.arange(count) * 2 * np.pi / count
    radii = np.ones(count)
    if inner is not None:
        radii[1::2] = inner
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


_ARM = 0.36  # half the width of a cross's arms, where its whole width is 2
_CROSS_HALF = [(_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM), (_ARM, 1.0)]
SHAPES: dict[str, np.ndarray] = {  # float64 [corners, 2], at any place and size
    "circle": _regular(48),
    "square": np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]),
    "triangle": np.array([[0.0, -1.0], [1.08, 0.9], [-1.08, 0.9]]),
    "star": _regular(5, inner=0.45),
    "cross": np.array(_CROSS_HALF + [(-x, -y) for x, y in _CROSS_HALF]),
    "diamond": np.array([[0.0, -1.0], [0.72, 0.0], [0.0, 1.0], [-0.72, 0.0]]),
}
TEXTURES = ("plain", "striped", "dotted")


def outline(shape: str, size: float, angle: float) -> np.ndarray:
    """Outline of a shape of ``SHAPES`` around the centre of its box, float64 [corners, 2], x and y.

    Args:
        size: longer side of the outline's box after rotation, pixels.
        angle: rotation, radians.
    """
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    points = SHAPES[shape] @ turn.T
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) * (size / (high - low).max())


Patch = tuple[np.ndarray, np.ndarray, tuple[int, int]]  # see ``cover``


def cover(points: np.ndarray, centre: tuple[float, float]) -> Patch:
    """How much of each pixel an outline covers; its sides are off by at most a quarter of a pixel.

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


def paint(image: np.ndarray, patch: Patch, colour: str, texture: str, rng: np.random.Generator) -> None:
    """Paint an object over ``image`` (float32 [height, width, 3], RGB 0..255), in place."""
    fill, edge, (x0, y0) = patch
    h, w = fill.shape
    main = np.asarray(COLOURS[colour], np.float32) + rng.uniform(-9, 9, 3).astype(np.float32)
    second = np.asarray(_SECOND_COLOURS.get(colour, _LIGHT), np.float32)
    amount = _pattern(texture, h, w, rng)[..., None]
    shade = 1 - 0.12 * np.linspace(0, 1, h, dtype=np.float32)[:, None, None]  # a little darker towards the bottom
    surface = (main * (1 - amount) + second * amount) * shade
    surface = surface * (1 - 0.55 * edge[..., None])  # a dark rim keeps overlapping objects of one colour apart
    target = image[y0 : y0 + h, x0 : x0 + w]
    target += (surface - target) * fill[..., None]


def _pattern(texture: str, h: int, w: int, rng: np.random.Generator) -> np.ndarray:
    """Share of the second colour, float32 [h, w]."""
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
    """A dull, low-contrast ground of one of four kinds, float32 [h, w, 3], RGB 0..255.

    It has little saturation and medium brightness, so that no part of it looks like an object of ``COLOURS``.
    """
    base = rng.uniform(88, 142) + rng.uniform(-13, 13, 3)
    kind = rng.integers(4)
    y, x = np.mgrid[0:h, 0:w].astype(np.float32)
    angle = rng.uniform(0, np.pi)
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
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
