"""The numbers of referring expressions and of phrases, from matched answers; the IoUs are those of `e2e_vl/metrics`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from e2e_vl.metrics.flickr30k import RECALLS, correct_candidates, first_hit
from e2e_vl.metrics.refcoco import all_boxes_are_right, area_iou, box_iou, exceeds, hits
from e2e_vl.scoring.answers import Answer
from e2e_vl.scoring.coordinates import to_corners, to_pixels
from e2e_vl.scoring.intervals import bootstrap_intervals
from e2e_vl.scoring.truths import TrueText

THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
CONVENTIONS = ("continuous", "mattnet", "vlbert", "strict", "generalized")
GREC_MIN_SCORE = 0.7  # of a predicted box in gRefCOCO's official evaluator


@dataclasses.dataclass(frozen=True)
class PredictedBoxes:
    """The boxes predicted for one text, in pixels of its original image."""

    boxes: np.ndarray  # float64 [n, 4], best first: the first one is the answer, or for gRefCOCO all are
    candidates: np.ndarray  # float64 [R, 4]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A mean over texts, from 0 to 1, with its 95 % interval."""

    name: str
    value: float
    interval: tuple[float, float]
    count: int  # texts that it is the mean of


def predicted_boxes(
    answer: Answer | None, text: TrueText, layout: str, scale: str, min_score: float | None = None
) -> PredictedBoxes:
    """Return the boxes of an answer in pixels, sorted by score where it has scores.

    Args:
        min_score: leave out boxes with lower scores; they remain candidates. None: leave out none.
    """
    if answer is None:
        return PredictedBoxes(np.zeros((0, 4)), np.zeros((0, 4)))
    boxes = _in_pixels(answer.boxes, text, layout, scale)
    candidates = boxes
    if answer.candidates is not None:
        candidates = _in_pixels(answer.candidates, text, layout, scale)
    if answer.scores is not None:
        scores = np.asarray(answer.scores, dtype=np.float64)
        order = np.argsort(-scores, kind="stable")
        if min_score is not None:
            order = order[scores[order] >= min_score]
        boxes = boxes[order]
    return PredictedBoxes(boxes, candidates)


def _in_pixels(boxes: Sequence[Sequence[float]], text: TrueText, layout: str, scale: str) -> np.ndarray:
    corners = to_corners(boxes, layout)
    return to_pixels(corners, np.tile(text.size, (len(corners), 1)), scale)


def measure_referring(
    texts: Sequence[TrueText], predictions: Sequence[PredictedBoxes], convention: str, resamples: int
) -> list[Measure]:
    """Measure expressions about one object each.

    Returns:
        The accuracy at each of `THRESHOLDS`, the mean IoU, the accuracies at 0.5 by the other conventions, and the
        ceiling: the share of expressions with any right candidate. An expression without a box is wrong.
    """
    gt_boxes = np.array([text.truth.boxes[0] for text in texts], dtype=np.float64)
    sizes = np.array([text.size for text in texts])
    has_box = np.array([len(prediction.boxes) > 0 for prediction in predictions])
    boxes = np.zeros((len(texts), 4))
    boxes[has_box] = [prediction.boxes[0] for prediction in predictions if len(prediction.boxes)]
    columns: dict[str, np.ndarray] = {}
    iou = box_iou(boxes, gt_boxes, convention, sizes)
    for threshold in THRESHOLDS:
        columns[f"accuracy at {threshold}"] = has_box & exceeds(iou, convention, threshold)
    columns["mean IoU"] = np.where(has_box, iou, 0.0)
    for other in CONVENTIONS:
        if other != convention:
            columns[f"accuracy at 0.5, {other}"] = has_box & hits(boxes, gt_boxes, other, sizes)
    owner = np.repeat(np.arange(len(texts)), [len(prediction.candidates) for prediction in predictions])
    candidates = np.concatenate([prediction.candidates for prediction in predictions])
    is_reachable = np.zeros(len(texts), dtype=bool)
    is_reachable[owner[hits(candidates, gt_boxes[owner], convention, sizes[owner])]] = True
    columns["ceiling"] = is_reachable
    return _measures(columns, texts, resamples)


