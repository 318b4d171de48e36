"""From an image file to the pixels a network sees: reading, resizing, normalising, padding, masking.

An image is a uint8 array [height, width, 3]. Images are resized as uint8 with PIL's antialiased bilinear filter, as in
Detectron2 and the official VL-BERT code; filters without antialiasing change the features of a shrunken photo by a
fifth.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from detector.boxes import Array
from detector.errors import UserError, reading
from detector.structures import ImageBatch

Pixels = UInt8[np.ndarray, "height width 3"]
ChannelOrder = Literal["BGR", "RGB"]

# Read by the content of a file, not by its name. PIL knows forty more, and one of them starts a program (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True)
class ResizeRule:
    """Size of the network input: the short edge gets a fixed length unless the long one would pass its limit.

    Args:
        short_edge: wanted length of the short edge, pixels.
        long_edge: limit for the long edge, pixels.
        rounding: "detectron2" (`ResizeShortestEdge`: both edges are rounded), "torchvision" (both edges are multiplied
            by one factor and truncated) or "truncate" (official VL-BERT code: a short edge that had to shrink is
            truncated first, then the long edge that follows from it, so that it may end just under `long_edge`).
    """

    short_edge: int = 800
    long_edge: int = 1333
    rounding: Literal["detectron2", "truncate", "torchvision"] = "detectron2"

    def target_size(self, h: int, w: int) -> tuple[int, int]:
        """(height, width) after resizing an image of height h and width w; no side becomes less than 1."""
        short, long = min(h, w), max(h, w)
        if self.rounding == "detectron2":
            scale = self.short_edge / short
            new_h, new_w = (float(self.short_edge), scale * w) if h < w else (scale * h, float(self.short_edge))
            longer = max(new_h, new_w)
            if longer > self.long_edge:
                new_h, new_w = new_h * (self.long_edge / longer), new_w * (self.long_edge / longer)
            new_h, new_w = int(new_h + 0.5), int(new_w + 0.5)
        elif self.rounding == "truncate":
            new_short = self.short_edge
            if long * new_short > self.long_edge * short:
                new_short = max(self.long_edge * short // long, 1)
            new_long = min(new_short * long // short, self.long_edge)
            new_h, new_w = (new_long, new_short) if w < h else (new_short, new_long)
        else:
            factor = min(self.short_edge / short, self.long_edge / long)
            new_h, new_w = math.floor(h * factor), math.floor(w * factor)
        return max(new_h, 1), max(new_w, 1)


def load_image(path: str | Path, channel_order: ChannelOrder = "BGR") -> Pixels:
    """Read an image file at its full size.

    Every kind becomes three 8-bit channels: grey is repeated, palettes are looked up, CMYK is converted, 16-bit values
    keep their upper byte, and transparency is dropped, not blended (as in Detectron2's reader). The EXIF orientation is
    applied; an unreadable EXIF block counts as upright. Of several pictures in a file the first one is read.
    """
    return _to_array(_read(path, str(path)), channel_order)


def load_resized(
    image: str | Path | bytes, rule: ResizeRule, channel_order: ChannelOrder = "BGR", name: str | None = None
) -> tuple[Pixels, tuple[int, int]]:
    """Read an image, as `load_image` does, and resize it.

    Args:
        image: a path, or the content of a file.
        name: for error messages; None = the path.

    Returns:
        the resized image, and the (height, width) of the original after its rotation.
    """
    found = _read(image, name or ("in memory" if isinstance(image, bytes) else str(image)))
    size = (found.height, found.width)
    return _to_array(resize_image(found, rule.target_size(*size)), channel_order), size


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to `size`, (height, width), with PIL's antialiased bilinear filter."""
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def resize_boxes(boxes: Float[Array, "*R 4"], size: tuple[int, int], new_size: tuple[int, int]) -> Float[Array, "*R 4"]:
    """Boxes after their image was resized from `size` to `new_size`, both (height, width)."""
    x, y = new_size[1] / size[1], new_size[0] / size[0]
    factors = boxes.new_tensor([x, y, x, y]) if isinstance(boxes, torch.Tensor) else np.array([x, y, x, y], boxes.dtype)
    return boxes * factors


def make_image_batch(
    images: Sequence[np.ndarray],
    original_sizes: Sequence[tuple[int, int]],
    names: Sequence[str],
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    pad_to: tuple[int, int] | None = None,
) -> ImageBatch:
    """Normalise images and put them into one batch, padded with zeros (the mean colour) at the right and the bottom.

    Args:
        images: N resized images, uint8 [height, width, 3].
        original_sizes: N (height, width) before the resize.
        names: N names for error messages.
        pixel_mean, pixel_std: 3 values in grey levels, in the images' channel order.
        pad_to: (H, W) of the batch; None = the size of its largest image, as in Detectron2. A box's features depend a
            little on the padding, so a fixed size makes them independent of the other images in the batch.
    """
    for image, name in zip(images, names, strict=True):
        if pad_to is not None and (image.shape[0] > pad_to[0] or image.shape[1] > pad_to[1]):
            raise UserError(
                f"{name}: the resized image has {image.shape[0]} x {image.shape[1]} pixels (height x width) and does "
                f"not fit into the fixed batch size {pad_to[0]} x {pad_to[1]}; enlarge it or use another resize rule."
            )
    sizes = torch.tensor([image.shape[:2] for image in images])
    height, width = pad_to if pad_to is not None else sizes.amax(0).tolist()
    mean = torch.tensor(pixel_mean, dtype=torch.float32)[:, None, None]
    std = torch.tensor(pixel_std, dtype=torch.float32)[:, None, None]
    pixels = torch.zeros(len(images), 3, height, width)
    for row, image in zip(pixels, images, strict=True):
        content = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float()
        row[:, : image.shape[0], : image.shape[1]] = (content - mean) / std
    return ImageBatch(pixels, sizes, torch.tensor([tuple(size) for size in original_sizes]), list(names))


def _to_array(image: Image.Image, channel_order: ChannelOrder) -> Pixels:
    pixels = np.array(image)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if channel_order == "BGR" else pixels


def _read(source: str | Path | bytes, name: str) -> Image.Image:
    """An upright RGB image."""
    source = io.BytesIO(source) if isinstance(source, bytes) else source
    with reading(f"Image {name}", Exception), Image.open(source, formats=FORMATS) as image:  # PIL raises many kinds
        image.load()
        with contextlib.suppress(Exception):  # a damaged EXIF block
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith(("I", "F")):  # 16-bit grey; PIL's own conversion would clip it at 255
            values = np.asarray(image)
            if image.mode == "F" or values.min() < 0 or values.max() > 65535:
                raise ValueError("it has pixels of 32 bits; save it with 8 or 16 bits per channel")
            return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
        if "transparency" in image.info:  # converting this kind to RGB in one step makes PIL warn
            return image.convert("RGBA").convert("RGB")
        return image.convert("RGB")


def mask_rectangles(
    boxes: Float[Tensor, "Q 4"], size: Sequence[int], rounding: Literal["outward", "truncate"] = "outward"
) -> Int64[Tensor, "Q 4"]:
    """Whole-pixel rectangles that cover boxes.

    Args:
        boxes: xyxy in pixels of the resized image.
        size: (height, width) of that image without padding.
        rounding: "outward" takes every pixel that the box touches (floor, floor, ceil, ceil); "truncate" does as the
            official VL-BERT code: rows int(y1) to int(y2) and columns int(x1) to int(x2), the last ones included.

    Returns:
        x1, y1, x2, y2, half-open (pixels [y1:y2, x1:x2]) and clipped to the image.
    """
    if rounding == "outward":
        corners = torch.cat([boxes[:, :2].floor(), boxes[:, 2:].ceil()], dim=1)
    else:
        corners = boxes.trunc()
        corners[:, 2:] += 1
    return clip_boxes_to_image(corners, size).long()


def mask_pixels(
    pixels: Float[Tensor, "N 3 H W"],
    sizes: Int64[Tensor, "N 2"],
    masks: list[Float[Tensor, "_Q 4"]],
    fill: Float[Tensor, " 3"] | None = None,
) -> Float[Tensor, "N 3 H W"]:
    """A copy of a normalised batch in which the pixels of boxes have one colour.

    Masking the feature of a region does not hide its class (VL-BERT, section 3.3): neighbouring features and the
    feature of the whole image are computed from the same pixels.

    Args:
        pixels: network input after normalisation.
        sizes: (height, width) of each image without padding.
        masks: N entries, xyxy in pixels of the resized image, rounded outward; Q may be 0.
        fill: the colour after normalisation; None = 0, which is the mean colour.
    """
    masked = pixels.clone()
    colour = 0.0 if fill is None else fill.to(pixels)[:, None, None]
    for number, (size, boxes) in enumerate(zip(sizes.tolist(), masks, strict=True)):
        for x1, y1, x2, y2 in mask_rectangles(boxes, size).tolist():
            masked[number, :, y1:y2, x1:x2] = colour
    return masked
