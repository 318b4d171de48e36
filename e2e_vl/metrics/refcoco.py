"""Accuracy of referring expressions under the IoU conventions of published numbers, and prediction files.

| convention | the box is right if | used by |
| --- | --- | --- |
| `mattnet` | IoU >= 0.5; overlaps of at most one pixel in width or height count as none | MAttNet, detected boxes |
| `vlbert` | IoU >= 0.5 with one pixel added to every extent, the prediction clamped to [0, size - 1] before | VL-BERT |
| `strict` | MAttNet's IoU > 0.5 | UNITER |
| `same_annotation` | the chosen annotation is the referred one, so a near-duplicate is wrong | MAttNet, gt boxes |
| `continuous` | IoU >= 0.5 | MMDetection, Qwen-VL, InternVL |
| `generalized` | generalised IoU >= 0.5, never more than the IoU | MDETR |

gRefCOCO has expressions about no or several objects; a prediction of a run is one box or none. N-acc and T-acc are the
shares of expressions without and with a target for which no box and a box is predicted; gIoU is the mean IoU of the
predicted and the true areas, 1 for two empty ones (GRES, arXiv 2306.00968, section 3.3, there of masks, here of boxes);
Pr@(F1=1) is the share of expressions whose boxes are all right (GREC, arXiv 2308.16182). Its official evaluator
(mdetr/datasets/refexp.py of henghuiding/gRefCOCO) matches boxes by *generalised* IoU >= 0.5, never more than the IoU.

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
from e2e_vl.masks import RunLengths
from e2e_vl.predictions import Box, Prediction, write_list

THRESHOLD = 0.5
# tolerance for an IoU of exactly 0.5, which may have a rounding error
_ROUNDING = 1e-9


class ReferringPrediction(Prediction, kw_only=True):
    """The region that an expression refers to."""

    metadata_fields = Prediction.metadata_fields | {"ref_id", "sent_id", "image_id"}
    box: Box | None  # None: there were no candidate regions, or the null candidate won
    score: Score
    null_score: Score | None = None  # of the null candidate; None: there is none
    candidate_boxes: tuple[Box, ...]  # all candidate regions
    candidate_scores: tuple[Score, ...] = ()
    # of a model that refines boxes: the candidates after refinement, one of which is `box`; otherwise empty
    refined_boxes: tuple[Box, ...] = ()
    proposal: Box | None = None  # the candidate that `box` was refined from; None: there is none
    # annotation ids of the *last* candidate boxes (a box of the whole image may come before them)
    candidate_ann_ids: tuple[Id, ...] | None = None
    detected_class: str | None = None  # the detector's class for the box; None: unknown
    gt_box: Box | None = None  # ground truth; None: unknown, or not exactly one box
    gt_boxes: tuple[Box, ...] | None = None  # ground truth of an expression about no or several objects (gRefCOCO)
    category: str | None = None  # category of that box
    ann_id: Id | None = None
    ref_id: Id | None = None
    sent_id: Id | None = None
    image_id: Id | None = None
    # the mask of the answer in pixels of the original image, empty without a box; None: the run predicts no masks
    segmentation: RunLengths | None = None
    gt_segmentation: RunLengths | None = None  # of all objects that the expression refers to; None: unknown

    @property
    def chosen_candidate(self) -> Box | None:
        """The chosen candidate, before refinement."""
        return self.box if self.proposal is None else self.proposal

    @property
    def targets(self) -> tuple[Box, ...] | None:
        """The boxes that the expression refers to; None: unknown."""
        return self.gt_boxes if self.gt_box is None else (self.gt_box,)


def box_iou(boxes: np.ndarray, gt_boxes: np.ndarray, convention: str, image_size: Any = None) -> np.ndarray:
    """Compute the IoU of predicted and true boxes, pair by pair.

    Args:
        boxes: float [..., 4], predicted, xyxy (x2 = x + w) in pixels of the original image.
        gt_boxes: float [..., 4], true; the leading axes broadcast against the axes of `boxes`.
        convention: one in the table above, except `same_annotation`.
        image_size: [..., 2], (height, width) of the original image(s); needed by `vlbert` only.

    Returns:
        float64 [...], in 0..1; the generalised IoU in -1..1.
    """
    boxes = np.asarray(boxes, dtype=np.float64)
    gt_boxes = np.asarray(gt_boxes, dtype=np.float64)
    if convention == "generalized":
        return generalized_iou(boxes, gt_boxes)
    extra = 0.0  # added to every extent
    smallest = 1.0  # overlaps up to this extent count as none
    if convention == "continuous":
        smallest = 0.0
    if convention == "vlbert":
        height, width = np.moveaxis(np.asarray(image_size, dtype=np.float64), -1, 0)
        last = np.stack([width, height, width, height], axis=-1) - 1
        boxes = np.clip(boxes, 0, last)
        extra = 1.0
        smallest = 0.0
    area = np.prod(boxes[..., 2:] - boxes[..., :2] + extra, axis=-1)
    gt_area = np.prod(gt_boxes[..., 2:] - gt_boxes[..., :2] + extra, axis=-1)
    overlap = np.minimum(boxes[..., 2:], gt_boxes[..., 2:]) - np.maximum(boxes[..., :2], gt_boxes[..., :2]) + extra
    intersection = np.where((overlap > smallest).all(axis=-1), np.prod(overlap, axis=-1), 0.0)
    union = area + gt_area - intersection
    return np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)


def generalized_iou(boxes: np.ndarray | Box, gt_boxes: np.ndarray | Box) -> np.ndarray:
    """Return the generalised IoU of predicted and true boxes, pair by pair, which is negative for boxes far apart.

    It is the IoU minus the share of the smallest enclosing box that is outside their union (arXiv 1902.09630).

    Args:
        boxes: float [..., 4], xyxy, continuous.
        gt_boxes: float [..., 4]; the leading axes broadcast against the axes of `boxes`.

    Returns:
        float64 [...], at most 1; 0 where both boxes, or the enclosing one, have no area.
    """
    first = np.asarray(boxes, dtype=np.float64)
    second = np.asarray(gt_boxes, dtype=np.float64)
    overlap = np.minimum(first[..., 2:], second[..., 2:]) - np.maximum(first[..., :2], second[..., :2])
    outer_sides = np.maximum(first[..., 2:], second[..., 2:]) - np.minimum(first[..., :2], second[..., :2])
    enclosing = np.prod(outer_sides, axis=-1)
    intersection = np.prod(overlap.clip(min=0), axis=-1)
    area = np.prod(first[..., 2:] - first[..., :2], axis=-1)
    gt_area = np.prod(second[..., 2:] - second[..., :2], axis=-1)
    union = area + gt_area - intersection
    has_area = (union > 0) & (enclosing > 0)
    iou = np.divide(intersection, union, out=np.zeros_like(union), where=has_area)
    outside = np.divide(enclosing - union, enclosing, out=np.zeros_like(union), where=has_area)
    return iou - outside


def hits(
    boxes: np.ndarray, gt_boxes: np.ndarray, convention: str, image_size: Any = None, threshold: float = THRESHOLD
) -> np.ndarray:
    """Mark the predicted boxes that are right.

    Arguments as in `box_iou`; `threshold` is the least IoU. Returns bool [...].
    """
    return exceeds(box_iou(boxes, gt_boxes, convention, image_size), convention, threshold)


def exceeds(iou: np.ndarray, convention: str, threshold: float = THRESHOLD) -> np.ndarray:
    """Mark the IoUs that make a box right, bool [...]."""
    if convention == "strict":
        return iou > threshold + _ROUNDING
    return iou >= threshold - _ROUNDING


def all_boxes_are_right(boxes: Sequence[Box], gt_boxes: Sequence[Box], convention: str = "generalized") -> bool:
    """Return whether predicted and true boxes are the same, one to one: an F1 of 1 in GREC (arXiv 2308.16182).

    As in gRefCOCO's official evaluator, the pair with the highest overlap is matched first.
    """
    if len(boxes) != len(gt_boxes):
        return False
    if not boxes:
        return True
    overlaps = box_iou(np.asarray(boxes)[:, None], np.asarray(gt_boxes)[None], convention)
    for _ in boxes:
        row, column = np.unravel_index(overlaps.argmax(), overlaps.shape)
        if not exceeds(overlaps[row, column], convention):
            return False
        overlaps[row] = -np.inf
        overlaps[:, column] = -np.inf
    return True


def referring_metrics(
    predictions: Iterable[ReferringPrediction], convention: str = "mattnet", f1_overlap: str = "generalized_iou"
) -> dict[str, float]:
    """Return accuracy and ceiling of predictions, over all and by family of expression.

    Args:
        convention: one in the table above. `vlbert` needs `image_size`, `same_annotation` needs `ann_id` and
            `candidate_ann_ids`, the others the true boxes.
        f1_overlap: how `f1_precision` matches a box: "generalized_iou" (at least 0.5, gRefCOCO's official evaluator) or
            "iou" (as the convention).

    Returns:
        `accuracy` and `ceiling` (the share of expressions with any right candidate: the best possible accuracy) of the
        expressions with a target, also as `accuracy/<family>` and `ceiling/<family>`, as fractions; and their `count`.
        Without predictions all are 0. An expression of the family "relation/near" counts in "relation", too. With
        expressions without a target also `n_acc` (and by family), `t_acc`, `giou`, `f1_precision`.
    """
    needs = {"same_annotation": ("ann_id", "candidate_ann_ids"), "vlbert": ("targets", "image_size")}
    right: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    found_none: dict[str, list[bool]] = defaultdict(list)  # of expressions without a target
    found_some: list[bool] = []  # of expressions with a target
    ious: list[float] = []
    f1_hits: list[bool] = []
    for prediction in predictions:
        families = [""]  # endings of the names of the metrics in which it counts
        if prediction.family is not None:
            for family in accumulate(prediction.family.split("/"), "{}/{}".format):
                families.append(f"/{family}")
        if prediction.targets == ():
            for family in families:
                found_none[family].append(prediction.box is None)
            ious.append(float(prediction.box is None))
            f1_hits.append(prediction.box is None)
            continue
        for name in needs.get(convention, ("targets",)):
            if getattr(prediction, name) is None:
                raise UserError(
                    f"The prediction for text {prediction.text_index} has no {name}, which the convention {convention} "
                    "needs."
                )
        if convention == "same_annotation":
            is_right, is_reachable = _same_annotation(prediction)
        else:
            is_right, is_reachable = _iou_hit(prediction, convention)
        for family in families:
            right[family].append((is_right, is_reachable))
        found_some.append(prediction.box is not None)
        predicted_boxes = () if prediction.box is None else (prediction.box,)
        if f1_overlap == "generalized_iou":
            f1_hits.append(all_boxes_are_right(predicted_boxes, prediction.targets or ()))
        else:
            f1_hits.append(is_right)
        iou = 0.0
        if prediction.box is not None:
            iou = area_iou([prediction.box], prediction.targets or ())
        ious.append(iou)
    metrics = {"accuracy": 0.0, "ceiling": 0.0, "count": float(len(right[""]))}
    for family, results in sorted(right.items()):
        if results:
            accuracy, ceiling = np.mean(results, axis=0)
            metrics[f"accuracy{family}"] = float(accuracy)
            metrics[f"ceiling{family}"] = float(ceiling)
    if found_none:
        for family, results in sorted(found_none.items()):
            metrics[f"n_acc{family}"] = float(np.mean(results))
        metrics["t_acc"] = float(np.mean(found_some or [0.0]))
        metrics["giou"] = float(np.mean(ious))
        metrics["f1_precision"] = float(np.mean(f1_hits))
    return metrics


def area_iou(boxes: Sequence[Box], gt_boxes: Sequence[Box]) -> float:
    """Return the IoU of the areas that two lists of boxes cover, xyxy."""
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    gt_boxes = np.asarray(gt_boxes, dtype=np.float64).reshape(-1, 4)
    corners = np.concatenate([boxes, gt_boxes])
    # the edges of all boxes cut the image into cells
    xs = np.unique(corners[:, 0::2])
    ys = np.unique(corners[:, 1::2])

    def covered_cells(boxes: np.ndarray) -> np.ndarray:
        x1, y1, x2, y2 = boxes.T[..., None]
        columns = (x1 <= xs[:-1]) & (xs[:-1] < x2)
        rows = (y1 <= ys[:-1]) & (ys[:-1] < y2)
        return (rows[:, :, None] & columns[:, None]).any(axis=0)

    areas = np.outer(np.diff(ys), np.diff(xs))
    predicted = covered_cells(boxes)
    true = covered_cells(gt_boxes)
    union = areas[predicted | true].sum()
    return float(areas[predicted & true].sum() / union) if union else 0.0


def _iou_hit(prediction: ReferringPrediction, convention: str) -> tuple[bool, bool]:
    """Return (prediction right, any candidate right)."""
    if len(prediction.targets) > 1:  # one box is not all of them
        return False, False
    gt_box = np.asarray(prediction.targets[0], dtype=np.float64)
    candidates = np.asarray(prediction.candidate_boxes, dtype=np.float64).reshape(-1, 4)
    reachable = bool(hits(candidates, gt_box, convention, prediction.image_size).any())
    is_right = False
    if prediction.box is not None:
        is_right = bool(hits(np.asarray(prediction.box), gt_box, convention, prediction.image_size))
    return is_right, reachable


def _same_annotation(prediction: ReferringPrediction) -> tuple[bool, bool]:
    """Return (the referred annotation was chosen, it is among the candidates)."""
    ann_ids: Sequence[Id] = prediction.candidate_ann_ids
    candidates = np.asarray(prediction.candidate_boxes, dtype=np.float64).reshape(-1, 4)
    reachable = prediction.ann_id in ann_ids
    if prediction.box is None:
        return False, reachable
    chosen = np.abs(candidates - np.asarray(prediction.chosen_candidate, dtype=np.float64)).max(axis=1) < 1e-6
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
    null if the model found none. A run that predicts masks adds "segmentation": {"size": [height, width], "counts":
    str}, COCO's compressed RLE. There is no evaluation server. (`ref_id` alone would be ambiguous: an object has
    several expressions.)
    """
    entries = []
    for prediction in predictions:
        entry = {"ref_id": prediction.ref_id, "sent_id": prediction.sent_id, "box": prediction.box}
        if prediction.segmentation is not None:
            entry["segmentation"] = prediction.segmentation
        entries.append(entry)
    write_list(path, entries, ["ref_id", "sent_id"])
