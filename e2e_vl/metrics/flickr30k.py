"""Phrase recall of Flickr30K Entities as in BAN's code, which VisualBERT copied; tested with golden data.

Only phrases with boxes are evaluated. A candidate is right if its IoU with *any* box of the phrase is at least 0.5,
with areas (x2 - x1) * (y2 - y1). Recall at k is the share of phrases with a right candidate among the k highest scores;
the upper bound is the share of phrases with any right candidate.

Other papers merge the boxes of a phrase into their enclosing box, or use the first box; their numbers are not
comparable. Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from e2e_vl.io import Count, Id, Score
from e2e_vl.metrics.refcoco import box_iou
from e2e_vl.metrics.refinement import refinement_metrics
from e2e_vl.predictions import Box, Overlaps, Prediction, write_list

MIN_IOU = 0.5
RECALLS = (1, 5, 10)  # k of "R@k"


class Flickr30KPrediction(Prediction, kw_only=True):
    """The boxes of a sentence's phrases. Lists have an entry per phrase; None if the truth is unknown."""

    metadata_fields = Prediction.metadata_fields | {"image_id", "sentence"}
    phrases: tuple[str, ...]
    boxes: tuple[Box | None, ...]  # None: there are no candidate regions
    scores: tuple[Score, ...]  # attention on the boxes
    ranks: tuple[Count | None, ...] | None = None  # see `first_hit`
    phrase_ids: tuple[str, ...] | None = None
    phrase_types: tuple[tuple[str, ...], ...] | None = None
    gt_boxes: tuple[tuple[Box, ...], ...] | None = None
    # of a model that refines boxes, otherwise None: the regions of the boxes, and IoUs with the true boxes if known
    proposals: tuple[Box | None, ...] | None = None
    overlaps: tuple[Overlaps, ...] | None = None
    image_id: Id | None = None
    sentence: Count | None = None  # line in the image's sentence file


def correct_candidates(
    candidates: np.ndarray | Sequence[Sequence[float]],
    boxes: np.ndarray | Sequence[Sequence[float]],
    min_iou: float = MIN_IOU,
) -> np.ndarray:
    """Mark the candidates that have a sufficient IoU with any of the boxes.

    Args:
        candidates: xyxy [R, 4].
        boxes: xyxy [n, 4].

    Returns:
        bool [R].
    """
    candidates = np.asarray(candidates, dtype=np.float64).reshape(-1, 4)
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    return (box_iou(candidates[:, None], boxes[None], "continuous") >= min_iou).any(axis=1)


def first_hit(scores: np.ndarray | Sequence[float], is_correct: np.ndarray | Sequence[bool]) -> int | None:
    """Return the rank, from 0, of the best right candidate; None if there is none.

    Of equal scores, the first is better.
    """
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")
    ranked = np.asarray(is_correct)[order]
    return int(ranked.argmax()) if ranked.any() else None


def recalls(ranks: Sequence[int | None]) -> dict[str, float]:
    """Return "R@1", "R@5", "R@10" and "upper_bound", 0 to 1, from the `first_hit` ranks of all phrases."""
    hit_ranks = [rank for rank in ranks if rank is not None]
    shares = {}
    for k in RECALLS:
        shares[f"R@{k}"] = sum(rank < k for rank in hit_ranks) / len(ranks)
    shares["upper_bound"] = len(hit_ranks) / len(ranks)
    return shares


def phrase_metrics(predictions: Sequence[Flickr30KPrediction]) -> dict[str, float]:
    """Return the recalls over all phrases that have boxes.

    They are "count" (sentences); and if there are phrases with boxes, "accuracy" (R@1), "recall_5", "recall_10",
    "ceiling" (the upper bound) and "accuracy_by_type/<type>". A phrase with several types counts for each. Where boxes
    are refined, these are of refined boxes, but for the ceiling, and the metrics of `e2e_vl/metrics/refinement.py` are
    there too.
    """
    metrics = {"count": float(len(predictions))}
    ranks: list[int | None] = []
    overlaps: list[Overlaps] = []
    by_type: dict[str, list[int | None]] = defaultdict(list)
    for prediction in predictions:
        if prediction.ranks is None:
            continue
        overlaps += prediction.overlaps or ()
        for rank, types in zip(prediction.ranks, prediction.phrase_types, strict=True):
            ranks.append(rank)
            for kind in types:
                by_type[kind].append(rank)
    if not ranks:
        return metrics
    shares = recalls(ranks)
    metrics |= {"accuracy": shares["R@1"], "recall_5": shares["R@5"], "recall_10": shares["R@10"]}
    metrics["ceiling"] = shares["upper_bound"]
    metrics |= refinement_metrics(overlaps)
    for kind, ranks_of_type in sorted(by_type.items()):
        metrics[f"accuracy_by_type/{kind}"] = recalls(ranks_of_type)["R@1"]
    return metrics


def write_submission(path: Path, predictions: Sequence[Flickr30KPrediction]) -> None:
    """Write a JSON list of {"image", "sentence", "phrases": [{"id", "phrase", "box", "score"}]}.

    There is no evaluation server; boxes are xyxy in pixels of the original image.
    """
    entries = []
    for prediction in predictions:
        rows = zip(prediction.phrase_ids, prediction.phrases, prediction.boxes, prediction.scores, strict=True)
        phrases = []
        for phrase_id, phrase, box, score in rows:
            phrases.append({"id": phrase_id, "phrase": phrase, "box": box, "score": score})
        entries.append({"image": prediction.image_id, "sentence": prediction.sentence, "phrases": phrases})
    write_list(path, entries, ["image", "sentence"])
