"""Which of a detector's boxes are kept.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torchvision.ops import clip_boxes_to_image, nms

from detector.config import SelectionRule
from detector.errors import UserError

MAX_NMS_THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def select_regions(
    scores: Float[Tensor, " R"] | Float[np.ndarray, " R"], rule: SelectionRule
) -> Int64[Tensor, " kept"]:
    """VL-BERT's rule: the boxes that score high enough, filled up or cut by score.

    Returns:
        the kept rows by falling score, equal scores in their given order.
    """
    scores = _checked(torch.as_tensor(scores))
    return scores.argsort(descending=True, stable=True)[: _kept(scores, rule)]


def select_max_conf(
    boxes: Float[Tensor, "R 4"], class_probs: Float[Tensor, "R K"], rule: SelectionRule, nms_threshold: float = 0.3
) -> Int64[Tensor, " kept"]:
    """Bottom-up attention's rule (its Caffe code): proposals by their best probability that survives class-wise NMS.

    Args:
        boxes: proposals (not refined boxes), xyxy in pixels of the original image.
        class_probs: softmax probabilities without the background's column.
        rule: the original uses `SelectionRule(0.2, 10, 100)` or 36 and 36.
        nms_threshold: boxes of one class that overlap more are suppressed, with areas counted as (x2 - x1 + 1).

    Returns:
        the kept rows: in the order of the proposals when their number lies within the rule's bounds, otherwise
        (filled up or cut) by falling confidence.
    """
    confidence = max_conf(boxes, class_probs, nms_threshold)
    passing = int((confidence >= rule.min_score).sum())
    if rule.min_regions <= passing <= rule.max_regions:
        return (confidence >= rule.min_score).nonzero()[:, 0]
    return confidence.argsort(descending=True, stable=True)[: _kept(confidence, rule)]


def max_conf(
    boxes: Float[Tensor, "R 4"], class_probs: Float[Tensor, "R K"], nms_threshold: float = 0.3
) -> Float[Tensor, " R"]:
    """Each proposal's best class probability after class-wise NMS; 0 where it was suppressed in every class."""
    _checked(class_probs)
    # NMS with inclusive corners is NMS of boxes whose far corners lie one pixel further.
    inclusive = boxes.float() + boxes.new_tensor([0, 0, 1, 1])
    confidence = class_probs.new_zeros(len(boxes))
    for probs in class_probs.unbind(1):
        kept = nms(inclusive, probs.float(), nms_threshold)
        confidence[kept] = confidence[kept].maximum(probs[kept])
    return confidence


def select_max_nms(
    boxes: Float[Tensor, "R 4"], scores: Float[Tensor, " R"], rule: SelectionRule
) -> tuple[Int64[Tensor, " kept"], float]:
    """The rule behind LXMERT's 36 boxes (airsplay/py-bottom-up-attention): class-agnostic NMS, loosened as needed.

    Args:
        boxes: one refined box per proposal, see `best_class_boxes`.
        rule: `min_score` is not applied, as in the original.

    Returns:
        the kept rows by falling score, and the IoU threshold used: the first of 0.3, 0.4, ... 0.9 that keeps
        `rule.min_regions` boxes (0.9 where none does).
    """
    _checked(scores)
    for threshold in MAX_NMS_THRESHOLDS:
        kept = nms(boxes.float(), scores.float(), threshold)
        if len(kept) >= rule.min_regions:
            break
    return kept[: rule.max_regions], threshold


def best_class_boxes(
    class_probs: Float[Tensor, "R K"],
    class_boxes: Float[Tensor, "R K 4"] | Float[Tensor, "R 4*K"],
    size: tuple[int, int],
) -> tuple[Float[Tensor, "R 4"], Float[Tensor, " R"], Int64[Tensor, " R"]]:
    """The box refined for each proposal's most probable foreground class, clipped to the image; its score and class.

    `class_probs` has no column for the background; `size` is (height, width).
    """
    scores, classes = class_probs.max(1)
    boxes = class_boxes.reshape(len(class_probs), -1, 4)[torch.arange(len(classes), device=classes.device), classes]
    return clip_boxes_to_image(boxes, (int(size[0]), int(size[1]))), scores, classes


def _kept(scores: Tensor, rule: SelectionRule) -> int:
    """How many rows stay when they are taken by falling score."""
    passing = int((scores >= rule.min_score).sum())
    return min(max(passing, rule.min_regions), rule.max_regions)


def _checked(scores: Tensor) -> Tensor:
    if scores.isnan().any():
        raise UserError("Selection: a score is not a number (NaN); check the detector's weights and its input.")
    return scores
