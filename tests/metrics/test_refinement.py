"""Accuracies and mean IoU before and after refinement, by hand."""

from __future__ import annotations

import pytest

from e2e_vl.metrics.refcoco import ReferringPrediction
from e2e_vl.metrics.refinement import overlaps_of, referring_overlaps, refinement_metrics
from e2e_vl.predictions import Overlaps

TRUE_BOX = (0, 0, 10, 10)
HALF, MOST = (0, 0, 10, 5), (0, 0, 10, 8)


def test_shares_at_each_threshold_of_refined_boxes_proposals_and_the_best_proposals():
    overlaps = [Overlaps(0.95, 0.6, 0.8), Overlaps(0.75, 0.5, 0.5), Overlaps(0.4, 0.0, 0.9), Overlaps(0.0, 0.0, 0.0)]
    metrics = refinement_metrics(overlaps)
    refined = {"accuracy": 0.5, "accuracy_75": 0.5, "accuracy_90": 0.25, "mean_iou": 0.525}
    proposal = {"proposal_accuracy": 0.5, "proposal_accuracy_75": 0, "proposal_accuracy_90": 0}
    ceiling = {"ceiling": 0.75, "ceiling_75": 0.5, "ceiling_90": 0.25, "ceiling_mean_iou": 0.55}
    assert metrics == pytest.approx(refined | proposal | {"proposal_mean_iou": 0.275} | ceiling)
    assert refinement_metrics(overlaps[1:2], "strict")["accuracy_75"] == 0  # more than the threshold
    assert refinement_metrics([]) == {}


def test_one_of_several_true_boxes_is_enough_and_no_box_is_an_overlap_of_zero():
    assert overlaps_of(MOST, HALF, [HALF, MOST], [(90, 0, 99, 9), TRUE_BOX]) == Overlaps(0.8, 0.5, 0.8)
    assert overlaps_of(None, None, [], [TRUE_BOX]) == Overlaps(0, 0, 0)


def test_expressions_about_one_object_count_if_any_box_was_refined():
    def prediction(**more) -> ReferringPrediction:
        base = {"box": MOST, "proposal": HALF, "score": 0.5, "candidate_boxes": [HALF], "refined_boxes": [MOST]}
        return ReferringPrediction.from_record(base | more)

    missed = {"box": None, "proposal": None, "candidate_boxes": [], "refined_boxes": []}
    predictions = [
        prediction(gt_box=TRUE_BOX),
        prediction(gt_box=TRUE_BOX, **missed),
        prediction(gt_boxes=[]),
        prediction(gt_boxes=[TRUE_BOX, TRUE_BOX]),
        prediction(),  # unknown
    ]
    assert referring_overlaps(predictions, "continuous") == [Overlaps(0.8, 0.5, 0.5), Overlaps(0, 0, 0)]
    assert referring_overlaps(predictions[1:2], "continuous") == []
