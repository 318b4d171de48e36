"""Anchors of the region proposal network; its proposals and losses are tested with the whole detector."""

from __future__ import annotations

import torch

from detector.config import AnchorConfig
from detector.rpn import AnchorGenerator, make_cell_anchors


def test_anchors_are_ordered_size_first_and_not_rounded():
    cells = make_cell_anchors((10, 20), (0.5, 2.0))
    sides = cells[:, 2:] - cells[:, :2]
    torch.testing.assert_close(sides.prod(dim=1), torch.tensor([100.0, 100.0, 400.0, 400.0]))
    torch.testing.assert_close(sides[:, 1] / sides[:, 0], torch.tensor([0.5, 2.0, 0.5, 2.0]))


def test_grid_of_anchors_has_fixed_stride_and_offset():
    anchors = AnchorGenerator(make_cell_anchors((10,), (1.0,)), 16, AnchorConfig(offset=0.5))(2, 3)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres.tolist() == [[8, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]]
