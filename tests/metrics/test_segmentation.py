"""Metrics of masks, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.masks import RunLengths
from e2e_vl.metrics.refcoco import ReferringPrediction
from e2e_vl.metrics.segmentation import segmentation_metrics


def row(first: int, last: int) -> RunLengths:
    """A mask of one row of 100 pixels, set from `first` to `last`."""
    mask = np.zeros((1, 100), dtype=bool)
    mask[:, first:last] = True
    return RunLengths.of_mask(mask)


def prediction(predicted: RunLengths | None, true: RunLengths | None, **fields) -> ReferringPrediction:
    values = {"box": None, "score": 0.0, "candidate_boxes": (), "gt_box": (0.0, 0, 1, 1)} | fields
    return ReferringPrediction(segmentation=predicted, gt_segmentation=true, **values)


def test_overall_and_mean_iou_and_precision():
    predictions = [
        prediction(row(0, 10), row(0, 10)),  # IoU 1
        prediction(row(0, 80), row(20, 100)),  # 60 / 100
        prediction(row(0, 0), row(0, 40)),  # 0
    ]
    metrics = segmentation_metrics(predictions)
    assert metrics["oiou"] == pytest.approx((10 + 60) / (10 + 100 + 40))
    assert metrics["miou"] == pytest.approx(1.6 / 3)
    shares = [metrics[f"mask_precision_{ending}"] for ending in (50, 60, 70, 80, 90)]
    assert shares == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert "mask_giou" not in metrics


def test_expressions_about_nothing_count_as_in_gres():
    nothing = {"gt_box": None, "gt_boxes": ()}
    predictions = [
        prediction(row(0, 50), row(0, 100)),  # IoU 0.5
        prediction(row(0, 0), row(0, 0), **nothing),  # right
        prediction(row(0, 30), row(0, 0), **nothing),  # wrong
    ]
    metrics = segmentation_metrics(predictions)
    assert metrics["mask_giou"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["mask_ciou"] == pytest.approx(50 / (100 + 30))
    assert metrics["mask_n_acc"] == 0.5
    assert metrics["oiou"] == metrics["miou"] == 0.5


def test_no_masks_no_metrics():
    assert segmentation_metrics([prediction(None, row(0, 1)), prediction(row(0, 1), None)]) == {}
