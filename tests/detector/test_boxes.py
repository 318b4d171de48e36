"""Box arithmetic, regression losses, matching, and the choice of boxes by their scores."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from detector.boxes import (
    IOU_LOSSES,
    area,
    box_regression_loss,
    check_boxes,
    match,
    max_conf,
    nms_per_image,
    pairwise_iou,
    rescale_detections,
    select_max_conf,
    select_max_nms,
    select_regions,
    subsample,
)
from detector.config import SelectionRule

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
    assert pairwise_iou(point, torch.tensor([*BOXES, [3.0, 3.0, 3.0, 3.0]])).sum() == 0


def test_detections_at_another_size_lose_boxes_without_area():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 20.0], [5.0, 5.0, 5.0, 9.0]])
    scaled, kept = rescale_detections(boxes, (20, 10), (40, 40))
    assert scaled.tolist() == [[0, 0, 40, 40]]
    assert kept.tolist() == [0]


@pytest.mark.parametrize("bad", [[0.0, 0.0, float("nan"), 5.0], [0.0, 0.0, float("inf"), 5.0], [5.0, 0.0, 4.0, 5.0]])
def test_bad_box_is_named(bad):
    with pytest.raises(ValueError, match=r"cat\.jpg: box 1 \["):
        check_boxes([torch.tensor(BOXES), torch.tensor([BOXES[0], bad])], ["dog.jpg", "cat.jpg"])
    with pytest.raises(ValueError, match=r"cat\.jpg: box 0 \["):
        check_boxes([np.array([bad])], ["cat.jpg"])


KINDS = ("smooth_l1", *IOU_LOSSES)
WEIGHTS = (10.0, 10.0, 5.0, 5.0)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Deltas, boxes and targets that overlap."""
    generator = torch.Generator().manual_seed(0)
    corners = 50 * torch.rand(6, 2, generator=generator, dtype=torch.float64)
    boxes = torch.cat((corners, corners + 20 + 30 * torch.rand(6, 2, generator=generator)), dim=1)
    targets = boxes + 4 * torch.rand(6, 4, generator=generator)
    deltas = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return deltas.to(dtype), boxes.to(dtype), targets.to(dtype)


