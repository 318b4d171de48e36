"""Which anchor or proposal is compared with which annotated object, and which of them are trained on.

Shape legend: see `detector/structures.py`; candidates are the anchors or the proposals of one image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor


def match(
    iou: Float[Tensor, "G candidates"],
    thresholds: Sequence[float],
    labels: Sequence[int],
    allow_low_quality: bool = False,
) -> tuple[Int64[Tensor, " candidates"], Int8[Tensor, " candidates"]]:
    """Assign to each candidate the object it overlaps most, and a label by that overlap (Faster R-CNN, section 3.1.2).

    Args:
        thresholds: n rising bounds that cut the IoU range into n + 1 intervals, each closed below.
        labels: n + 1 labels, one per interval: 1 positive, 0 negative, -1 ignored.
        allow_low_quality: also make the best candidates of every object positive, however small their overlap
            (ties included). The object that they are assigned to does not change.

    Returns:
        row of the matched object (0 if there is no object), and the label.
    """
    num_objects, num_candidates = iou.shape
    if num_objects == 0 or num_candidates == 0:
        zeros = torch.zeros(num_candidates, dtype=torch.int64, device=iou.device)
        return zeros, torch.full_like(zeros, labels[0], dtype=torch.int8)
    best, matched = iou.max(dim=0)
    label = torch.full_like(matched, labels[0], dtype=torch.int8)
    for threshold, value in zip(thresholds, labels[1:], strict=True):  # no tensor of constants: a GPU would wait for it
        label.masked_fill_(best >= threshold, value)
    if allow_low_quality:
        label[(iou == iou.max(dim=1, keepdim=True).values).any(dim=0)] = 1
    return matched, label


def subsample(
    is_positive: Bool[Tensor, " candidates"],
    is_negative: Bool[Tensor, " candidates"],
    number: int,
    positive_fraction: float,
) -> tuple[Int64[Tensor, " positives"], Int64[Tensor, " negatives"]]:
    """Random rows to train on: at most `number * positive_fraction` positives, filled up with negatives.

    Returns:
        positive rows and negative rows, in random order. Draws from torch's global generator.
    """
    positive, negative = is_positive.nonzero()[:, 0], is_negative.nonzero()[:, 0]
    num_positive = min(len(positive), int(number * positive_fraction))
    num_negative = min(len(negative), number - num_positive)
    return _choose(positive, num_positive), _choose(negative, num_negative)


def _choose(rows: Tensor, number: int) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)[:number]]
