"""Box arithmetic: areas, overlaps, clipping, the box coder, and checks of boxes that come from outside.

Boxes are xyxy and continuous: a box covers [x1, x2) x [y1, y2), so its width is x2 - x1. Functions take and return
NumPy arrays or torch tensors (the type of the first argument comes back); the box coder works on tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)

MAX_LOG_SCALE = math.log(1000.0 / 16)  # upper clamp of dw and dh (Detectron2's scale_clamp): 16 px may become 1000 px


def area(boxes: Array, plus_one: bool = False) -> Array:
    """Areas [...] of boxes [..., 4]; `plus_one` counts inclusive pixels, (x2 - x1 + 1) * (y2 - y1 + 1)."""
    extra = 1 if plus_one else 0
    return (boxes[..., 2] - boxes[..., 0] + extra) * (boxes[..., 3] - boxes[..., 1] + extra)


def pairwise_iou(boxes1: Array, boxes2: Array, plus_one: bool = False) -> Array:
    """Intersection over union of every pair, [R1, 4] and [R2, 4] -> [R1, R2]; 0 where boxes do not overlap.

    Args:
        plus_one: treat coordinates as inclusive pixel indices (VOC, RefCOCO's official evaluation, VL-BERT's labels).
    """
    is_numpy = isinstance(boxes1, np.ndarray)
    first, second = torch.as_tensor(boxes1), torch.as_tensor(boxes2)
    extra = 1 if plus_one else 0
    top_left = torch.maximum(first[:, None, :2], second[None, :, :2])
    bottom_right = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    sides = (bottom_right - top_left + extra).clamp(min=0)
    inter = sides[..., 0] * sides[..., 1]
    union = area(first, plus_one)[:, None] + area(second, plus_one)[None] - inter
    iou = torch.where(inter > 0, inter / union, torch.zeros_like(inter))
    return iou.numpy() if is_numpy else iou


def clip(boxes: Array, size: Sequence[int] | Tensor) -> Array:
    """Boxes [..., 4] clipped to an image of (height, width): x into 0..width, y into 0..height."""
    height, width = size[0], size[1]
    if isinstance(boxes, np.ndarray):
        x, y = boxes[..., 0::2].clip(0, width), boxes[..., 1::2].clip(0, height)
        return np.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), axis=-1)
    x, y = boxes[..., 0::2].clamp(min=0).clamp(max=width), boxes[..., 1::2].clamp(min=0).clamp(max=height)
    return torch.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), dim=-1)


def is_larger(boxes: Array, side: float = 0.0) -> Array:
    """bool [R]: both sides of the box exceed `side`."""
    return (boxes[..., 2] - boxes[..., 0] > side) & (boxes[..., 3] - boxes[..., 1] > side)


def rescale_detections(boxes: Tensor, size: Sequence[int], output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Detections of an image of (height, width) `size` in pixels of the same image at `output_size`.

    The two axes are scaled separately, boxes are clipped, boxes without area dropped (Detectron2's post-processing).

    Returns:
        boxes float [kept, 4] and the kept rows, int64 [kept].
    """
    scale_y, scale_x = float(output_size[0]) / float(size[0]), float(output_size[1]) / float(size[1])
    scaled = clip(boxes * boxes.new_tensor([scale_x, scale_y, scale_x, scale_y]), output_size)
    kept = is_larger(scaled).nonzero()[:, 0]
    return scaled[kept], kept


def encode_deltas(boxes: Tensor, targets: Tensor, weights: Sequence[float]) -> Tensor:
    """Deltas (dx, dy, dw, dh) [R, 4] that move `boxes` onto `targets` (R-CNN, appendix C), times `weights`.

    The order of the operations is Detectron2's, so that the results are equal bit for bit.
    """
    weights = boxes.new_tensor(weights)
    sizes, target_sizes = boxes[..., 2:] - boxes[..., :2], targets[..., 2:] - targets[..., :2]
    shifts = (targets[..., :2] + 0.5 * target_sizes) - (boxes[..., :2] + 0.5 * sizes)
    return torch.cat((weights[:2] * shifts / sizes, weights[2:] * torch.log(target_sizes / sizes)), dim=-1)


def decode_deltas(deltas: Tensor, boxes: Tensor, weights: Sequence[float]) -> Tensor:
    """Boxes moved by their deltas, not clipped to the image.

    Args:
        deltas: float [..., 4 * k], k deltas per box (one per class).
        boxes: float [..., 4].
        weights: divisors of (dx, dy, dw, dh). dw and dh are clamped from above only, as in Detectron2.

    Returns:
        float32 [..., 4 * k].
    """
    deltas = deltas.float().unflatten(-1, (-1, 4)) / torch.tensor(weights, dtype=torch.float32, device=deltas.device)
    boxes = boxes.float()[..., None, :]
    sizes = boxes[..., 2:] - boxes[..., :2]
    centres = deltas[..., :2] * sizes + (boxes[..., :2] + 0.5 * sizes)
    half = 0.5 * (deltas[..., 2:].clamp(max=MAX_LOG_SCALE).exp() * sizes)
    return torch.cat((centres - half, centres + half), dim=-1).flatten(-2)


def check_boxes(boxes: Array, name: str, what: str = "box") -> None:
    """Raise a ValueError that names the image and the row if a box [R, 4] is not finite or has no area.

    Args:
        name: of the image (or file) the boxes belong to.
        what: the word for a row of these boxes, e.g. "annotated box".
    """
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"{name}: {what} rows must have shape [R, 4], got {list(boxes.shape)}.")
    tensor = torch.as_tensor(boxes)
    valid = torch.isfinite(tensor).all(dim=1) & is_larger(tensor)
    if bool(valid.all()):
        return
    row = int((~valid).nonzero()[0])
    values = ", ".join(f"{value:g}" for value in tensor[row].tolist())
    raise ValueError(
        f"{name}: {what} {row} [{values}] is not finite or has no area; it must be [x1, y1, x2, y2], x1 < x2, y1 < y2."
    )
