"""Outlines of objects as small masks on the grid of a RoI, as official codes draw them for VCR.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_AT_POINT = 1e-12  # a grid point so near to a corner of the outline is that corner (scikit-image)


def instance_mask(outlines: Sequence[np.ndarray], box: np.ndarray, side: int = 14, at: str = "corners") -> np.ndarray:
    """Draw an object's outlines on the S x S grid of its box.

    At "centres" (R2C, VisualBERT): a cell is 1 if its centre is inside of any outline, by the even-odd rule.

    At "corners" (official VL-BERT code): coordinates relative to the box, times S / (width + 1) and S / (height + 1),
    clamped to [0, S - 1]; then the grid points (column, row) = 0 .. S - 1 inside of an outline or on it are 1, as in
    `skimage.draw.polygon`. So the mask is a little narrower than the object: points, not cells, are looked at.

    Args:
        outlines: float [points, 2] (x, y) each, in the pixels of `box` [4] xyxy.
        at: which points of the grid's cells are looked at, "corners" or "centres".

    Returns:
        float32 [S, S] of 0 and 1; all 0 without an outline.
    """
    mask = np.zeros((side, side), dtype=np.float32)
    x1, y1, x2, y2 = (float(value) for value in box)
    if at == "centres":
        shares = (np.arange(side) + 0.5) / side
        grid = np.stack(np.meshgrid(x1 + (x2 - x1) * shares, y1 + (y2 - y1) * shares), axis=-1)
        for outline in outlines:
            mask[_contains(outline.astype(np.float64), grid)] = 1
        return mask
    # float32 as in the official code: rounding decides about grid points on an outline
    origin = np.array([x1, y1], dtype=np.float32)
    ratio = np.array([side / (x2 - x1 + 1), side / (y2 - y1 + 1)], dtype=np.float32)
    for outline in outlines:
        points = (outline.astype(np.float32) - origin) * ratio
        mask[_covers(points.clip(0, side - 1).astype(np.float64), side)] = 1
    return mask


def _contains(points: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """bool [S, S]: which points of the grid float64 [S, S, 2] are inside of a closed outline [points, 2].

    An edge counts if a ray from the point to the left meets it; points on an edge are treated as matplotlib's
    `Path.contains_points` does.
    """
    (x, y), (x0, y0) = np.moveaxis(grid[..., None, :], -1, 0), points.T
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    starts_below, ends_below = y0 >= y, y1 >= y
    is_beside = ((y1 - y) * (x0 - x1) >= (x1 - x) * (y0 - y1)) == ends_below
    return ((starts_below != ends_below) & is_beside).sum(axis=-1) % 2 == 1


def _covers(points: np.ndarray, side: int) -> np.ndarray:
    """bool [S, S]: grid points inside of a closed outline [points, 2], or on it (O'Rourke's crossing rule)."""
    rows, columns = np.mgrid[:side, :side]
    grid = np.stack([columns, rows], axis=-1).astype(np.float64)
    end = points - grid[..., None, :]  # [S, S, points, 2]
    start = np.roll(end, 1, axis=2)
    (x0, y0), (x1, y1) = np.moveaxis(start, -1, 0), np.moveaxis(end, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = (x1 * y0 - x0 * y1) / (y0 - y1)
    to_right = (((y0 > 0) != (y1 > 0)) & (crossing > 0)).sum(axis=2) % 2 == 1
    to_left = (((y0 < 0) != (y1 < 0)) & (crossing < 0)).sum(axis=2) % 2 == 1
    is_corner = (np.abs(end) < _AT_POINT).all(axis=-1).any(axis=2)
    return is_corner | to_right | (to_right != to_left)
