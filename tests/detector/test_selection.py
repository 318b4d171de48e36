from __future__ import annotations

import numpy as np
import pytest
import torch

from detector.boxes import max_conf, select_max_conf, select_max_nms, select_regions
from detector.config import SelectionRule


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        (SelectionRule(0.5, 1, 10), [1, 4, 2]),
        (SelectionRule(0.5, 4, 10), [1, 4, 2, 3]),
        (SelectionRule(0.5, 10, 20), [1, 4, 2, 3, 0]),
        (SelectionRule(0.5, 1, 2), [1, 4]),
        (SelectionRule(0.5, 3, 3), [1, 4, 2]),
    ],
)
def test_scores_above_the_threshold_are_filled_up_and_cut(rule: SelectionRule, rows: list[int]):
    assert select_regions(torch.tensor([0.1, 0.9, 0.5, 0.49, 0.7]), rule).tolist() == rows


def test_ties_keep_their_order_and_numpy_works():
    rows = select_regions(np.array([0.6, 0.8] * 20, dtype=np.float32), SelectionRule(0.7, 0, 100))
    assert rows.tolist() == list(range(1, 40, 2))


def test_no_boxes():
    assert select_regions(torch.zeros(0), SelectionRule()).tolist() == []
    assert select_regions(torch.zeros(5), SelectionRule(0.5, 0, 10)).tolist() == []
    assert select_max_conf(torch.zeros(0, 4), torch.zeros(0, 7), SelectionRule()).tolist() == []
    rows, _ = select_max_nms(torch.zeros(0, 4), torch.zeros(0), SelectionRule())
    assert rows.tolist() == []


def test_a_contradictory_rule_and_nan_are_rejected():
    with pytest.raises(ValueError, match="min_regions 5"):
        SelectionRule(0.5, 5, 4)
    with pytest.raises(ValueError, match="NaN"):
        select_regions(torch.tensor([0.3, float("nan")]), SelectionRule())


BOXES = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 9.0], [50.0, 50.0, 60.0, 60.0], [0.0, 1.0, 10.0, 10.0]])


def test_max_conf_suppresses_within_a_class_only():
    probs = torch.tensor([[0.6, 0.10], [0.5, 0.30], [0.15, 0.2], [0.4, 0.05]])
    # class 0: row 0 suppresses 1 and 3; class 1: row 1 suppresses 0 and 3
    assert torch.equal(max_conf(BOXES, probs), torch.tensor([0.6, 0.3, 0.2, 0.0]))
    assert select_max_conf(BOXES, probs, SelectionRule(0.2, 1, 4)).tolist() == [0, 1, 2]
    assert select_max_conf(BOXES, probs.flip(0), SelectionRule(0.35, 1, 4)).tolist() == [2, 3]
    assert select_max_conf(BOXES, probs, SelectionRule(0.9, 2, 4)).tolist() == [0, 1]
    assert select_max_conf(BOXES, probs, SelectionRule(0.0, 1, 3)).tolist() == [0, 1, 2]
    # within the bounds in the order of the proposals, otherwise by falling confidence
    assert select_max_conf(BOXES, probs.flip(0), SelectionRule(0.0, 1, 4)).tolist() == [0, 1, 2, 3]
    assert select_max_conf(BOXES, probs.flip(0), SelectionRule(0.0, 1, 2)).tolist() == [3, 2]


def test_max_conf_counts_inclusive_pixels():
    # continuous IoU 1/3; counted with inclusive pixels 12/32 = 0.375
    boxes = torch.tensor([[0.0, 0.0, 1.0, 10.0], [0.0, 5.0, 1.0, 15.0]])
    assert max_conf(boxes, torch.tensor([[0.9], [0.8]]), nms_threshold=0.35).tolist() == [pytest.approx(0.9), 0.0]
    assert max_conf(boxes, torch.tensor([[0.9], [0.8]]), nms_threshold=0.40)[1] > 0


def test_max_nms_loosens_until_enough():
    scores = torch.tensor([0.5, 0.9, 0.8, 0.7])
    # row 1 overlaps row 0 by 0.95 and row 3 by 0.55
    boxes = torch.tensor([[0.0, 0, 10, 9.5], [0, 0, 10, 10], [50, 50, 60, 60], [0, 0, 10, 5.5]])
    for rule, expected, threshold in (
        (SelectionRule(0.2, 2, 4), [1, 2], 0.3),
        (SelectionRule(0.99, 3, 4), [1, 2, 3], 0.6),
        (SelectionRule(0.2, 4, 4), [1, 2, 3], 0.9),  # no threshold keeps four
        (SelectionRule(0.2, 1, 1), [1], 0.3),
    ):
        rows, found = select_max_nms(boxes, scores, rule)
        assert (rows.tolist(), found) == (expected, threshold)
