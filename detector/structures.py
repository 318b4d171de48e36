"""Input and output of a detector.

Shape legend of the whole package
    N     images in the batch
    H, W  height and width of the padded batch, pixels of the network input
    h, w  height and width of a feature map, cells
    R     regions (candidate boxes) of one image; differs from image to image, so regions are lists of N tensors
    G     annotated objects of one image
    P     proposals or sampled RoIs of one image
    Q     boxes hidden in one image
    B     anchors of one image
    J     RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    S     side of a RoI map
    D     width of a region feature
    K     foreground classes; K is also the label of the background
    A     attributes
    T     attribute slots of an object

`K_plus_1` is K + 1: class logits have the background in their last column; `A_plus_1`: "no attribute" comes last. Words
(`channels`, `kept`) are sizes without a letter. A leading underscore (`_R`) marks a size that may differ from entry to
entry of a list. The tests enforce these annotations.

All boxes are xyxy, in pixels of the *resized* image, continuous: a box covers [x1, x2) x [y1, y2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64, Num
from torch import Tensor

FeatureMap = Float[Tensor, "N channels h w"]
FeatureMaps = dict[str, Float[Tensor, "N _channels _h _w"]]  # by Detectron2's names: res4, or p2 .. p6
LevelMaps = list[Float[Tensor, "N channels _h _w"]]  # maps of one width, finest first
ImageBoxes = list[Float[Tensor, "_R 4"]]  # one entry per image
ImageSizes = list[tuple[int, int]]  # one (height, width) per image, without padding


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss before its mean is taken.

    Sum and count are kept apart so that several processes, each with a different number of regions or words, can divide
    by the count of *all* of them: two processes then give exactly the gradient of one process with the joined batch.
    """

    total: Float[Tensor, ""]  # with gradient
    count: Float[Tensor, ""]  # without gradient; 0 when nothing was labelled

    @property
    def mean(self) -> Float[Tensor, ""]:
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
class PerImage(Movable):
    """A dataclass whose lists hold one tensor per image, each with as many rows as that image has boxes."""

    boxes: list[Float[Tensor, "_R 4"]]

    def __post_init__(self) -> None:
        rows = [len(boxes) for boxes in self.boxes]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list) and [len(tensor) for tensor in value] != rows:
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must have as many rows per image as boxes, {rows}, but has "
                    f"{[len(tensor) for tensor in value]}."
                )


@dataclasses.dataclass
class PrecomputedFeatures(Movable):
    """Features of given boxes that were extracted before and read from a file."""

    features: list[Float[Tensor, "_R D"]]  # N entries, row by row the features of the boxes
    image_features: Float[Tensor, "N D"] | None = None  # of the whole images


@dataclasses.dataclass
class ImageBatch(Movable):
    """N images as the network sees them: resized, mean-subtracted, zero-padded at the right and the bottom."""

    pixels: Float[Tensor, "N 3 H W"]  # channel order of the detector's config (BGR by default)
    sizes: Int64[Tensor, "N 2"]  # (height, width) of each resized image without padding
    original_sizes: Num[Tensor, "N 2"]  # (height, width) of each image as stored (after its EXIF rotation)
    names: list[str]  # N names (usually paths) for error messages
    precomputed: PrecomputedFeatures | None = None  # if given, nothing was read and `pixels` is empty, [N, 3, 0, 0]

    def __len__(self) -> int:
        return self.pixels.shape[0]

    @property
    def scales(self) -> Float32[Tensor, "N 2"]:
        """(x, y) factors from original to resized pixels."""
        return (self.sizes.float() / self.original_sizes.float()).flip(1)


@dataclasses.dataclass
class DetectionTargets(Movable):
    """Annotated objects of N images, for the detection losses."""

    boxes: list[Float[Tensor, "_G 4"]]
    classes: list[Int64[Tensor, " _G"]]  # 0 .. K-1
    attributes: list[Int64[Tensor, "_G T"]] | None = None  # attribute labels 0 .. A-1, -1 = none in this slot


@dataclasses.dataclass
class Regions(PerImage):
    """A detector's output for N images: one row per region, in each image's own order.

    Raises:
        ValueError: lists that do not have the same rows.
    """

    features: list[Float[Tensor, "_R D"]]  # differentiable
    class_logits: list[Float[Tensor, "_R K_plus_1"]]  # background last; no column where they are unknown
    scores: list[Float[Tensor, " _R"]] | None = None  # detection score; None when the boxes were given
    classes: list[Int64[Tensor, " _R"]] | None = None  # detected class; None when the boxes were given
    attribute_logits: list[Float[Tensor, "_R A"]] | None = None  # only with an attribute head
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)  # detection losses, when targets were passed

    def __len__(self) -> int:
        return len(self.boxes)
