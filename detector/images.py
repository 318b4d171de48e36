"""From an image file to the pixels a network sees: reading, resizing, normalising, padding.

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
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps

from detector.boxes import Array
from detector.errors import MissingFileError, UserError, first_line
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
        rounding: "detectron2" (`ResizeShortestEdge`: both edges are rounded) or "truncate" (the official VL-BERT code:
            a short edge that had to shrink is cut to an integer first, then the other edge is computed from it and
            cut too, so that it may end just under `long_edge`), or "torchvision" (both edges are cut after they were
            multiplied with one factor).
    """

    short_edge: int = 800
    long_edge: int = 1333
    rounding: Literal["detectron2", "truncate", "torchvision"] = "detectron2"

    def __post_init__(self) -> None:
        if not 1 <= self.short_edge <= self.long_edge:
            raise UserError(
                f"Resize rule: short_edge {self.short_edge} and long_edge {self.long_edge} must be positive, "
                "and long_edge must not be below short_edge."
            )

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
    keep their upper byte, and transparency is dropped, not blended (the stored colours stay, as in Detectron2's
    reader). The EXIF orientation is applied; an unreadable EXIF block counts as upright. Of several pictures in a file
    the first one is read.

    Returns:
        a contiguous array.

    Raises:
        MissingFileError: the file does not exist.
        UserError: the file is damaged, cut off, or not in one of `FORMATS`.
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

    Raises:
        FileNotFoundError, ValueError: as `load_image`.
    """
    found = _read(image, name or ("in memory" if isinstance(image, bytes) else str(image)))
    size = (found.height, found.width)
    return _to_array(resize_image(found, rule.target_size(*size)), channel_order), size


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to `size`, (height, width), with PIL's antialiased bilinear filter."""
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def resize_boxes(boxes: Float[Array, "*R 4"], size: tuple[int, int], new_size: tuple[int, int]) -> Float[Array, "*R 4"]:
    """Move boxes along when their image is resized.

    Args:
        boxes: xyxy in pixels of the image before.
        size, new_size: (height, width) of the image before and after; exchange them to go back.

    Returns:
        new boxes of the same type, in pixels of the image after.
    """
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

    Raises:
        UserError: an image is larger than `pad_to`.
    """
    assert len(images) == len(original_sizes) == len(names)
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
    if not isinstance(source, bytes) and not Path(source).exists():
        raise MissingFileError(f"Image {name} does not exist; check the path, or the folder of the data set's images.")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            image.load()
            with contextlib.suppress(Exception):  # a damaged EXIF block raises many kinds of errors
                ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image, name)
    except UserError:
        raise
    except Exception as error:  # PIL raises many kinds, depending on the format and the place of the damage
        raise UserError(f"Image {name} cannot be read ({first_line(error)}); get or convert the file again.") from error


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16-bit grey; PIL's own conversion would clip it at 255
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise UserError(f"Image {name} has pixels of 32 bits; save it with 8 or 16 bits per channel.")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info:  # converting this kind to RGB in one step makes PIL warn
        image = image.convert("RGBA")
    return image.convert("RGB")
