from __future__ import annotations

import torch

from detector.config import DetectorConfig
from detector.roi_pooler import RoIPooler, align_rois, assign_levels, to_rois

STAGES = ["res2", "res3", "res4", "res5"]
FLAT = {
    "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone",
    "MODEL.RESNETS.OUT_FEATURES": STAGES,
    "MODEL.FPN.IN_FEATURES": STAGES,
    "MODEL.RPN.IN_FEATURES": ["p2"],
    "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
    "MODEL.ROI_HEADS.IN_FEATURES": ["p3", "p4"],
    "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 3,
}


def test_levels_double_with_the_side_and_are_clamped():
    sides = torch.tensor([0.0, 50.0, 111.9, 112.1, 223.9, 224.1, 447.9, 448.1, 5000.0])
    boxes = torch.stack((torch.zeros(9), torch.zeros(9), sides, sides), dim=1)
    assert assign_levels(boxes, 2, 5).tolist() == [2, 2, 2, 3, 3, 4, 4, 5, 5]
    assert assign_levels(boxes, 3, 4).tolist() == [3, 3, 3, 3, 3, 4, 4, 4, 4]


def test_each_roi_is_pooled_from_its_level_in_the_given_order():
    pooler = RoIPooler(DetectorConfig.from_flat(FLAT))
    assert pooler.strides == [8, 16]
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(2, 4, side, side, generator=generator) for side in (64, 32)]
    boxes = [
        torch.tensor([[0.0, 0, 400, 300], [5, 6, 40, 90]]),
        torch.tensor([[10.0, 3, 60, 60], [0, 0, 500, 500], [9, 9, 20, 20]]),
    ]
    rois = to_rois(boxes)
    pooled = pooler(maps, rois)
    for row, level in enumerate((1, 0, 0, 1, 0)):
        expected = align_rois(maps[level], rois[[row]], 3, 1 / pooler.strides[level], sampling_ratio=0, aligned=True)
        torch.testing.assert_close(pooled[[row]], expected)


def test_levels_without_rois_get_a_gradient_of_zero():
    """Parameters without a gradient would stop distributed training."""
    pooler = RoIPooler(DetectorConfig.from_flat(FLAT))
    for boxes in ([[0.0, 0, 9, 9]], []):
        maps = [torch.randn(1, 4, side, side).requires_grad_() for side in (8, 4)]
        rois = to_rois([torch.tensor(boxes).reshape(-1, 4)])
        pooled = pooler(maps, rois)
        assert pooled.shape == (len(boxes), 4, 3, 3)
        pooled.sum().backward()
        assert bool(maps[0].grad.any()) == bool(boxes)
        assert not maps[1].grad.any()
