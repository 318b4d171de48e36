"""The region proposal network: which anchors are positive, its losses, and its proposals."""

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


def test_anchors_that_reach_beyond_the_image_are_ignored_if_asked():
    wide = [(20, 100)]  # height, width
    rows = [[80.0, 0, 100, 10], [80, 0, 104, 10], [98, 0, 105, 10], [0, 10, 9, 24], [0, 10, 9, 25]]
    anchors = torch.tensor([*rows, [-5, 0, 9, 9], [-6, 0, 9, 9]])
    labels, _ = make_rpn(BOUNDARY_THRESH=5).label_anchors(anchors, [anchors[:1]], wide)
    assert labels.tolist() == [[1, 1, -1, 0, -1, 0, -1]]
    labels, _ = make_rpn().label_anchors(anchors, [anchors[:1]], wide)
    assert labels.tolist() == [[1, 1, 0, 0, 0, 0, 0]]


def test_the_losses_of_two_images_are_the_sum_of_both():
    """Each image's anchors learn its own objects, and the count grows with the number of images."""
    objects = [ANCHORS[:2], ANCHORS[[3]] + 1]
    scores = torch.arange(8.0).view(2, 4)
    rpn = make_rpn()
    sums = {"loss_rpn_cls": 0.0, "loss_rpn_loc": 0.0}
    for boxes, row in zip(objects, scores, strict=True):
        output = RPNOutput(ANCHORS, row[None], torch.ones(1, 4, 4), (4,))
        targets = DetectionTargets([boxes], [torch.zeros(len(boxes), dtype=torch.int64)])
        for name, loss in rpn.losses(output, targets, SIZES).items():
            assert loss.count == 256  # BATCH_SIZE_PER_IMAGE
            sums[name] += float(loss.total)
    classes = [torch.zeros(len(boxes), dtype=torch.int64) for boxes in objects]
    output = RPNOutput(ANCHORS, scores, torch.ones(2, 4, 4), (4,))
    losses = rpn.losses(output, DetectionTargets(objects, classes), SIZES.repeat(2, 1))
    assert {name: float(loss.total) for name, loss in losses.items()} == pytest.approx(sums)
    assert {float(loss.count) for loss in losses.values()} == {512.0}


def test_proposals_suppress_only_those_of_their_own_map():
    rows = torch.tensor([0, 3, 0, 3])
    scores = torch.tensor([[4.0, 3, 2, 1]])
    rpn = make_rpn().eval()
    for counts, proposals in (((2, 2), [0, 1, 2, 3]), ((4,), [0, 1])):
        output = RPNOutput(ANCHORS[rows], scores, torch.zeros(1, 4, 4), counts)
        assert rpn.propose(output, [(100, 100)]).anchor_index[0].tolist() == proposals