def measure_generalized(
    texts: Sequence[TrueText], predictions: Sequence[PredictedBoxes], convention: str, resamples: int
) -> list[Measure]:
    """Measure expressions about no, one or several objects, as gRefCOCO's official evaluator (GREC) does.

    Returns:
        Pr@(F1=1) by generalised IoU (the official one) and by the IoU of the convention, N-acc, T-acc, and the mean IoU
        of the covered areas.
    """
    right: dict[str, list[bool]] = {"Pr@(F1=1)": [], f"Pr@(F1=1), {convention}": []}
    ious = []
    for text, prediction in zip(texts, predictions, strict=True):
        targets = text.truth.boxes
        boxes = prediction.boxes.tolist()
        right["Pr@(F1=1)"].append(all_boxes_are_right(boxes, targets))
        right[f"Pr@(F1=1), {convention}"].append(all_boxes_are_right(boxes, targets, convention))
        is_empty = not targets and not boxes
        ious.append(1.0 if is_empty else area_iou(boxes, targets))
    has_target = np.array([len(text.truth.boxes) > 0 for text in texts])
    has_box = np.array([len(prediction.boxes) > 0 for prediction in predictions])
    columns = {name: np.array(values) for name, values in right.items()}
    columns |= {"N-acc": ~has_box, "T-acc": has_box, "mean IoU of areas": np.array(ious)}
    return _measures(columns, texts, resamples, {"N-acc": ~has_target, "T-acc": has_target})


def measure_phrases(
    texts: Sequence[TrueText], boxes_of_phrases: Sequence[Sequence[np.ndarray]], resamples: int
) -> list[Measure]:
    """Measure the phrases of captions, for both ways to treat a phrase with several boxes.

    Args:
        boxes_of_phrases: of each caption and phrase, float [n, 4], best first.

    Returns:
        R@1, R@5, R@10 and the upper bound; a candidate is right by its IoU with any box of the phrase, or with the box
        that encloses all of them ("merged").
    """
    ranks: dict[str, list[int | None]] = {"any box": [], "merged boxes": []}
    captions: list[TrueText] = []
    for text, candidates in zip(texts, boxes_of_phrases, strict=True):
        for boxes, gt_boxes in zip(candidates, text.truth.boxes, strict=True):
            enclosing = np.concatenate([gt_boxes[:, :2].min(axis=0), gt_boxes[:, 2:].max(axis=0)])[None]
            falling_scores = -np.arange(len(boxes))
            ranks["any box"].append(first_hit(falling_scores, correct_candidates(boxes, gt_boxes)))
            ranks["merged boxes"].append(first_hit(falling_scores, correct_candidates(boxes, enclosing)))
            captions.append(text)
    columns: dict[str, np.ndarray] = {}
    most_boxes = max((len(boxes) for candidates in boxes_of_phrases for boxes in candidates), default=0)
    for protocol, ranks_of_phrases in ranks.items():
        rank = np.array([np.inf if rank is None else rank for rank in ranks_of_phrases])
        for k in RECALLS:
            if k == 1 or most_boxes > 1:
                columns[f"R@{k}, {protocol}"] = rank < k
        if most_boxes > 1:
            columns[f"upper bound, {protocol}"] = np.isfinite(rank)
    return _measures(columns, captions, resamples)


def _measures(
    columns: dict[str, np.ndarray],
    texts: Sequence[TrueText],
    resamples: int,
    counted: dict[str, np.ndarray] | None = None,
) -> list[Measure]:
    """Return the mean of each column over the texts that count in it, with its interval."""
    counted = counted or {}
    values = np.stack(list(columns.values()), axis=1).astype(np.float64)
    masks = np.stack([counted.get(name, np.ones(len(texts), dtype=bool)) for name in columns], axis=1)
    images = np.array([text.image for text in texts])
    intervals = bootstrap_intervals(values, images, masks, resamples)
    measures = []
    for number, name in enumerate(columns):
        mask = masks[:, number]
        if mask.any():
            low, high = intervals[number].tolist()
            measures.append(Measure(name, float(values[mask, number].mean()), (low, high), int(mask.sum())))
    return measures
