"""Read, resize, normalise, pad and mask images.

An image is a uint8 array [height, width, 3]. Images are resized as uint8 with an antialiased bilinear filter: PIL's, as
in Detectron2 and the official VL-BERT code, or torch's. Without antialiasing, the features of a downscaled photo differ
by about 20 %.
Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Num, UInt8
from PIL import Image
from torch import Tensor

from detector.boxes import Array
from detector.config import InputConfig
from detector.errors import UserError
from detector.image_files import read_image
from detector.operators import clip_boxes_to_image
from detector.resize_rule import ResizeRule, resize_image
from detector.structures import ImageBatch

Pixels = UInt8[np.ndarray, "height width 3"]
ChannelOrder = Literal["BGR", "RGB"]


def load_image(
    image: str | Path | bytes,
    channel_order: ChannelOrder = "BGR",
    annotated_size: tuple[int, int] | None = None,
    name: str | None = None,
) -> Pixels:
    """Read an image file in its original size.

    Every pixel format is converted to three 8-bit channels: grey values are repeated, palettes and CMYK are converted,
    16-bit values keep their upper byte, and the alpha channel is dropped without blending (as in Detectron2). The EXIF
    orientation is applied; unreadable EXIF data is ignored. If a file contains several images, the first one is read.

    Args:
        image: the path of the file, or its contents.
        annotated_size: (height, width) of the image in its annotations. Some tools ignore the EXIF orientation: if it
            exchanges the sides, and the annotations have them unexchanged, the image is read as it is stored, as they
            were drawn. Square images, and those that EXIF flips or turns upside down, do not show how they were
            annotated; they are read upright.
        name: name of the file in error messages; default: its path.
    """
    return _to_array(read_image(image, name or str(image), annotated_size), channel_order)


def load_resized(
    image: str | Path | bytes,
    rule: ResizeRule,
    channel_order: ChannelOrder = "BGR",
    name: str | None = None,
    annotated_size: tuple[int, int] | None = None,
) -> tuple[Pixels, tuple[int, int]]:
    """Read an image like `load_image` and resize it.

    Args:
        name: name of the file in error messages; default: its path.
        annotated_size: see `load_image`.

    Returns:
        the resized image, and (height, width) of the original image, upright or as it is stored.
    """
    if name is None:
        name = "in memory" if isinstance(image, bytes) else str(image)
    original = read_image(image, name, annotated_size)
    size = (original.height, original.width)
    new_size = rule.target_size(*size)
    if rule.library == "pil":
        return _to_array(resize_image(original, new_size), channel_order), size
    return resize_pixels(_to_array(original, channel_order), new_size), size


def resize_pixels(pixels: Pixels, size: tuple[int, int]) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Resize an image to `size` = (height, width) with torch's antialiased bilinear filter.

    It is PIL's with weights of 16 instead of 32 bits, so that a value differs by at most 1.
    """
    if pixels.shape[:2] == size:
        return pixels
    images = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last, for which torch has a fast kernel
    resized = F.interpolate(images, size, mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)[0].numpy()


def resize_boxes(boxes: Float[Array, "*R 4"], size: tuple[int, int], new_size: tuple[int, int]) -> Float[Array, "*R 4"]:
    """Scale boxes of an image that is resized from `size` to `new_size`, both (height, width)."""
    scale_x = new_size[1] / size[1]
    scale_y = new_size[0] / size[0]
    factors = [scale_x, scale_y, scale_x, scale_y]
    if isinstance(boxes, torch.Tensor):
        return boxes * boxes.new_tensor(factors)
    return boxes * np.array(factors, boxes.dtype)


