"""Anchors with an offset; the others, proposals and losses are compared in tests/parity."""

from __future__ import annotations

from detector.config import AnchorConfig
from detector.rpn import AnchorGenerator, make_cell_anchors


def test_grid_of_anchors_has_fixed_stride_and_offset():
    anchors = AnchorGenerator(make_cell_anchors((10,), (1.0,)), 16, AnchorConfig(offset=0.5))(2, 3)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres.tolist() == [[8, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]]
