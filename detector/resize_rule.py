"""The size that an image is resized to, and the filters that resize it, without torch.

An image is a uint8 array [height, width, 3].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, UInt8
from PIL import Image

from detector.config import ResizeLibrary, Rounding


@dataclass(frozen=True)
class ResizeRule:
    """Resize the short edge to a fixed length, unless the long edge would exceed its limit.

    Args:
        short_edge: target length of the short edge, in pixels.
        long_edge: maximum length of the long edge, in pixels.
        rounding: "detectron2" (`ResizeShortestEdge`: halves are rounded up) or "truncate" (official VL-BERT code: if
            the long edge exceeds its limit, the short edge is truncated first and the long edge is computed from it, so
            it may be just below `long_edge`). The others scale both edges by one factor: "torchvision" truncates them,
            "opencv" (bottom-up attention, Detectron) rounds halves to even, and so does "r2c", which fits every image
            into a window `long_edge` wide and `short_edge` high.
        library: whose filter computes the pixels: "pil", as in the official code, or "torch", which is about three
            times as fast and differs by at most one grey value.
    """

    short_edge: int = 800
    long_edge: int = 1333
    rounding: Rounding = "detectron2"
    library: ResizeLibrary = "pil"

    def target_size(self, h: int, w: int) -> tuple[int, int]:
        """Return (height, width), at least 1, after resizing an image of height h and width w."""
        short, long = sorted((h, w))
        if self.rounding == "detectron2":
            scale = self.short_edge / short
            new_h = float(self.short_edge) if h < w else scale * h
            new_w = scale * w if h < w else float(self.short_edge)
            longer = max(new_h, new_w)
            if longer > self.long_edge:
                new_h *= self.long_edge / longer
                new_w *= self.long_edge / longer
            new_h = int(new_h + 0.5)
            new_w = int(new_w + 0.5)
        elif self.rounding == "truncate":
            new_short = self.short_edge
            if long * new_short > self.long_edge * short:
                new_short = max(self.long_edge * short // long, 1)
            new_long = min(new_short * long // short, self.long_edge)
            new_h, new_w = (new_long, new_short) if w < h else (new_short, new_long)
        else:
            window = (h, w) if self.rounding == "r2c" else (short, long)
            factor = min(self.short_edge / window[0], self.long_edge / window[1])
            to_whole = math.floor if self.rounding == "torchvision" else round
            new_h = to_whole(h * factor)
            new_w = to_whole(w * factor)
        return max(new_h, 1), max(new_w, 1)


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to `size` = (height, width) with PIL's antialiased bilinear filter."""
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def resize_like_torch(
    pixels: UInt8[np.ndarray, "height width 3"], size: tuple[int, int]
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resize an image to `size` = (height, width) with the values of `detector.images.resize_pixels`, slowly."""
    height, width = size
    if pixels.shape[1] != width:
        pixels = _resize_rows(pixels.transpose(1, 0, 2), width).transpose(1, 0, 2)
    if pixels.shape[0] != height:
        pixels = _resize_rows(pixels, height)
    return np.ascontiguousarray(pixels)


def _resize_rows(pixels: UInt8[np.ndarray, "old _ 3"], number: int) -> UInt8[np.ndarray, "number _ 3"]:
    """Resize along the first axis, in torch's arithmetic: 16-bit weights, and 32-bit sums rounded to uint8."""
    rows, weights, precision = _fixed_point_weights(len(pixels), number)
    total = np.full((number, *pixels.shape[1:]), 1 << (precision - 1), dtype=np.int32)
    for row, weight in zip(rows.T, weights.T, strict=True):
        total += weight[:, None, None] * pixels[row]
    return (total >> precision).clip(0, 255).astype(np.uint8)


def _fixed_point_weights(
    old: int, new: int
) -> tuple[Int64[np.ndarray, "new reach"], Int32[np.ndarray, "new reach"], int]:
    """Return the rows that each new row averages, their weights, and the weights' number of binary digits.

    The weights are a triangle as wide as two rows of the smaller image.
    """
    scale = old / new
    support = max(scale, 1.0)
    centre = scale * (np.arange(new) + 0.5)
    first = (centre - support + 0.5).astype(np.int64).clip(min=0)
    end = (centre + support + 0.5).astype(np.int64).clip(max=old)
    rows = first[:, None] + np.arange((end - first).max())
    weights = (1 - np.abs((rows - centre[:, None] + 0.5) / support)).clip(min=0) * (rows < end[:, None])
    weights /= weights.sum(axis=1, keepdims=True)
    precision = 0
    while precision < 22 and int(weights.max() * 2 ** (precision + 1) + 0.5) < 2**15:
        precision += 1
    return rows.clip(max=old - 1), np.floor(weights * 2**precision + 0.5).astype(np.int32), precision
