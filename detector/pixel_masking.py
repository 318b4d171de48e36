"""Hide boxes from the detector by zeroing their pixels before the backbone sees them.

Masked RoI classification (VL-BERT section 3.3) asks for the class of a region from its surroundings and the text.
Hiding only its feature is not enough: neighbouring features and the whole-image feature are computed from the same
pixels.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from detector.errors import UserError


def mask_rectangles(
    boxes: Float[Tensor, "Q 4"], size: Sequence[int], rounding: Literal["outward", "truncate"] = "outward"
) -> Int64[Tensor, "Q 4"]:
    """Whole-pixel rectangles that boxes hide.

    Args:
        boxes: xyxy in pixels of the resized image.
        size: (height, width) of that image without padding.
        rounding: "outward" takes every pixel that the box touches (floor, floor, ceil, ceil); "truncate" does as the
            official VL-BERT code: rows int(y1) to int(y2) and columns int(x1) to int(x2), the last ones included.

    Returns:
        x1, y1, x2, y2, half-open (pixels [y1:y2, x1:x2]) and clipped to the image.

    Raises:
        UserError: a box that is not finite or is inverted.
    """
    is_bad = ~boxes.isfinite().all(1) | (boxes[:, 2:] < boxes[:, :2]).any(1)
    if is_bad.any():
        row = int(is_bad.nonzero()[0])
        raise UserError(
            f"Pixel masking: box {row} is {boxes[row].tolist()}; it must be finite with x1 <= x2, y1 <= y2."
        )
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

    Args:
        pixels: network input after normalisation.
        sizes: (height, width) of each image without padding.
        masks: N entries, xyxy in pixels of the resized image, rounded outward; Q may be 0.
        fill: the colour after normalisation; None = 0, which is the mean colour.
    """
    assert len(pixels) == len(sizes) == len(masks)
    masked = pixels.clone()
    colour = 0.0 if fill is None else fill.to(pixels)[:, None, None]
    for number, (size, boxes) in enumerate(zip(sizes.tolist(), masks, strict=True)):
        for x1, y1, x2, y2 in mask_rectangles(boxes, size).tolist():
            masked[number, :, y1:y2, x1:x2] = colour
    return masked
