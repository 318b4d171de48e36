"""Flickr30K Entities: recall of phrases, by the rules of BAN's code, which VisualBERT copied; pinned by golden data.

A phrase is scored if it has at least one box. A candidate is right if its IoU with *any* box of the phrase is at least
0.5, with plain areas (x2 - x1) * (y2 - y1); boxes are not merged. Recall at k asks for a right candidate among the k
with the highest scores; the upper bound for one at all. Phrases without any right candidate count as missed.

Other papers merge the boxes of a phrase into one that encloses them, or take the first; their numbers cannot be
compared with these.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.metrics.submission_files import write_list

MIN_IOU = 0.5
RECALLS = (1, 5, 10)  # k of "R@k"


def right_candidates(
    candidates: np.ndarray | Sequence[Sequence[float]],
    boxes: np.ndarray | Sequence[Sequence[float]],
    min_iou: float = MIN_IOU,
) -> np.ndarray:
    """bool [R]: which candidates xyxy [R, 4] overlap any of the boxes xyxy [n, 4] enough."""
    ours = np.asarray(candidates, dtype=np.float64).reshape(-1, 1, 4)
    true = np.asarray(boxes, dtype=np.float64).reshape(1, -1, 4)
    sides = (np.minimum(ours[..., 2:], true[..., 2:]) - np.maximum(ours[..., :2], true[..., :2])).clip(min=0)
    overlap = sides.prod(axis=2)
    area, true_area = ((some[..., 2:] - some[..., :2]).prod(axis=2) for some in (ours, true))
    union = area + true_area - overlap
    iou = np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)
    return (iou >= min_iou).any(axis=1)


def first_hit(scores: np.ndarray | Sequence[float], is_right: np.ndarray | Sequence[bool]) -> int | None:
    """Rank from 0 of the best right candidate of a phrase; None if there is none. Equal scores keep their order."""
    ranked = np.asarray(is_right)[np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")]
    return int(ranked.argmax()) if ranked.any() else None


def recalls(ranks: Sequence[int | None]) -> dict[str, float]:
    """Scores, 0 to 1, from the ranks of `first_hit` of all phrases: "R@1", "R@5", "R@10" and "upper_bound"."""
    found = {f"R@{k}": sum(rank is not None and rank < k for rank in ranks) / len(ranks) for k in RECALLS}
    return found | {"upper_bound": sum(rank is not None for rank in ranks) / len(ranks)}


def phrase_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Recall over all phrases that have boxes.

    Args:
        records: one per sentence, with "ranks" (see `first_hit`) and "phrase_types" (lists of types), both with an
            entry per phrase. Of sentences whose truth is unknown "ranks" is None.

    Returns:
        "count" (sentences), and if there are phrases with boxes "accuracy" (R@1), "recall_5", "recall_10", "ceiling"
        (the upper bound), and "accuracy_by_type/<type>". A phrase with several types counts for each.
    """
    records = list(records)
    metrics = {"count": float(len(records))}
    ranks: list[int | None] = []
    by_type: dict[str, list[int | None]] = defaultdict(list)
    for record in records:
        if record.get("ranks") is None:
            continue
        for rank, types in zip(record["ranks"], record["phrase_types"], strict=True):
            ranks.append(rank)
            for kind in types:
                by_type[kind].append(rank)
    if not ranks:
        return metrics
    found = recalls(ranks)
    metrics |= {"accuracy": found["R@1"], "recall_5": found["R@5"], "recall_10": found["R@10"]}
    metrics["ceiling"] = found["upper_bound"]
    return metrics | {f"accuracy_by_type/{kind}": recalls(own)["R@1"] for kind, own in sorted(by_type.items())}


def write_submission(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions: a JSON list of {"image", "sentence", "phrases": [{"id", "phrase", "box", "score"}]}.

    No server wants it; boxes are xyxy in pixels of the image as it is stored.
    """
    write_list(
        path,
        (
            {
                "image": record["image_id"],
                "sentence": record["sentence"],
                "phrases": [
                    dict(zip(("id", "phrase", "box", "score"), row, strict=True))
                    for row in zip(
                        record["phrase_ids"], record["phrases"], record["boxes"], record["scores"], strict=True
                    )
                ],
            }
            for record in records
        ),
    )
