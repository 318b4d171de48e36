"""Accuracy of referring expressions under the IoU conventions of the published numbers, and files of predictions.

| convention | the box is right when | used by |
| --- | --- | --- |
| `mattnet` | IoU >= 0.5; overlaps of at most one pixel in width or height count as none | MAttNet, detected boxes |
| `vlbert` | IoU >= 0.5 with one pixel added to every extent, the prediction clamped to [0, size - 1] before | VL-BERT |
| `strict` | MAttNet's IoU > 0.5 | UNITER |
| `same_annotation` | the chosen annotation is the referred one, so a near-duplicate is wrong | MAttNet, gt boxes |

All take continuous corners with x2 = x + w (MAttNet's x2 = x + w - 1 with an inclusive overlap is the same thing) and
count expressions, not refs. The official scripts were read for these rules; the golden data pins them.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from e2e_vl.metrics.submission_files import write_list

IOU_CONVENTIONS = ("mattnet", "vlbert", "strict")
CONVENTIONS = (*IOU_CONVENTIONS, "same_annotation")
THRESHOLD = 0.5
# An IoU that is 0.5 in exact arithmetic may come out a rounding error away from it.
_ROUNDING = 1e-9


def box_iou(boxes: np.ndarray, gt_boxes: np.ndarray, convention: str, image_size: Any = None) -> np.ndarray:
    """IoU of predicted with true boxes, pair by pair.

    Args:
        boxes: float [..., 4], predicted, xyxy (x2 = x + w) in pixels of the stored image.
        gt_boxes: float [..., 4], true; the leading axes broadcast against the axes of `boxes`.
        convention: one of `IOU_CONVENTIONS`.
        image_size: [..., 2], (height, width) of the stored image(s); needed by `vlbert` only.

    Returns:
        float64 [...], in 0..1.

    Raises:
        ValueError: unknown convention, a coordinate that is not finite, or `vlbert` without image size.
    """
    if convention not in IOU_CONVENTIONS:
        raise UserError(f"unknown IoU convention {convention!r}; choose one of {', '.join(IOU_CONVENTIONS)}")
    boxes, gt_boxes = (np.asarray(array, dtype=np.float64) for array in (boxes, gt_boxes))
    for array, what in ((boxes, "predicted"), (gt_boxes, "true")):
        if array.shape[-1:] != (4,):
            raise UserError(f"the {what} boxes have the shape {array.shape}, expected [..., 4]")
        if not np.isfinite(array).all():
            raise UserError(f"a {what} box has a coordinate that is not finite")
    extra = 0.0
    if convention == "vlbert":
        if image_size is None:
            raise UserError("the convention vlbert clamps predicted boxes and needs the image size (height, width)")
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

    Arguments and errors as in `box_iou`. Returns bool [...].
    """
    iou = box_iou(boxes, gt_boxes, convention, image_size)
    return iou > THRESHOLD + _ROUNDING if convention == "strict" else iou >= THRESHOLD - _ROUNDING


def referring_metrics(records: Iterable[Mapping[str, Any]], convention: str = "mattnet") -> dict[str, float]:
    """Accuracy and ceiling of some predictions, over all and by family of expression.

    Args:
        records: one per expression, with `box` [4] (the prediction, or None where there was nothing to choose from),
            `gt_box` [4] and `candidate_boxes` [R, 4], all xyxy in pixels of the stored image; `image_size`
            (height, width) for `vlbert`; for `same_annotation` instead of the true box `ann_id` and
            `candidate_ann_ids`, the annotations behind the *last* candidate boxes (a whole-image box may come before
            them); optionally `family`.
        convention: one of `CONVENTIONS`.

    Returns:
        `accuracy`, `ceiling` (share of expressions with any candidate that is right, so the best possible accuracy),
        both also as `accuracy/<family>` and `ceiling/<family>`, as fractions; and `count`. Without records all are 0.

    Raises:
        ValueError: unknown convention, or a record that lacks what the convention needs.
    """
    if convention not in CONVENTIONS:
        raise UserError(f"unknown convention {convention!r}; choose one of {', '.join(CONVENTIONS)}")
    judge = _same_annotation if convention == "same_annotation" else _iou_hit
    right: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for record in records:
        try:
            result = judge(record, convention)
        except KeyError as error:
            raise UserError(f"{_name(record)} has no {error}, which the convention {convention} needs") from error
        except ValueError as error:
            raise UserError(f"{_name(record)}: {error}") from error
        right[""].append(result)
        if record.get("family") is not None:
            right[f"/{record['family']}"].append(result)
    metrics = {"accuracy": 0.0, "ceiling": 0.0, "count": float(len(right[""]))}
    for family, results in sorted(right.items()):
        if results:
            metrics[f"accuracy{family}"], metrics[f"ceiling{family}"] = (float(x) for x in np.mean(results, axis=0))
    return metrics


