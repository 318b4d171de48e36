"""Anchors: on each feature map one set of cell anchors, repeated at every position.

Shape legend: see `detector/structures.py`; cell_anchors = sizes * aspect ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from detector.config_groups import AnchorConfig


def make_cell_anchors(sizes: Sequence[float], aspect_ratios: Sequence[float]) -> Float32[Tensor, "cell_anchors 4"]:
    """Anchors centred on (0, 0): sizes in the outer loop, ratios (height / width) in the inner one.

    A size is the square root of the area in pixels of the network input. Corners are not rounded (torchvision's are).
    """
    anchors = []
    for size in sizes:
        for ratio in aspect_ratios:
            width = math.sqrt(size**2 / ratio)
            height = ratio * width
            anchors.append((-width / 2, -height / 2, width / 2, height / 2))
    return torch.tensor(anchors)


def configured_cell_anchors(config: AnchorConfig, num_maps: int) -> list[Float32[Tensor, "cell_anchors 4"]]:
    """CELL_ANCHORS where given, otherwise made from SIZES and ASPECT_RATIOS; one entry per feature map."""
    if config.cell_anchors:
        return list(torch.tensor(config.cell_anchors).chunk(num_maps))
    return [make_cell_anchors(*pair) for pair in config.pairs(num_maps)]


class AnchorGenerator(nn.Module):
    """Anchors of a feature map of known stride.

    The cell anchors are a buffer that is not saved, as in Detectron2 since May 2021; older checkpoints hold them under
    `cell_anchors.0` (one per map), and `detector.checkpoint` compares those with the configured ones.
    """

    cell_anchors: Tensor

    def __init__(
        self,
        cell_anchors: Float32[Tensor, "cell_anchors 4"],
        *,
        stride: int,
        offset: float = 0.0,
        follows_image: bool = False,
    ) -> None:
        """
        Args:
            cell_anchors: corners relative to the centre of a cell's first anchor.
            stride: pixels of the network input per cell of the feature map.
            offset: place of the first anchor's centre, as a fraction of the stride.
            follows_image: see `AnchorConfig.strides`.
        """
        super().__init__()
        self.stride = stride
        self.offset = offset
        self.follows_image = follows_image
        self.register_buffer("cell_anchors", cell_anchors, persistent=False)

    def __len__(self) -> int:
        return len(self.cell_anchors)

    def forward(self, height: int, width: int, padded: Sequence[int] | None = None) -> Float[Tensor, "B 4"]:
        """Anchors of a map of height x width cells, ordered by (y, x, cell anchor), the cell anchor running fastest.

        Args:
            padded: (height, width) of the padded batch, for strides that follow it.
        """
        strides = [self.stride] * 2
        if self.follows_image and padded is not None:
            strides = [padded[0] // height, padded[1] // width]
        y, x = (self._starts(cells, stride) for cells, stride in zip((height, width), strides, strict=True))
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        shifts = torch.stack((grid_x, grid_y, grid_x, grid_y), dim=-1)
        return (shifts[:, :, None] + self.cell_anchors).reshape(-1, 4)

    def _starts(self, cells: int, stride: int) -> Float32[Tensor, " cells"]:
        start = self.offset * stride
        device = self.cell_anchors.device
        return torch.arange(start, start + cells * stride, stride, dtype=torch.float32, device=device)[:cells]
