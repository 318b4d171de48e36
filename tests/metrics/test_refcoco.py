"""Accuracies of referring expressions under the IoU conventions, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torchvision.ops import generalized_box_iou

from detector.errors import UserError
from e2e_vl.metrics.refcoco import (
    ReferringPrediction,
    all_boxes_are_right,
    area_iou,
    box_iou,
    generalized_iou,
    hits,
    referring_metrics,
    write_submission,
)

GT = [10.0, 10, 30, 30]  # 20 x 20
HALF = [10.0, 10, 30, 20]  # IoU exactly 0.5
SIZE = (100, 100)


def record(box, candidates=None, **extra) -> ReferringPrediction:
    candidates = ([] if box is None else [box]) if candidates is None else candidates
    base = {"box": box, "score": 0.5, "gt_box": GT, "candidate_boxes": candidates, "image_size": SIZE}
    return ReferringPrediction.from_record(base | extra)


def test_iou_of_the_conventions_by_hand():
    shifted = [20.0, 10, 40, 30]
    assert box_iou(shifted, GT, "mattnet") == pytest.approx(200 / 600)
    assert box_iou(shifted, GT, "strict") == pytest.approx(200 / 600)
    assert box_iou(shifted, GT, "vlbert", SIZE) == pytest.approx(11 * 21 / (2 * 21 * 21 - 11 * 21))
    assert box_iou([29.0, 10, 49, 30], GT, "mattnet") == 0, "an overlap of a single pixel"
    beyond = [80.0, 0, 120, 40], [80.0, 0, 100, 40]  # the clamped prediction ends at x = 99, the truth at 100
    assert box_iou(*beyond, "vlbert", SIZE) == pytest.approx((20 * 41) / (21 * 41))


@pytest.mark.parametrize(("convention", "right"), [("mattnet", True), ("strict", False), ("vlbert", True)])
def test_exactly_one_half(convention, right):
    assert bool(hits(HALF, GT, convention, SIZE)) is right
    moved = np.array(HALF) + 0.1  # not representable: the IoU is a rounding error off
    assert bool(hits(moved, np.array(GT) + 0.1, convention, SIZE)) is right


def test_boxes_without_area_and_no_boxes():
    point = [5.0, 5, 5, 5]
    assert box_iou(point, point, "mattnet") == 0
    assert hits(np.zeros((0, 4)), np.array(GT), "vlbert", SIZE).shape == (0,)


def test_metrics_over_all_and_by_family():
    far = [50.0, 50, 60, 60]
    records = [
        record(GT, family="attribute"),
        record(far, [far, HALF], family="attribute"),
        record(far, family="relation"),
        record(HALF),
    ]
    assert referring_metrics(records) == {
        "accuracy": 0.5,
        "ceiling": 0.75,
        "count": 4.0,
        "accuracy/attribute": 0.5,
        "ceiling/attribute": 1.0,
        "accuracy/relation": 0.0,
        "ceiling/relation": 0.0,
    }
    strict = referring_metrics(records, "strict")
    assert (strict["accuracy"], strict["ceiling"]) == (0.25, 0.25)
    assert referring_metrics(records, "vlbert")["accuracy"] == 0.5


def test_no_records_and_no_boxes_are_no_division_by_zero():
    assert referring_metrics([]) == {"accuracy": 0.0, "ceiling": 0.0, "count": 0.0}
    nothing = record(None, ann_id=1, candidate_ann_ids=[])
    for convention in ("mattnet", "vlbert", "strict", "same_annotation"):
        assert referring_metrics([nothing], convention) == {"accuracy": 0.0, "ceiling": 0.0, "count": 1.0}


@pytest.mark.parametrize(("other", "referred"), [(5, 6), ("a5", "a6")])
def test_same_annotation_rejects_a_near_duplicate(other, referred):
    near = [10.0, 10, 30, 29]
    whole = [0.0, 0, 99, 99]
    common = {"candidates": [whole, near, GT], "candidate_ann_ids": [other, referred], "ann_id": referred}
    assert referring_metrics([record(near, **common)])["accuracy"] == 1
    assert referring_metrics([record(near, **common)], "same_annotation")["accuracy"] == 0
    assert referring_metrics([record(GT, **common)], "same_annotation")["accuracy"] == 1
    assert referring_metrics([record(whole, **common)], "same_annotation") == {"accuracy": 0, "ceiling": 1, "count": 1}


@pytest.mark.parametrize("fields", [{}, {"candidates": [HALF], "candidate_ann_ids": [1]}])
def test_a_prediction_that_does_not_fit_is_named(fields):
    with pytest.raises(UserError, match="text 8"):
        referring_metrics([record(GT, text_index=8, ann_id=1, **fields)], "same_annotation")


def test_the_file_has_three_keys_per_expression(tmp_path):
    path = tmp_path / "deep" / "boxes.json"
    ours = [record(GT, ref_id=1, sent_id=2), record(None, ref_id=1, sent_id=1)]
    write_submission(path, ours)
    expected = [{"ref_id": 1, "sent_id": 2, "box": GT}, {"ref_id": 1, "sent_id": 1, "box": None}]
    assert json.loads(path.read_text(encoding="utf-8")) == expected


def test_grefcoco_counts_expressions_without_a_target_and_with_several():
    other = [50.0, 50, 70, 70]
    none, several = {"gt_box": None, "gt_boxes": []}, {"gt_box": None, "gt_boxes": [GT, other]}
    records = [
        record(GT, family="attribute"),
        record(None, [HALF]),  # overlooked
        record(GT, **several),  # half of the area, but not all boxes
        record(None, [HALF], family="attribute", **none),
        record(GT, family="relation/near", **none),  # a false alarm
    ]
    assert referring_metrics(records) == pytest.approx(
        {
            "accuracy": 1 / 3,
            "ceiling": 2 / 3,
            "count": 3,
            "accuracy/attribute": 1,
            "ceiling/attribute": 1,
            "n_acc": 1 / 2,
            "n_acc/attribute": 1,
            "n_acc/relation": 0,
            "n_acc/relation/near": 0,
            "t_acc": 2 / 3,
            "giou": (1 + 0 + 0.5 + 1 + 0) / 5,
            "f1_precision": 2 / 5,
        }
    )


@pytest.mark.parametrize(
    ("box", "overlap", "official", "by_iou"),
    [
        (HALF, 0.5, 1, 1),  # inside the true box, so both are the IoU
        ([13.5, 13.5, 33.5, 33.5], 272.25 / 527.75 - 24.5 / 552.25, 0, 1),  # an IoU of 0.52
        ([40.0, 40, 50, 50], -(1600 - 500) / 1600, 0, 0),
        (GT, 1.0, 1, 1),
    ],
)
def test_grefcoco_matches_boxes_by_generalised_iou(box, overlap, official, by_iou):
    """As `generalized_box_iou` of its official evaluator, which is torchvision's."""
    assert generalized_iou(box, GT) == pytest.approx(overlap)
    corners = (torch.tensor([corner], dtype=torch.float64) for corner in (box, GT))
    assert generalized_iou(box, GT) == pytest.approx(generalized_box_iou(*corners).item())
    records = [record(box), record(None, gt_box=None, gt_boxes=[])]
    assert referring_metrics(records)["f1_precision"] == (official + 1) / 2
    assert referring_metrics(records, f1_overlap="iou")["f1_precision"] == (by_iou + 1) / 2


