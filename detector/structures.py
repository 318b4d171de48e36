"""What goes into a detector and what comes out of it.

Shape legend
    N   images in the batch
    H,W height and width of the padded batch, pixels of the network input
    R   regions of one image (differs from image to image, so regions are lists of N tensors)
    G   annotated objects of one image
    D   width of a region feature
    K   foreground classes; class logits have K + 1 columns, background last

All boxes are xyxy, float32, in pixels of the *resized* image, continuous: a box covers [x1, x2) x [y1, y2).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Loss(NamedTuple):
    """A loss before its mean is taken.

    Keeping sum and count apart lets several processes, each with another number of regions or words, divide by the
    count of *all* of them: two processes then give exactly the gradient of one with the joined batch.
    """

    total: Tensor  # scalar, with gradient
    count: Tensor  # scalar float, without gradient; 0 when nothing was labelled

    @property
    def mean(self) -> Tensor:
        """total / count; exactly 0 (with a gradient of 0) when nothing was labelled, never NaN."""
        return self.total / self.count.clamp(min=1)


def _move(value: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    if isinstance(value, Tensor) or hasattr(value, "to"):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, list):
        return [_move(item, device, non_blocking) for item in value]
    if isinstance(value, dict):
        return {key: _move(item, device, non_blocking) for key, item in value.items()}
    return value


class Movable:
    """Adds `.to(device)` to a dataclass of tensors, lists of tensors and nested dataclasses."""

    def to(self, device: torch.device | str, non_blocking: bool = False):
        changes = {
            field.name: _move(getattr(self, field.name), device, non_blocking) for field in dataclasses.fields(self)
        }
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class PrecomputedFeatures(Movable):
    """Features of given boxes that were extracted before and read from a file."""

    features: list[Tensor]  # N x float32 [R, D], row by row those of the boxes
    image_features: Tensor | None = None  # float32 [N, D], of the whole images


@dataclasses.dataclass
class ImageBatch(Movable):
    """N images as the network sees them: resized, mean-subtracted, zero-padded at the right and the bottom."""

    pixels: Tensor  # float32 [N, 3, H, W], channel order of the detector's config (BGR unless it says otherwise)
    sizes: Tensor  # int64 [N, 2], (height, width) of each resized image without padding
    original_sizes: Tensor  # int64 [N, 2], (height, width) of each image as stored (after its EXIF rotation)
    names: list[str]  # N names (usually paths) for error messages
    precomputed: PrecomputedFeatures | None = None  # then `pixels` is empty, [N, 3, 0, 0]: nothing was read

    def __len__(self) -> int:
        return self.pixels.shape[0]

    @property
    def scales(self) -> Tensor:
        """float32 [N, 2]: (x, y) factors from original to resized pixels."""
        return (self.sizes.float() / self.original_sizes.float()).flip(1)


@dataclasses.dataclass
class DetectionTargets(Movable):
    """Annotated objects of N images, for the detection losses."""

    boxes: list[Tensor]  # N x float32 [G, 4]
    classes: list[Tensor]  # N x int64 [G], 0 .. K-1
    attributes: list[Tensor] | None = None  # N x int64 [G, A], attribute labels of each object, -1 = none in this slot


@dataclasses.dataclass
class Regions(Movable):
    """What a detector says about N images: one row per region, in each image's own order."""

    boxes: list[Tensor]  # N x float32 [R, 4]
    features: list[Tensor]  # N x float [R, D], differentiable
    class_logits: list[Tensor]  # N x float [R, K + 1], background last
    scores: list[Tensor] | None = None  # N x float [R], detection score; None when the boxes were given
    classes: list[Tensor] | None = None  # N x int64 [R], detected class; None when the boxes were given
    attribute_logits: list[Tensor] | None = None  # N x float [R, attributes], if the detector has an attribute head
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)  # detection losses, when targets were passed

    def __len__(self) -> int:
        return len(self.boxes)
