from __future__ import annotations

import numpy as np
import pytest
import torch

from detector.boxes import area, check_boxes, decode_deltas, encode_deltas, pairwise_iou, rescale_detections

BOXES = [[0.0, 0.0, 10.0, 10.0], [5.0, 5.0, 15.0, 15.0], [20.0, 0.0, 30.0, 5.0]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_iou_in_both_conventions(make):
    boxes = make(BOXES)
    iou = pairwise_iou(boxes, boxes)
    assert type(iou) is type(boxes)
    assert iou[0, 1] == pytest.approx(25 / 175)
    assert iou[0, 0] == pytest.approx(1)
    assert iou[0, 2] == 0
    assert pairwise_iou(boxes, boxes, plus_one=True)[0, 1] == pytest.approx(36 / (121 + 121 - 36))
    assert area(boxes)[2] == 50
    assert area(boxes, plus_one=True)[2] == 66


def test_iou_of_boxes_without_area_is_zero():
    point = torch.tensor([[3.0, 3.0, 3.0, 3.0]])
    assert pairwise_iou(point, point).item() == 0
    assert pairwise_iou(point, torch.tensor(BOXES)).sum() == 0


def test_coder_is_its_own_inverse_for_several_classes():
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(6, 2, 2, generator=generator) * 50
    boxes, targets = (torch.cat((part, part + 10 + part), dim=1) for part in corners.unbind(1))
    weights = (10.0, 10.0, 5.0, 5.0)
    deltas = encode_deltas(boxes, targets, weights)
    back = decode_deltas(torch.cat((deltas, torch.zeros_like(deltas)), dim=1), boxes, weights)
    torch.testing.assert_close(back, torch.cat((targets, boxes), dim=1))


def test_only_large_growth_is_clamped():
    box = torch.tensor([[0.0, 0.0, 16.0, 16.0]])
    grown = decode_deltas(torch.tensor([[0.0, 0.0, 99.0, -9.0]]), box, (1.0, 1.0, 1.0, 1.0))[0]
    assert (grown[2] - grown[0]).item() == pytest.approx(1000, rel=1e-4)
    assert (grown[3] - grown[1]).item() == pytest.approx(16 * np.exp(-9), rel=1e-2)


def test_detections_at_another_size_lose_boxes_without_area():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 20.0], [5.0, 5.0, 5.0, 9.0]])
    scaled, kept = rescale_detections(boxes, (20, 10), (40, 40))
    assert scaled.tolist() == [[0, 0, 40, 40]]
    assert kept.tolist() == [0]


@pytest.mark.parametrize("bad", [[0.0, 0.0, float("nan"), 5.0], [0.0, 0.0, float("inf"), 5.0], [5.0, 0.0, 4.0, 5.0]])
def test_bad_box_is_named(bad):
    with pytest.raises(ValueError, match=r"cat\.jpg: box 1 \["):
        check_boxes(torch.tensor([[0.0, 0.0, 1.0, 1.0], bad]), "cat.jpg")
    with pytest.raises(ValueError, match=r"cat\.jpg: box 0 \["):
        check_boxes(np.array([bad]), "cat.jpg")


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"cat\.jpg: box rows must have shape \[R, 4\], got \[5\]"):
        check_boxes(torch.zeros(5), "cat.jpg")
    check_boxes(torch.zeros(0, 4), "cat.jpg")
