"""Select the boxes of a detector that are used as regions.

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
    """Select boxes like VL-BERT: those with a high enough score, within the limits on their number.

    Returns:
        indices in order of descending score; equal scores keep their order.
    """
    scores = _check_scores(torch.as_tensor(scores))
    return scores.argsort(descending=True, stable=True)[: _num_selected(scores, rule)]


def select_max_conf(
    boxes: Float[Tensor, "R 4"], class_probs: Float[Tensor, "R K"], rule: SelectionRule, nms_threshold: float = 0.3
) -> Int64[Tensor, " kept"]:
    """Select proposals like bottom-up attention's Caffe code: by their highest class probability after class-wise NMS.

    Args:
        boxes: proposals (not refined boxes), xyxy in pixels of the original image.
        class_probs: softmax probabilities without the background column.
        rule: the original uses `SelectionRule(0.2, 10, 100)` or exactly 36 boxes.
        nms_threshold: IoU above which a box of the same class is suppressed. Box widths are x2 - x1 + 1.

    Returns:
        indices: in the order of the proposals if the number of scores above the threshold is within the limits,
        otherwise in order of descending confidence.
    """
    confidence = max_conf(boxes, class_probs, nms_threshold)
    passing = int((confidence >= rule.min_score).sum())
    if rule.min_regions <= passing <= rule.max_regions:
        return (confidence >= rule.min_score).nonzero()[:, 0]
    return confidence.argsort(descending=True, stable=True)[: _num_selected(confidence, rule)]


def max_conf(
    boxes: Float[Tensor, "R 4"], class_probs: Float[Tensor, "R K"], nms_threshold: float = 0.3
) -> Float[Tensor, " R"]:
    """Compute each proposal's highest class probability after class-wise NMS, or 0 if every class was suppressed."""
    _check_scores(class_probs)
    # torchvision's NMS does not include the last pixel, so extend the boxes by one pixel.
    inclusive = boxes.float() + boxes.new_tensor([0, 0, 1, 1])
    confidence = class_probs.new_zeros(len(boxes))
    for probs in class_probs.unbind(1):
        kept = nms(inclusive, probs.float(), nms_threshold)
        confidence[kept] = confidence[kept].maximum(probs[kept])
    return confidence


def select_max_nms(
    boxes: Float[Tensor, "R 4"], scores: Float[Tensor, " R"], rule: SelectionRule
) -> tuple[Int64[Tensor, " kept"], float]:
    """Select boxes like LXMERT (airsplay/py-bottom-up-attention): class-agnostic NMS with increasing thresholds.

    Args:
        boxes: one refined box per proposal, see `best_class_boxes`.
        rule: as in the original, `min_score` is not used.

    Returns:
        indices in order of descending score, and the IoU threshold: the first of 0.3, 0.4, ..., 0.9 with which NMS
        keeps at least `rule.min_regions` boxes, or 0.9.
    """
    _check_scores(scores)
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
    """Return each proposal's box, score and class for its most probable class, with boxes clipped to the image.

    Args:
        class_probs: softmax probabilities without the background column.
        class_boxes: refined boxes for each class.
        size: (height, width) of the image.
    """
    scores, classes = class_probs.max(1)
    boxes = class_boxes.reshape(len(class_probs), -1, 4)[torch.arange(len(classes), device=classes.device), classes]
    return clip_boxes_to_image(boxes, (int(size[0]), int(size[1]))), scores, classes


def _num_selected(scores: Tensor, rule: SelectionRule) -> int:
    passing = int((scores >= rule.min_score).sum())
    return min(max(passing, rule.min_regions), rule.max_regions)


def _check_scores(scores: Tensor) -> Tensor:
    if scores.isnan().any():
        raise UserError("A score is NaN; check the detector's weights and its input.")
    return scores
