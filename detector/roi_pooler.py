"""From feature maps to RoI maps: which level a RoI is pooled from, and the pooling itself, as Detectron2's `ROIPooler`.

Shape legend
    N     images in the batch
    h, w  height and width of a feature map, cells
    J     RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    S     side of a RoI map
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torchvision.ops import roi_pool

from detector.boxes import area
from detector.detector_config import DetectorConfig
from detector.roi_align import align_rois
from detector.structures import FeatureMap, ImageBoxes, LevelMaps

CANONICAL_SIZE = 224  # a box of this side length, in pixels, is pooled from CANONICAL_LEVEL
CANONICAL_LEVEL = 4  # of stride 2 ** 4


def to_rois(boxes: ImageBoxes) -> Float32[Tensor, "J 5"]:
    """Boxes of all images, joined, with the image index in front."""
    counts = torch.tensor([len(rows) for rows in boxes], device=boxes[0].device)
    image = torch.repeat_interleave(torch.arange(len(boxes), device=counts.device), counts)
    joined = torch.cat(boxes).float()
    return torch.cat((image[:, None].to(joined.dtype), joined), dim=1)


def assign_levels(
    boxes: Float[Tensor, "J 4"], lowest: int, highest: int, rule: str = "detectron2"
) -> Int64[Tensor, " J"]:
    """Pyramid level of each box: floor(4 + log2(sqrt(area) / 224)), from `lowest` to `highest` (FPN, equation 1).

    Args:
        rule: "detectron2" adds 1e-8 to the logarithm's argument; "torchvision" adds 1e-6 to the logarithm, so that a
            box just below a limit gets the higher level. A box without area gets the lowest level under both.
    """
    ratio = area(boxes).clamp(min=0).sqrt() / CANONICAL_SIZE
    shifts = (1e-8, 0.0) if rule == "detectron2" else (0.0, 1e-6)
    return torch.floor(CANONICAL_LEVEL + torch.log2(ratio + shifts[0]) + shifts[1]).clamp(lowest, highest).long()


class RoIPooler:
    """Pools each RoI from the level that fits its size; with a single feature map, all from that one."""

    def __init__(self, config: DetectorConfig) -> None:
        self.config = config.roi_heads
        self.in_features = config.roi_heads.in_features
        self.strides = [config.map_shapes[name].stride for name in self.in_features]

    def __call__(self, maps: LevelMaps, rois: Float[Tensor, "J 5"], step: int = 1) -> Float[Tensor, "J channels S S"]:
        """RoI maps of at least 32-bit floats. With `step` s, only every s-th cell of each map is computed.

        Args:
            maps: one per map of IN_FEATURES, in their order.
        """
        if len(self.strides) == 1:
            return self._pool(maps[0], rois, self.strides[0], step)
        first = int(math.log2(self.strides[0]))
        levels = assign_levels(rois[:, 1:], first, first + len(self.strides) - 1, self.config.level_rule)
        levels -= first
        rows = [(levels == number).nonzero()[:, 0] for number in range(len(self.strides))]
        pooled = [
            self._pool(level_map, rois[index], stride, step)
            for level_map, index, stride in zip(maps, rows, self.strides, strict=True)
        ]
        return torch.cat(pooled).index_select(0, torch.cat(rows).argsort())

    def _pool(
        self, features: FeatureMap, rois: Float[Tensor, "rois 5"], stride: int, step: int
    ) -> Float[Tensor, "rois channels S S"]:
        config = self.config
        # pooling coordinates need more than bfloat16's 8 bits; float64 stays
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        rois = rois.to(features.dtype)
        if config.pooler_type == "ROIPool":
            side = (config.pooler_resolution, config.pooler_resolution)
            maps = roi_pool(features, rois, side, 1.0 / stride)[:, :, ::step, ::step]
            return maps.contiguous(memory_format=torch.channels_last)
        return align_rois(
            features,
            rois,
            config.pooler_resolution,
            1.0 / stride,
            sampling_ratio=config.pooler_sampling_ratio,
            aligned=config.pooler_type == "ROIAlignV2",
            stride=step,
        )
