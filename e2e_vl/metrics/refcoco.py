"""Accuracy of referring expressions under the IoU conventions of published numbers, and prediction files.

| convention | the box is right if | used by |
| --- | --- | --- |
| `mattnet` | IoU >= 0.5; overlaps of at most one pixel in width or height count as none | MAttNet, detected boxes |
| `vlbert` | IoU >= 0.5 with one pixel added to every extent, the prediction clamped to [0, size - 1] before | VL-BERT |
| `strict` | MAttNet's IoU > 0.5 | UNITER |
| `same_annotation` | the chosen annotation is the referred one, so a near-duplicate is wrong | MAttNet, gt boxes |

All use continuous corners with x2 = x + w (equivalent to MAttNet's x2 = x + w - 1 with inclusive pixels) and count
expressions, not refs. The conventions follow the official scripts and are tested with golden data.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from e2e_vl.io import Id, Score
from e2e_vl.predictions import Box, Prediction, write_list

THRESHOLD = 0.5
# tolerance for an IoU of exactly 0.5, which may have a rounding error
_ROUNDING = 1e-9


class ReferringPrediction(Prediction, kw_only=True):
    """The region that an expression refers to."""

    box: Box | None  # None: there were no candidate regions
    score: Score
    candidate_boxes: tuple[Box, ...]  # all candidate regions
    candidate_scores: tuple[Score, ...] = ()
    # annotation ids of the *last* candidate boxes (a box of the whole image may come before them)
    candidate_ann_ids: tuple[int, ...] | None = None
    detected_class: str | None = None  # the detector's class for the box; None: unknown
    gt_box: Box | None = None  # ground truth; None: unknown
    category: str | None = None  # category of that box
    ann_id: Id | None = None
    ref_id: Id | None = None
    sent_id: Id | None = None
    image_id: Id | None = None


def box_iou(boxes: np.ndarray, gt_boxes: np.ndarray, convention: str, image_size: Any = None) -> np.ndarray:
    """IoU of predicted and true boxes, pair by pair.

    Args:
        boxes: float [..., 4], predicted, xyxy (x2 = x + w) in pixels of the original image.
        gt_boxes: float [..., 4], true; the leading axes broadcast against the axes of `boxes`.
        convention: one in the table above, except `same_annotation`.
        image_size: [..., 2], (height, width) of the original image(s); needed by `vlbert` only.

    Returns:
        float64 [...], in 0..1.
    """
    boxes, gt_boxes = (np.asarray(array, dtype=np.float64) for array in (boxes, gt_boxes))
    extra = 0.0
    if convention == "vlbert":
        height, width = np.moveaxis(np.asarray(image_size, dtype=np.float64), -1, 0)
        last = np.stack([width, height, width, height], axis=-1) - 1
        boxes = np.clip(boxes, 0, last)
        extra = 1.0
    area, gt_area = (np.prod(array[..., 2:] - array[..., :2] + extra, axis=-1) for array in (boxes, gt_boxes))
    overlap = np.minimum(boxes[..., 2:], gt_boxes[..., 2:]) - np.maximum(boxes[..., :2], gt_boxes[..., :2]) + extra
    smallest = 0.0 if convention == "vlbert" else 1.0
    intersection = np.where((overlap > smallest).all(axis=-1), np.prod(overlap, axis=-1), 0.0)
    union = area + gt_area - intersection
    return np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)


def hits(boxes: np.ndarray, gt_boxes: np.ndarray, convention: str, image_size: Any = None) -> np.ndarray:
    """Which predicted boxes are right.

    Arguments as in `box_iou`. Returns bool [...].
    """
    iou = box_iou(boxes, gt_boxes, convention, image_size)
    return iou > THRESHOLD + _ROUNDING if convention == "strict" else iou >= THRESHOLD - _ROUNDING


def referring_metrics(predictions: Iterable[ReferringPrediction], convention: str = "mattnet") -> dict[str, float]:
    """Accuracy and ceiling of predictions, over all and by family of expression.

    Args:
        convention: one in the table above. `vlbert` needs `image_size`, `same_annotation` needs `ann_id` and
            `candidate_ann_ids`, the others `gt_box`.

    Returns:
        `accuracy` and `ceiling` (the share of expressions with any right candidate: the best possible accuracy), also
        as `accuracy/<family>` and `ceiling/<family>`, as fractions; and `count`. Without predictions all are 0. An
        expression of the family "relation/near" counts in "relation", too.
    """
    needs = {"same_annotation": ("ann_id", "candidate_ann_ids"), "vlbert": ("gt_box", "image_size")}
    right: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for prediction in predictions:
        for name in needs.get(convention, ("gt_box",)):
            if getattr(prediction, name) is None:
                raise UserError(
                    f"The prediction for text {prediction.text_index} has no {name}, which the convention {convention} "
                    "needs."
                )
        result = _same_annotation(prediction) if convention == "same_annotation" else _iou_hit(prediction, convention)
        right[""].append(result)
        if prediction.family is not None:
            for family in accumulate(prediction.family.split("/"), "{}/{}".format):
                right[f"/{family}"].append(result)
    metrics = {"accuracy": 0.0, "ceiling": 0.0, "count": float(len(right[""]))}
    for family, results in sorted(right.items()):
        if results:
            metrics[f"accuracy{family}"], metrics[f"ceiling{family}"] = (float(x) for x in np.mean(results, axis=0))
    return metrics


def _iou_hit(prediction: ReferringPrediction, convention: str) -> tuple[bool, bool]:
    """(prediction right, any candidate right)."""
    gt_box = np.asarray(prediction.gt_box, dtype=np.float64)
    candidates = np.asarray(prediction.candidate_boxes, dtype=np.float64).reshape(-1, 4)
    reachable = bool(hits(candidates, gt_box, convention, prediction.image_size).any())
    has_box = prediction.box is not None
    return has_box and bool(hits(np.asarray(prediction.box), gt_box, convention, prediction.image_size)), reachable


def _same_annotation(prediction: ReferringPrediction) -> tuple[bool, bool]:
    ann_ids: Sequence[int] = prediction.candidate_ann_ids
    candidates = np.asarray(prediction.candidate_boxes, dtype=np.float64).reshape(-1, 4)
    reachable = prediction.ann_id in ann_ids
    if prediction.box is None:
        return False, reachable
    chosen = np.abs(candidates - np.asarray(prediction.box, dtype=np.float64)).max(axis=1) < 1e-6
    if len(ann_ids) > len(candidates) or not chosen.any():
        raise UserError(
            f"The candidate boxes of text {prediction.text_index} are not annotations, so the convention "
            "same_annotation does not fit; evaluate with boxes 'gt'."
        )
    rows = chosen.nonzero()[0] - (len(candidates) - len(ann_ids))
    return any(row >= 0 and ann_ids[row] == prediction.ann_id for row in rows), reachable


def write_submission(path: str | Path, predictions: Sequence[ReferringPrediction]) -> None:
    """Write predictions as a JSON list with one object per expression, in order.

    An object is {"ref_id": int, "sent_id": int, "box": [x1, y1, x2, y2]}, in pixels of the original image; the box is
    null if the model found none. There is no evaluation server. (`ref_id` alone would be ambiguous: an object has
    several expressions.)
    """
    write_list(path, ({"ref_id": one.ref_id, "sent_id": one.sent_id, "box": one.box} for one in predictions))