def loss_of(kind: str, deltas: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
    return box_regression_loss(deltas, boxes, targets, weights=WEIGHTS, kind=kind, smooth_l1_beta=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_regression_losses_keep_float64_and_are_zero_without_positives(kind: str):
    deltas, boxes, targets = inputs(torch.float64)
    found = loss_of(kind, deltas, boxes, targets)
    assert found.dtype == torch.float64
    # Numerical derivatives are this exact only without a step in float32. (CIoU keeps one factor constant on purpose.)
    if kind != "ciou":
        assert torch.autograd.gradcheck(lambda x: loss_of(kind, x, boxes, targets), (deltas.requires_grad_(),))
    single = loss_of(kind, *inputs(torch.float32))
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(found.item(), rel=1e-5)
    assert single.item() != found.item()
    empty = torch.zeros(0, 4, requires_grad=True)
    nothing = loss_of(kind, empty, torch.zeros(0, 4), torch.zeros(0, 4))
    nothing.backward()
    assert nothing.item() == 0


OVERLAPS = torch.tensor([[0.1, 0.30, 0.69, 0.70, 0.0], [0.2, 0.25, 0.10, 0.10, 0.0]])  # 2 objects, 5 candidates


@pytest.mark.parametrize(
    ("iou", "low_quality", "labels", "matched"),
    [
        pytest.param(OVERLAPS, False, [0, -1, -1, 1, 0], [1, 0, 0, 0, 0], id="intervals are closed below"),
        pytest.param(OVERLAPS, True, [0, 1, -1, 1, 0], [1, 0, 0, 0, 0], id="positive for one object, matched to other"),
        pytest.param(torch.tensor([[0.4, 0.4, 0.1]]), True, [1, 1, 0], [0, 0, 0], id="ties"),
        pytest.param(torch.zeros(0, 3), True, [0, 0, 0], [0, 0, 0], id="no objects"),
        pytest.param(torch.zeros(2, 0), False, [], [], id="no candidates"),
    ],
)
def test_matches_and_their_labels(iou: Tensor, low_quality: bool, labels: list[int], matched: list[int]):
    found = match(iou, (0.3, 0.7), (0, -1, 1), allow_low_quality=low_quality)
    assert [part.tolist() for part in found] == [matched, labels]


@pytest.mark.parametrize(
    ("positive", "negative", "drawn"), [(40, 60, (8, 26)), (3, 97, (3, 31)), (1, 1, (1, 1))], ids=str
)
def test_samples_limit_positives_and_fill_up_with_negatives(positive: int, negative: int, drawn: tuple[int, int]):
    labels = torch.full((100,), -1, dtype=torch.int8)
    labels[:positive], labels[100 - negative :] = 1, 0
    labels = labels[torch.randperm(100)]
    for rows in subsample([labels, labels], 34, 0.25):  # 8.5 is truncated
        assert tuple(map(len, rows)) == drawn
        assert (labels[rows[0]] == 1).all() and (labels[rows[1]] == 0).all()
        assert len(torch.cat(rows).unique()) == sum(drawn)


@pytest.mark.parametrize("has_unusable", [False, True])
def test_nms_of_all_images_at_once_keeps_what_one_after_the_other_keeps(has_unusable: bool):
    generator = torch.Generator().manual_seed(3)
    corners = torch.rand(400, 2, generator=generator) * 40
    boxes = torch.cat((corners, corners + 5 + torch.rand(400, 2, generator=generator) * 15), dim=1)
    scores = torch.rand(400, generator=generator)
    image, group = (torch.randint(count, (400,), generator=generator) for count in (3, 4))
    is_usable = torch.rand(400, generator=generator) < 0.6 if has_unusable else None
    if has_unusable:
        boxes[~is_usable] = torch.nan
    sizes = [(60, 60), (60, 50), (50, 60)]
    options = {"sizes": sizes, "num_groups": 4, "threshold": 0.4, "limit": 400, "is_usable": is_usable}
    kept, joint = (nms_per_image(boxes, scores, image, group, **options, jointly=one) for one in (False, True))
    assert [part.tolist() for part in joint] == [part.tolist() for part in kept]
    assert 100 < sum(map(len, kept)) < 300


SCORES = torch.tensor([0.1, 0.9, 0.5, 0.49, 0.7])


@pytest.mark.parametrize(
    ("scores", "rule", "rows"),
    [
        (SCORES, SelectionRule(0.5, 1, 10), [1, 4, 2]),
        (SCORES, SelectionRule(0.5, 4, 10), [1, 4, 2, 3]),
        (SCORES, SelectionRule(0.5, 10, 20), [1, 4, 2, 3, 0]),
        (SCORES, SelectionRule(0.5, 1, 2), [1, 4]),
        (SCORES, SelectionRule(0.5, 3, 3), [1, 4, 2]),
        (np.array([0.6, 0.8] * 20, dtype=np.float32), SelectionRule(0.7, 0, 100), list(range(1, 40, 2))),
        (torch.zeros(5), SelectionRule(0.5, 0, 10), []),
        (torch.zeros(0), SelectionRule(), []),
        (SCORES, SelectionRule(min_score=0.7), [1, 4]),
        (SCORES, SelectionRule(min_score=0.95), []),
    ],
)
def test_scores_above_the_threshold_are_filled_up_and_cut(scores: Tensor, rule: SelectionRule, rows: list[int]):
    assert select_regions(scores, rule).tolist() == rows


@pytest.mark.parametrize(
    ("stated", "of_vl_bert", "of_display"),
    [
        ({}, (0.5, 10, 100), (0.2, 10, 36)),
        ({"min_score": 0.7}, (0.7, 0, None), (0.7, 0, None)),
        ({"max_regions": 3}, (0.5, 3, 3), (0.2, 3, 3)),
        ({"min_regions": 200}, (0.5, 200, 200), (0.2, 200, 200)),
        ({"min_regions": 0}, (0.5, 0, 100), (0.2, 0, 36)),
        ({"min_score": 0.7, "max_regions": 3}, (0.7, 0, 3), (0.7, 0, 3)),
        ({"min_score": 0.7, "min_regions": 3}, (0.7, 3, None), (0.7, 3, None)),
        ({"min_regions": 2, "max_regions": 3}, (0.5, 2, 3), (0.2, 2, 3)),
    ],
)
def test_what_is_stated_of_a_rule_wins_over_its_defaults(stated, of_vl_bert, of_display):
    assert msgspec.structs.astuple(SelectionRule(**stated)) == of_vl_bert
    assert msgspec.structs.astuple(SelectionRule(0.2, 10, 36).with_stated(**stated)) == of_display
    written = msgspec.to_builtins(SelectionRule(**stated))
    assert msgspec.convert(written, SelectionRule) == SelectionRule(**stated)


def test_a_contradictory_rule_and_nan_are_rejected():
    with pytest.raises(ValueError, match="min_regions 5"):
        SelectionRule(0.5, 5, 4)
    with pytest.raises(ValueError, match="from 0 to 1"):
        SelectionRule().with_stated(min_score=float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        select_regions(torch.tensor([0.3, float("nan")]), SelectionRule())


FOUND = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 9.0], [50.0, 50.0, 60.0, 60.0], [0.0, 1.0, 10.0, 10.0]])


def test_max_conf_suppresses_within_a_class_only():
    probs = torch.tensor([[0.6, 0.10], [0.5, 0.30], [0.15, 0.2], [0.4, 0.05]])
    # class 0: row 0 suppresses 1 and 3; class 1: row 1 suppresses 0 and 3
    assert torch.equal(max_conf(FOUND, probs), torch.tensor([0.6, 0.3, 0.2, 0.0]))
    assert select_max_conf(FOUND, probs, SelectionRule(0.2, 1, 4)).tolist() == [0, 1, 2]
    assert select_max_conf(FOUND, probs.flip(0), SelectionRule(0.35, 1, 4)).tolist() == [2, 3]
    assert select_max_conf(FOUND, probs, SelectionRule(0.9, 2, 4)).tolist() == [0, 1]
    assert select_max_conf(FOUND, probs, SelectionRule(0.0, 1, 3)).tolist() == [0, 1, 2]
    # within the bounds in the order of the proposals, otherwise by falling confidence
    assert select_max_conf(FOUND, probs.flip(0), SelectionRule(0.0, 1, 4)).tolist() == [0, 1, 2, 3]
    assert select_max_conf(FOUND, probs.flip(0), SelectionRule(0.0, 1, 2)).tolist() == [3, 2]
    assert select_max_conf(torch.zeros(0, 4), torch.zeros(0, 7), SelectionRule()).tolist() == []


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
    assert select_max_nms(torch.zeros(0, 4), torch.zeros(0), SelectionRule())[0].tolist() == []
