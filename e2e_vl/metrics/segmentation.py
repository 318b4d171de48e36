"""Metrics of referring expression segmentation, as the field defines them.

| metric | what it is | source |
| --- | --- | --- |
| `oiou` | overall IoU: all intersections over all unions, in pixels | LAVT (arXiv 2112.02244), section 4.1 |
| `miou` | mean IoU of the expressions | the same |
| `mask_precision_50` ... `mask_precision_90` | Pr@X: share with an IoU of at least 0.5, 0.6, ... | the same |
| `mask_giou` | mean IoU, which for an expression about nothing is 1 for an empty mask and 0 for any other | GRES |
| `mask_ciou` | all intersections over all unions; a mask where nothing is meant only adds to the unions | GRES |
| `mask_n_acc` | share of the expressions about nothing with an empty mask | GRES |

GRES is arXiv 2306.00968, section 3.3; its three are computed as in the evaluator of henghuiding/ReLA
(gres_model/evaluation/refer_evaluation.py). `oiou`, `miou` and Pr@X are of the expressions about something.
"""

from __future__ import annotations

from collections.abc import Iterable

from e2e_vl.masks import mask_overlap
from e2e_vl.metrics.refcoco import ReferringPrediction

THRESHOLDS = {"50": 0.5, "60": 0.6, "70": 0.7, "80": 0.8, "90": 0.9}  # ending of a metric's name -> least IoU


def segmentation_metrics(predictions: Iterable[ReferringPrediction]) -> dict[str, float]:
    """Return the metrics above, as fractions, of the predictions with a mask whose truth is known; empty without any.

    The three of GRES are only there if some expressions are about nothing.
    """
    intersections = 0
    unions = 0
    unions_of_nothing = 0  # pixels of masks where nothing is meant
    ious: list[float] = []
    empty_masks: list[bool] = []  # whether the mask of each expression about nothing is empty
    for prediction in predictions:
        if prediction.segmentation is None or prediction.gt_segmentation is None:
            continue
        intersection, union = mask_overlap(prediction.segmentation, prediction.gt_segmentation)
        if prediction.targets == ():
            empty_masks.append(union == 0)
            unions_of_nothing += union
            continue
        ious.append(intersection / union if union else 0.0)
        intersections += intersection
        unions += union
    metrics = {}
    if ious:
        metrics["oiou"] = intersections / unions if unions else 0.0
        metrics["miou"] = sum(ious) / len(ious)
        for ending, threshold in THRESHOLDS.items():
            metrics[f"mask_precision_{ending}"] = sum(iou >= threshold for iou in ious) / len(ious)
    if empty_masks:
        all_unions = unions + unions_of_nothing
        metrics["mask_giou"] = (sum(ious) + sum(empty_masks)) / (len(ious) + len(empty_masks))
        metrics["mask_ciou"] = intersections / all_unions if all_unions else 0.0
        metrics["mask_n_acc"] = sum(empty_masks) / len(empty_masks)
    return metrics
