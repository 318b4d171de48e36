"""Accuracies at several IoUs and the mean IoU, before and after boxes are refined, beside the best of the proposals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from e2e_vl.metrics.refcoco import ReferringPrediction, box_iou, exceeds
from e2e_vl.predictions import Box, Overlaps

THRESHOLDS = {"": 0.5, "_75": 0.75, "_90": 0.9}  # ending of a metric's name -> least IoU of a right box


def refinement_metrics(overlaps: Sequence[Overlaps], convention: str = "continuous") -> dict[str, float]:
    """Return how well boxes fit, as shares of the answers and mean IoUs.

    Args:
        overlaps: of each answer whose true box is known.
        convention: of the IoUs, see `e2e_vl/metrics/refcoco.py`.

    Returns:
        `accuracy`, `accuracy_75`, `accuracy_90` (IoU of at least 0.5, 0.75 and 0.9) and `mean_iou` of the refined
        boxes; `proposal_accuracy`, ... `proposal_mean_iou` of the proposals that were chosen; `ceiling`, ...
        `ceiling_mean_iou` of the best proposals, the most that choosing alone could reach. Empty without answers.
    """
    if not overlaps:
        return {}
    columns = {
        ("accuracy", "mean_iou"): [overlap.refined for overlap in overlaps],
        ("proposal_accuracy", "proposal_mean_iou"): [overlap.proposal for overlap in overlaps],
        ("ceiling", "ceiling_mean_iou"): [overlap.best_proposal for overlap in overlaps],
    }
    metrics = {}
    for (share, mean), values in columns.items():
        ious = np.array(values)
        for ending, threshold in THRESHOLDS.items():
            metrics[share + ending] = float(exceeds(ious, convention, threshold).mean())
        metrics[mean] = float(ious.mean())
    return metrics


def overlaps_of(
    refined: Box | None,
    proposal: Box | None,
    candidates: Sequence[Box] | np.ndarray,
    gt_boxes: Sequence[Box] | np.ndarray,
    convention: str = "continuous",
    image_size: tuple[int, int] | None = None,
) -> Overlaps:
    """Return the IoUs of an answer with its true boxes; 0 where there is no box.

    Args:
        refined, proposal: the box of the answer, and the candidate that it was refined from.
        candidates: all candidates, before refinement.
        gt_boxes: the true boxes, of which one is enough.
        convention, image_size: as in `box_iou`.
    """
    return Overlaps(
        _best_iou([] if refined is None else [refined], gt_boxes, convention, image_size),
        _best_iou([] if proposal is None else [proposal], gt_boxes, convention, image_size),
        _best_iou(candidates, gt_boxes, convention, image_size),
    )


def referring_overlaps(predictions: Iterable[ReferringPrediction], convention: str) -> list[Overlaps]:
    """Return the IoUs of the expressions about one object; empty if no box was refined."""
    predictions = list(predictions)
    if not any(prediction.refined_boxes for prediction in predictions):
        return []
    overlaps = []
    for prediction in predictions:
        if prediction.targets is not None and len(prediction.targets) == 1:
            overlaps.append(
                overlaps_of(
                    prediction.box,
                    prediction.proposal,
                    prediction.candidate_boxes,
                    prediction.targets,
                    convention,
                    prediction.image_size,
                )
            )
    return overlaps


def _best_iou(
    boxes: Sequence[Box] | np.ndarray,
    gt_boxes: Sequence[Box] | np.ndarray,
    convention: str,
    image_size: tuple[int, int] | None,
) -> float:
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 1, 4)
    gt_boxes = np.asarray(gt_boxes, dtype=np.float64).reshape(1, -1, 4)
    return float(box_iou(boxes, gt_boxes, convention, image_size).max(initial=0.0))
