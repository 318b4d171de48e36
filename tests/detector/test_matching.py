from __future__ import annotations

import torch

from detector.boxes import match, subsample
from detector.rpn import AnchorGenerator, make_cell_anchors

IOU = torch.tensor([[0.1, 0.30, 0.69, 0.70, 0.0], [0.2, 0.25, 0.10, 0.10, 0.0]])  # 2 objects, 5 candidates


def test_intervals_are_closed_below():
    matched, labels = match(IOU, (0.3, 0.7), (0, -1, 1))
    assert labels.tolist() == [0, -1, -1, 1, 0]
    assert matched.tolist() == [1, 0, 0, 0, 0]


def test_best_candidate_of_each_object_is_positive_and_keeps_its_match():
    matched, labels = match(IOU, (0.3, 0.7), (0, -1, 1), allow_low_quality=True)
    assert labels.tolist() == [0, 1, -1, 1, 0]
    assert matched[1] == 0  # positive because of object 1, but it overlaps object 0 more


def test_ties_are_all_positive():
    _, labels = match(torch.tensor([[0.4, 0.4, 0.1]]), (0.3, 0.7), (0, -1, 1), allow_low_quality=True)
    assert labels.tolist() == [1, 1, 0]


def test_without_objects_everything_has_the_lowest_label():
    matched, labels = match(torch.zeros(0, 3), (0.3, 0.7), (0, -1, 1), allow_low_quality=True)
    assert labels.tolist() == [0, 0, 0]
    assert matched.tolist() == [0, 0, 0]
    assert [len(part) for part in match(torch.zeros(2, 0), (0.5,), (0, 1))] == [0, 0]


def test_sample_limits_positives_and_fills_up_with_negatives():
    is_positive = torch.arange(100) < 40
    positive, negative = subsample(is_positive, ~is_positive, 32, 0.25)
    assert (len(positive), len(negative)) == (8, 24)
    assert is_positive[positive].all()
    assert not is_positive[negative].any()
    assert len(torch.cat((positive, negative)).unique()) == 32

    few = torch.arange(100) < 3
    positive, negative = subsample(few, ~few, 32, 0.25)
    assert (len(positive), len(negative)) == (3, 29)


def test_sample_takes_all_when_there_are_fewer_candidates():
    is_positive = torch.tensor([True, False, False])
    positive, negative = subsample(is_positive, torch.tensor([False, True, False]), 512, 0.25)
    assert positive.tolist() == [0]
    assert negative.tolist() == [1]


def test_anchors_are_ordered_size_first_and_not_rounded():
    cells = make_cell_anchors((10, 20), (0.5, 2.0))
    sides = cells[:, 2:] - cells[:, :2]
    torch.testing.assert_close(sides.prod(dim=1), torch.tensor([100.0, 100.0, 400.0, 400.0]))
    torch.testing.assert_close(sides[:, 1] / sides[:, 0], torch.tensor([0.5, 2.0, 0.5, 2.0]))


def test_grid_of_anchors_has_fixed_stride_and_offset():
    anchors = AnchorGenerator(make_cell_anchors((10,), (1.0,)), stride=16, offset=0.5)(2, 3)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres.tolist() == [[8, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]]
