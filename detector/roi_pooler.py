"""RoI pooling: assign RoIs to feature levels and pool RoI maps, like Detectron2's `ROIPooler`.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from detector.boxes import area
from detector.config import DetectorConfig, MaskHeadConfig, ROIHeadsConfig
from detector.structures import FeatureMap, ImageBoxes, LevelMaps


def align_rois(
    features: FeatureMap,
    rois: Float[Tensor, "J 5"],
    side: int,
    spatial_scale: float,
    *,
    sampling_ratio: int,
    aligned: bool,
    stride: int = 1,
) -> Float[Tensor, "J channels S S"]:
    """Pool by RoIAlign (He et al., Mask R-CNN, section 3) with the same results as torchvision, but faster on CPU.

    Args:
        side: number of cells of the RoI map along each axis.
        spatial_scale: cells of the feature map per pixel.
        sampling_ratio: samples per cell of the RoI map along each axis; 0 or less: the cell's size, rounded up.
        aligned: shift by half a pixel (Detectron2's ROIAlignV2). Without it, RoIs are at least one cell wide and high.
        stride: 1 computes all cells of the RoI map, 2 every second cell starting with the first, and so on.

    Returns:
        RoI maps with S = ceil(side / stride), on CPU in channels-last memory format.
    """
    # `embedding_bag` crashes in backward without bags; what is exported must not depend on data
    if features.device.type != "cpu" or not len(rois) or torch.compiler.is_compiling():
        from torchvision.ops import roi_align  # late: it imports torch's compiler

        maps = roi_align(features, rois, (side, side), spatial_scale, sampling_ratio, aligned)
        return maps[:, :, ::stride, ::stride]
    _, channels, height, width = features.shape
    shift = 0.5 if aligned else 0.0
    x1, y1, x2, y2 = (rois[:, 1:].detach() * spatial_scale - shift).unbind(1)
    smallest = -torch.inf if aligned else 1.0
    rows, row_weights = _axis_weights(y1, (y2 - y1).clamp(min=smallest), side, stride, sampling_ratio, height)
    columns, column_weights = _axis_weights(x1, (x2 - x1).clamp(min=smallest), side, stride, sampling_ratio, width)

    image = rois[:, 0].long()[:, None, None, None, None]
    cells = (image * height + rows[:, :, None, :, None]) * width
    cells = cells + columns[:, None, :, None, :]  # [J, S, S, reach, reach]
    weights = row_weights[:, :, None, :, None] * column_weights[:, None, :, None, :]
    cells = cells.flatten(0, 2).flatten(1)
    weights = weights.flatten(0, 2).flatten(1)
    used = weights != 0
    counts = used.sum(dim=1)
    table = features.permute(0, 2, 3, 1).reshape(-1, channels)
    pooled = F.embedding_bag(
        cells[used], table, counts.cumsum(0) - counts, mode="sum", per_sample_weights=weights[used]
    )
    num_cells = rows.shape[1]
    return pooled.view(len(rois), num_cells, num_cells, channels).permute(0, 3, 1, 2)


def _axis_weights(
    start: Float[Tensor, " J"], length: Float[Tensor, " J"], side: int, stride: int, sampling_ratio: int, limit: int
) -> tuple[Int64[Tensor, "J S reach"], Float[Tensor, "J S reach"]]:
    """Compute the cells of the feature map that each cell of the RoI map averages along one axis.

    Args:
        start, length: start and length of the RoIs, in cells of the feature map.
        limit: number of cells of the feature map along the axis.

    Returns:
        indices of the cells, and their weights, which are 0 for unused entries.
    """
    size = length / side
    if sampling_ratio > 0:
        samples = torch.full_like(size, sampling_ratio)
    else:
        samples = size.ceil().clamp(min=0)
    most = max(int(samples.max()), 1) if len(samples) else 1
    cell = torch.arange(0, side, stride, dtype=start.dtype)
    number = torch.arange(most, dtype=start.dtype)
    # same order of operations as torchvision, so that samples at a border are rounded the same way
    cell_start = start[:, None] + cell * size[:, None]
    offset = (number + 0.5) * size[:, None] / samples.clamp(min=1)[:, None]
    point = cell_start[..., None] + offset[:, None]
    inside = (point >= -1) & (point <= limit) & (number < samples[:, None])[:, None]
    point = point.clamp(0, limit - 1)
    low = point.long()
    upper = point - low  # weight of the cell after `low`
    share = inside / samples.clamp(min=1)[:, None, None]

    # samples at most one cell apart share cells, so read each cell only once; with a small `sampling_ratio` they do not
    first = low[..., :1]
    reach = int((low - first).max()) + 2 if low.numel() else 2
    if reach > 2 * most:
        index = torch.cat((low, low + 1), dim=2)
        weight = torch.cat(((1 - upper) * share, upper * share), dim=2)
    else:
        index = first + torch.arange(reach)
        weight = torch.zeros(index.shape, dtype=start.dtype)
        weight.scatter_add_(2, low - first, (1 - upper) * share)
        weight.scatter_add_(2, low - first + 1, upper * share)
    return index.clamp(max=limit - 1), weight


CANONICAL_SIZE = 224  # boxes with sides of this many pixels are pooled from CANONICAL_LEVEL
CANONICAL_LEVEL = 4  # stride 2 ** 4


def to_rois(boxes: ImageBoxes) -> Float32[Tensor, "J 5"]:
    """Concatenate the boxes of all images, with the image index in the first column."""
    image = torch.cat([torch.full((len(rows), 1), float(number)) for number, rows in enumerate(boxes)])
    joined = torch.cat(boxes).float()
    return torch.cat((image.to(joined.device, non_blocking=True), joined), dim=1)


def assign_levels(
    boxes: Float[Tensor, "J 4"], lowest: int, highest: int, rule: str = "detectron2"
) -> Int64[Tensor, " J"]:
    """Compute pyramid levels floor(4 + log2(sqrt(area) / 224)), clamped to lowest .. highest (FPN, equation 1).

    `rule`: "detectron2" adds 1e-8 to the logarithm's argument; "torchvision" adds 1e-6 to the logarithm, so a box just
    below a threshold is assigned to the higher level. With both, a box with area 0 gets the lowest level.
    """
    ratio = area(boxes).clamp(min=0).sqrt() / CANONICAL_SIZE
    if rule == "detectron2":
        levels = CANONICAL_LEVEL + torch.log2(ratio + 1e-8)
    else:
        levels = CANONICAL_LEVEL + torch.log2(ratio) + 1e-6
    return torch.floor(levels).clamp(lowest, highest).long()


class RoIPooler:
    """Pool each RoI from the feature level for its size.

    Args:
        settings: type, resolution and sampling ratio; None: those of the box head.
    """

    def __init__(self, config: DetectorConfig, settings: ROIHeadsConfig | MaskHeadConfig | None = None) -> None:
        self.settings = settings or config.roi_heads
        self.level_rule = config.roi_heads.level_rule
        self.in_features = config.roi_heads.in_features
        self.strides = [config.map_shapes[name].stride for name in self.in_features]

    def __call__(self, maps: LevelMaps, rois: Float[Tensor, "J 5"], step: int = 1) -> Float[Tensor, "J channels S S"]:
        """Pool RoI maps (float32 or float64) from the maps of IN_FEATURES.

        With `step`, only every step-th cell of them along both axes.
        """
        if len(self.strides) == 1:
            return self._pool(maps[0], rois, self.strides[0], step)
        first = int(math.log2(self.strides[0]))
        levels = assign_levels(rois[:, 1:], first, first + len(self.strides) - 1, self.level_rule)
        levels -= first
        order = levels.argsort(stable=True)
        numbers = torch.arange(len(self.strides), device=levels.device)
        counts = (levels[:, None] == numbers).sum(dim=0).tolist()  # a GPU waits once, and not for each level
        pooled = []
        for level_map, index, stride in zip(maps, order.split(counts), self.strides, strict=True):
            pooled.append(self._pool(level_map, rois[index], stride, step))
        return torch.cat(pooled).index_select(0, order.argsort())

    def _pool(
        self, features: FeatureMap, rois: Float[Tensor, "rois 5"], stride: int, step: int
    ) -> Float[Tensor, "rois channels S S"]:
        settings = self.settings
        # bfloat16 is not precise enough for RoI coordinates
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        rois = rois.to(features.dtype)
        if settings.pooler_type == "ROIPool":
            from torchvision.ops import roi_pool

            side = (settings.pooler_resolution, settings.pooler_resolution)
            maps = roi_pool(features, rois, side, 1.0 / stride)[:, :, ::step, ::step]
            return maps.contiguous(memory_format=torch.channels_last)
        return align_rois(
            features,
            rois,
            settings.pooler_resolution,
            1.0 / stride,
            sampling_ratio=settings.pooler_sampling_ratio,
            aligned=settings.pooler_type == "ROIAlignV2",
            stride=step,
        )
