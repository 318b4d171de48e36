from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.metrics.refcoco import box_iou, hits, referring_metrics

GT = [10.0, 10, 30, 30]  # 20 x 20
HALF = [10.0, 10, 30, 20]  # IoU exactly 0.5
SIZE = (100, 100)


def record(box, candidates=None, gt_box=GT, **extra) -> dict:
    return {"box": box, "gt_box": gt_box, "candidate_boxes": candidates or [box], "image_size": SIZE, **extra}


def test_iou_of_the_conventions_by_hand():
    shifted = [20.0, 10, 40, 30]
    assert box_iou(shifted, GT, "mattnet") == pytest.approx(200 / 600)
    assert box_iou(shifted, GT, "strict") == pytest.approx(200 / 600)
    assert box_iou(shifted, GT, "vlbert", SIZE) == pytest.approx(11 * 21 / (2 * 21 * 21 - 11 * 21))
    assert box_iou(HALF, GT, "mattnet") == 0.5
    assert box_iou(HALF, GT, "vlbert", SIZE) == pytest.approx(21 * 11 / (21 * 21))


def test_mattnet_counts_no_overlap_of_a_single_pixel():
    thin = [29.0, 10, 49, 30]
    assert box_iou(thin, GT, "mattnet") == 0
    assert box_iou([28.5, 10, 48.5, 30], GT, "mattnet") == pytest.approx(30 / 770)
    assert box_iou(thin, GT, "vlbert", SIZE) == pytest.approx(2 * 21 / (2 * 21 * 21 - 42))
    assert box_iou([30.0, 10, 50, 30], GT, "vlbert", SIZE) == pytest.approx(21 / (2 * 21 * 21 - 21))


def test_vlbert_clamps_the_prediction_only():
    gt_box = [80.0, 0, 100, 40]
    prediction = [80.0, 0, 120, 40]
    expected = (20 * 41) / (21 * 41)  # the clamped prediction ends at x = 99, the truth at 100
    assert box_iou(prediction, gt_box, "vlbert", SIZE) == pytest.approx(expected)
    assert box_iou(prediction, gt_box, "vlbert", (100, 200)) == pytest.approx(21 * 41 / (41 * 41))
    with pytest.raises(ValueError, match="needs the image size"):
        box_iou(prediction, gt_box, "vlbert")


@pytest.mark.parametrize(("convention", "right"), [("mattnet", True), ("strict", False), ("vlbert", True)])
def test_exactly_one_half(convention, right):
    assert bool(hits(HALF, GT, convention, SIZE)) is right
    moved = np.array(HALF) + 0.1  # not representable: the IoU is a rounding error off
    assert bool(hits(moved, np.array(GT) + 0.1, convention, SIZE)) is right


def test_just_under_one_half_counts_with_the_extra_pixel_only():
    under = [10.0, 10, 30, 19.9]
    assert not hits(under, GT, "mattnet")
    assert hits(under, GT, "vlbert", SIZE)


def test_many_boxes_at_once_and_none():
    boxes = np.array([GT, HALF, [50, 50, 60, 60]])
    assert hits(boxes, np.array(GT), "mattnet").tolist() == [True, True, False]
    sizes = np.array([SIZE, SIZE, SIZE])
    assert hits(boxes, np.tile(GT, (3, 1)), "vlbert", sizes).tolist() == [True, True, False]
    assert hits(np.zeros((0, 4)), np.array(GT), "mattnet").shape == (0,)
    assert hits(np.zeros((0, 4)), np.array(GT), "vlbert", SIZE).shape == (0,)


def test_boxes_without_area_never_divide_by_zero():
    point = [5.0, 5, 5, 5]
    assert box_iou(point, point, "mattnet") == 0
    assert not hits(point, point, "strict")


def test_bad_boxes_are_refused():
    with pytest.raises(ValueError, match="a predicted box has a coordinate that is not finite"):
        hits([0, 0, np.nan, 1], GT, "mattnet")
    with pytest.raises(ValueError, match=r"true boxes have the shape \(3,\)"):
        hits(GT, [0, 0, 1], "mattnet")
    with pytest.raises(ValueError, match="unknown IoU convention 'giou'; choose one of mattnet, vlbert, strict"):
        hits(GT, GT, "giou")


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
    nothing = {
        "box": None,
        "gt_box": GT,
        "candidate_boxes": [],
        "image_size": SIZE,
        "ann_id": 1,
        "candidate_ann_ids": [],
    }
    for convention in ("mattnet", "vlbert", "strict", "same_annotation"):
        assert referring_metrics([nothing], convention) == {"accuracy": 0.0, "ceiling": 0.0, "count": 1.0}


def test_same_annotation_rejects_a_near_duplicate():
    near = [10.0, 10, 30, 29]
    whole = [0.0, 0, 99, 99]
    common = {"candidates": [whole, near, GT], "candidate_ann_ids": [5, 6], "ann_id": 6}
    assert referring_metrics([record(near, **common)])["accuracy"] == 1
    assert referring_metrics([record(near, **common)], "same_annotation")["accuracy"] == 0
    assert referring_metrics([record(GT, **common)], "same_annotation")["accuracy"] == 1
    assert referring_metrics([record(whole, **common)], "same_annotation") == {"accuracy": 0, "ceiling": 1, "count": 1}


def test_a_record_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="sentence 8 has no 'candidate_ann_ids', which the convention same_annotation"):
        referring_metrics([record(GT, sent_id=8)], "same_annotation")
    with pytest.raises(ValueError, match="sentence 8: the predicted box is none of the candidate boxes"):
        referring_metrics([record(GT, [HALF], sent_id=8, ann_id=1, candidate_ann_ids=[1])], "same_annotation")
    with pytest.raises(ValueError, match="sentence 8: a predicted box has a coordinate that is not finite"):
        referring_metrics([record([np.inf, 0, 1, 1], [GT], sent_id=8)])
    with pytest.raises(ValueError, match="unknown convention 'iou'"):
        referring_metrics([], "iou")
