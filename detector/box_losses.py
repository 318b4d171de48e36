"""Box regression losses shared by the RPN and the box head, as Detectron2 sums them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torchvision.ops import complete_box_iou_loss, distance_box_iou_loss, generalized_box_iou_loss

from detector.boxes import decode_deltas, encode_deltas

IOU_LOSSES = {"giou": generalized_box_iou_loss, "diou": distance_box_iou_loss, "ciou": complete_box_iou_loss}


def box_regression_loss(
    deltas: Float[Tensor, "positives 4"],
    boxes: Float[Tensor, "positives 4"],
    targets: Float[Tensor, "positives 4"],
    *,
    weights: Sequence[float],
    kind: str,
    smooth_l1_beta: float,
) -> Float[Tensor, ""]:
    """Sum over positive boxes of the distance between their predicted deltas and the annotated boxes.

    Args:
        deltas: predicted for the positive anchors or proposals.
        boxes: the anchors or proposals.
        targets: the annotated box of each.
        weights: of the box coder.
        kind: "smooth_l1" compares deltas; "giou", "diou" and "ciou" compare decoded boxes.
        smooth_l1_beta: where L1 becomes L2; 0 is plain L1.

    Returns:
        the sum, in float32 (float64 where the deltas are); 0 (with a gradient of 0) where there are no positives.
    """
    if kind == "smooth_l1":
        deltas = deltas.to(torch.promote_types(deltas.dtype, torch.float32))
        return F.smooth_l1_loss(deltas, encode_deltas(boxes, targets, weights), beta=smooth_l1_beta, reduction="sum")
    decoded = decode_deltas(deltas, boxes, weights)
    return IOU_LOSSES[kind](decoded, targets.to(decoded.dtype), reduction="sum")
