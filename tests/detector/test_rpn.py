"""The region proposal network: which anchors are positive, and the weights of its losses."""

from __future__ import annotations

import pytest
import torch

from detector.config import DetectorConfig
from detector.rpn import RPN, RPNOutput
from detector.structures import DetectionTargets

ANCHORS = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 6], [0, 0, 10, 4], [50, 50, 60, 60]])
TARGETS = DetectionTargets([ANCHORS[:1]], [torch.tensor([0])])  # IoU 1, 0.6, 0.4, 0 with the anchors
SIZES = torch.tensor([[100, 100]])


def make_rpn(**settings: object) -> RPN:
    torch.manual_seed(0)
    return RPN(DetectorConfig.from_flat({f"MODEL.RPN.{name}": value for name, value in settings.items()}))


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, [1, -1, -1, 0]),
        ({"IOU_THRESHOLDS": [0.5, 0.7]}, [1, -1, 0, 0]),
        ({"IOU_THRESHOLDS": [0.3, 0.5]}, [1, 1, -1, 0]),
        ({"IOU_LABELS": [-1, 0, 1]}, [1, 0, 0, -1]),
        ({"IOU_THRESHOLDS": [0.5], "IOU_LABELS": [0, 1]}, [1, 1, 0, 0]),
    ],
)
def test_anchors_are_labelled_by_the_thresholds_of_the_settings(settings, labels):
    labels_of_anchors, matches = make_rpn(**settings).label_anchors(ANCHORS, TARGETS.boxes, SIZES)
    assert labels_of_anchors.tolist() == [labels]
    assert matches.tolist() == [[0, 0, 0, 0]]


def test_the_box_loss_has_a_weight_of_its_own():
    output = RPNOutput(ANCHORS, torch.zeros(1, 4), torch.ones(1, 4, 4), (4,))
    once = make_rpn().losses(output, TARGETS, SIZES)
    thrice = make_rpn(BBOX_REG_LOSS_WEIGHT=3.0).losses(output, TARGETS, SIZES)
    assert once["loss_rpn_loc"].total > 0
    torch.testing.assert_close(thrice["loss_rpn_loc"].total, 3 * once["loss_rpn_loc"].total)
    assert thrice["loss_rpn_cls"].total == once["loss_rpn_cls"].total