def _iou_hit(record: Mapping[str, Any], convention: str) -> tuple[bool, bool]:
    """(prediction right, any candidate right)."""
    size = record["image_size"] if convention == "vlbert" else None
    gt_box = np.asarray(record["gt_box"], dtype=np.float64)
    candidates = np.asarray(record["candidate_boxes"], dtype=np.float64).reshape(-1, 4)
    reachable = bool(hits(candidates, gt_box, convention, size).any())
    if record["box"] is None:
        return False, reachable
    return bool(hits(np.asarray(record["box"]), gt_box, convention, size)), reachable


def _same_annotation(record: Mapping[str, Any], convention: str) -> tuple[bool, bool]:
    ann_ids: Sequence[int] = record["candidate_ann_ids"]
    candidates = np.asarray(record["candidate_boxes"], dtype=np.float64).reshape(-1, 4)
    if len(ann_ids) > len(candidates):
        raise UserError(f"{len(ann_ids)} candidate_ann_ids for {len(candidates)} candidate boxes")
    reachable = record["ann_id"] in ann_ids
    if record["box"] is None:
        return False, reachable
    chosen = np.abs(candidates - np.asarray(record["box"], dtype=np.float64)).max(axis=1) < 1e-6
    if not chosen.any():
        raise UserError("the predicted box is none of the candidate boxes, so it is no annotation")
    first_annotated = len(candidates) - len(ann_ids)
    rows = chosen.nonzero()[0] - first_annotated
    return any(row >= 0 and ann_ids[row] == record["ann_id"] for row in rows), reachable


def _name(record: Mapping[str, Any]) -> str:
    return f"the prediction for sentence {record.get('sent_id', '(without sent_id)')}"


def write_submission(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions as a JSON list with an object per expression, in the order of the records.

    An object is {"ref_id": int, "sent_id": int, "box": [x1, y1, x2, y2]}, in pixels of the stored image, null where the
    model found nothing. No server takes such files; the literature compares on one's own machine. (A file by `ref_id`
    alone could not tell a referred object's several expressions apart.)

    Raises:
        ValueError: an expression twice, ids that are no whole numbers, or a box that is not four finite numbers.
    """
    entries = [{key: record[key] for key in ("ref_id", "sent_id", "box")} for record in records]
    seen = set()
    for number, entry in enumerate(entries):
        key, box = (entry["ref_id"], entry["sent_id"]), entry["box"]
        if any(type(value) is not int for value in key):
            raise UserError(f"{path}: entry {number} has the ids {key}, expected two whole numbers.")
        if key in seen:
            raise UserError(f"{path}: the expression {key[1]} of ref {key[0]} is there twice; remove one of them.")
        seen.add(key)
        is_box = isinstance(box, list) and len(box) == 4
        is_box = is_box and all(type(value) in (int, float) and math.isfinite(value) for value in box)
        if box is not None and not is_box:
            raise UserError(f"{path}: expression {key[1]} has the box {box!r}, expected [x1, y1, x2, y2] or null.")
    write_list(path, entries)