def test_the_area_of_overlapping_boxes_counts_once():
    assert area_iou([[0, 0, 10, 10], [0, 0, 10, 4]], [[5, 0, 15, 10], [5, 5, 12, 8]]) == pytest.approx(50 / 150)
    assert area_iou([[1, 1, 1, 1]], [[1, 1, 1, 1]]) == 0


def test_continuous_and_generalised_conventions_and_higher_thresholds():
    sliver = [29.5, 10, 49.5, 30]
    assert box_iou(sliver, GT, "continuous") == pytest.approx(10 / 790) and box_iou(sliver, GT, "mattnet") == 0
    shifted = [13.5, 13.5, 33.5, 33.5]
    overlap = box_iou(np.array([shifted, HALF]), np.array(GT), "generalized")
    assert overlap.tolist() == [generalized_iou(shifted, GT), 0.5]
    assert hits(shifted, GT, "continuous") and not hits(shifted, GT, "generalized")
    nine_tenths = [10.0, 10, 30, 28]
    assert hits(nine_tenths, GT, "continuous", threshold=0.9) and not hits(HALF, GT, "continuous", threshold=0.6)


def test_all_boxes_are_right_only_one_to_one():
    other = [50.0, 50, 70, 70]
    assert all_boxes_are_right([other, GT], [GT, other]) and all_boxes_are_right([], [])
    assert not all_boxes_are_right([GT, GT], [GT, other]), "both lie on the first"
    assert not all_boxes_are_right([GT], [GT, other]) and not all_boxes_are_right([GT], [])
    near = [10.0, 10, 30, 26]
    assert not all_boxes_are_right([near, HALF], [GT, other]) and all_boxes_are_right([near], [GT], "continuous")
