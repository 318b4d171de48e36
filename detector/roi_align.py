"""RoIAlign (He et al., Mask R-CNN, section 3) that gives torchvision's numbers and is fast on CPU in both directions.

A cell of a RoI map is a weighted sum of a few cells of the feature map. With the feature map as a table of rows (one
row of channels per cell), that is `embedding_bag`: it reads whole rows of a channels-last map, where torchvision's
CPU kernel walks through one channel after the other; its backward pass takes about ten times as long.

Shape legend: see `detector/structures.py`; `reach` is the number of feature map cells that a cell of the RoI map
reads along one axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torchvision.ops import roi_align

from detector.structures import FeatureMap


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
    """Pool RoIs bilinearly.

    Args:
        side: cells of the RoI map along each axis.
        spatial_scale: cells of the feature map per pixel.
        sampling_ratio: samples per cell of the RoI map along one axis; 0 or less = the width of the cell, rounded up.
        aligned: half-pixel shift (Detectron2's ROIAlignV2); without it RoIs are at least one cell of the map large.
        stride: 1 computes all cells of the RoI map, 2 every second cell from the first on, and so on.

    Returns:
        RoI maps with S = side / stride rounded up, in channels-last memory on CPU.
    """
    if features.device.type != "cpu" or not len(rois):  # the backward pass of `embedding_bag` crashes without any bag
        maps = roi_align(features, rois, (side, side), spatial_scale, sampling_ratio, aligned)
        return maps[:, :, ::stride, ::stride]
    _, channels, height, width = features.shape
    shift = 0.5 if aligned else 0.0
    x1, y1, x2, y2 = (rois[:, 1:].detach() * spatial_scale - shift).unbind(1)
    smallest = -torch.inf if aligned else 1.0
    rows, row_weights = _axis(y1, (y2 - y1).clamp(min=smallest), side, stride, sampling_ratio, height)
    columns, column_weights = _axis(x1, (x2 - x1).clamp(min=smallest), side, stride, sampling_ratio, width)

    image = rois[:, 0].long()[:, None, None, None, None]
    cells = (image * height + rows[:, :, None, :, None]) * width + columns[
        :, None, :, None, :
    ]  # [J, S, S, reach, reach]
    weights = row_weights[:, :, None, :, None] * column_weights[:, None, :, None, :]
    cells, weights = cells.flatten(0, 2).flatten(1), weights.flatten(0, 2).flatten(1)
    used = weights != 0
    counts = used.sum(dim=1)
    table = features.permute(0, 2, 3, 1).reshape(-1, channels)
    pooled = F.embedding_bag(
        cells[used], table, counts.cumsum(0) - counts, mode="sum", per_sample_weights=weights[used]
    )
    num_cells = rows.shape[1]
    return pooled.view(len(rois), num_cells, num_cells, channels).permute(0, 3, 1, 2)


def _axis(
    start: Float[Tensor, " J"], length: Float[Tensor, " J"], side: int, stride: int, sampling_ratio: int, limit: int
) -> tuple[Int64[Tensor, "J S reach"], Float[Tensor, "J S reach"]]:
    """Which cells of the feature map each cell of the RoI map averages along one axis.

    Args:
        start, length: of the RoIs, in cells of the feature map.
        limit: cells of the feature map along the axis.

    Returns:
        indices of the cells, and their weights, which are 0 where there is nothing to read.
    """
    size = length / side
    samples = torch.full_like(size, sampling_ratio) if sampling_ratio > 0 else size.ceil().clamp(min=0)
    most = max(int(samples.max()), 1) if len(samples) else 1
    cell = torch.arange(0, side, stride, dtype=start.dtype)
    number = torch.arange(most, dtype=start.dtype)
    # the order of these operations is torchvision's, so that samples on a border fall on the same side of it
    point = (start[:, None] + cell * size[:, None])[..., None] + (
        (number + 0.5) * size[:, None] / samples.clamp(min=1)[:, None]
    )[:, None]
    inside = (point >= -1) & (point <= limit) & (number < samples[:, None])[:, None]
    point = point.clamp(0, limit - 1)
    low = point.long()
    upper = point - low  # weight of the cell after `low`
    share = inside / samples.clamp(min=1)[:, None, None]

    # samples lie at most one cell apart unless `sampling_ratio` is small: they share cells, which are read only once
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