def make_image_batch(
    images: Sequence[np.ndarray],
    original_sizes: Sequence[tuple[int, int]],
    names: Sequence[str],
    pad_to: tuple[int, int] | None = None,
) -> ImageBatch:
    """Batch images, padded with zeros on the right and at the bottom.

    `pad_to`: (H, W) of the batch; default: the maximum over its images, as in Detectron2. Features depend slightly on
    the padding, so a fixed size makes them independent of the other images in the batch.
    """
    for image, name in zip(images, names, strict=True):
        if pad_to is not None and (image.shape[0] > pad_to[0] or image.shape[1] > pad_to[1]):
            raise UserError(
                f"{name}: the resized image of {image.shape[0]} x {image.shape[1]} pixels (height x width) does not "
                f"fit into the fixed batch size {pad_to[0]} x {pad_to[1]}; increase it or use another resize rule."
            )
    sizes = torch.tensor([image.shape[:2] for image in images])
    if pad_to is None:
        pad_to = sizes.amax(0).tolist()
    height, width = pad_to
    pixels = np.zeros((len(images), height, width, 3), dtype=np.uint8)
    for row, image in zip(pixels, images, strict=True):
        row[: image.shape[0], : image.shape[1]] = image
    original_sizes = torch.tensor([tuple(size) for size in original_sizes])
    return ImageBatch(torch.from_numpy(pixels).permute(0, 3, 1, 2), sizes, original_sizes, list(names))


def normalise_images(
    images: ImageBatch, config: InputConfig, masks: list[Float[Tensor, "_Q 4"]] | None = None
) -> ImageBatch:
    """Return the input of a network: float pixels, (pixel - mean) / std, with zeros (the mean colour) in the padding.

    Pixels that are floating-point already are taken as they are. `masks` are boxes to fill with the mean colour, see
    `mask_pixels`.
    """
    pixels = images.pixels
    if not pixels.is_floating_point():
        values = torch.tensor([config.pixel_mean, config.pixel_std]).to(pixels.device, non_blocking=True)
        mean, std = values[..., None, None]
        pixels = torch.zeros(pixels.shape, device=pixels.device)
        for row, image, (height, width) in zip(pixels, images.pixels, images.sizes.tolist(), strict=True):
            row[:, :height, :width] = (image[:, :height, :width] - mean) / std
    if masks is not None:
        pixels = mask_pixels(pixels, images.sizes, masks)
    return dataclasses.replace(images, pixels=pixels)


def _to_array(image: Image.Image, channel_order: ChannelOrder) -> Pixels:
    content = bytearray(image.tobytes("raw", channel_order))  # PIL reverses channels faster than numpy
    return np.frombuffer(content, dtype=np.uint8).reshape(image.height, image.width, 3)


def mask_rectangles(
    boxes: Float[Tensor, "Q 4"], size: Sequence[int], rounding: Literal["outward", "truncate"] = "outward"
) -> Int64[Tensor, "Q 4"]:
    """Round boxes to whole pixels.

    Args:
        boxes: xyxy in pixels of the resized image.
        size: (height, width) of the resized image without padding.
        rounding: "outward" includes every pixel that the box touches (floor, floor, ceil, ceil); "truncate" includes
            rows int(y1) .. int(y2) and columns int(x1) .. int(x2), as in the official VL-BERT code.

    Returns:
        x1, y1, x2, y2 of the pixels [y1:y2, x1:x2], clipped to the image.
    """
    if rounding == "outward":
        corners = torch.cat([boxes[:, :2].floor(), boxes[:, 2:].ceil()], dim=1)
    else:
        corners = boxes.trunc()
        corners[:, 2:] += 1
    return clip_boxes_to_image(corners, size).long()


def mask_pixels(
    pixels: Num[Tensor, "N 3 H W"], sizes: Int64[Tensor, "N 2"], masks: list[Float[Tensor, "_Q 4"]]
) -> Num[Tensor, "N 3 H W"]:
    """Copy a batch and fill the pixels of boxes with 0: the mean colour if they are normalised, or else black.

    Masking the feature of a region would not hide its class, because the features of overlapping regions and of the
    whole image are computed from the same pixels (VL-BERT, section 3.3).

    Args:
        sizes: (height, width) of each image without padding.
        masks: boxes of each image, xyxy in pixels of the resized image, rounded outward; Q may be 0.
    """
    masked = pixels.clone()
    for number, (size, boxes) in enumerate(zip(sizes.tolist(), masks, strict=True)):
        for x1, y1, x2, y2 in mask_rectangles(boxes, size).tolist():
            masked[number, :, y1:y2, x1:x2] = 0
    return masked
