"""Box arithmetic: areas, overlaps, the box coder, matching, sampling, checks of given boxes, and region selection.

Boxes are xyxy and continuous: a box covers [x1, x2) x [y1, y2), so its width is x2 - x1. Functions of an `Array` take
and return NumPy arrays or torch tensors (the type of the first argument comes back).

Shape legend: see `detector/structures.py`; R stands for any number of boxes here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int8, Int64, Num
from torch import Tensor

from detector.config import SelectionRule
from detector.errors import UserError
from detector.operators import batched_nms, clip_boxes_to_image, nms

Array = TypeVar("Array", np.ndarray, Tensor)

MAX_LOG_SCALE = math.log(1000.0 / 16)  # upper clamp of dw and dh (Detectron2's scale_clamp): 16 px may become 1000 px


def area(boxes: Num[Array, "*R 4"], plus_one: bool = False) -> Num[Array, "*R"]:
    """Compute areas of boxes; `plus_one` counts inclusive pixels, (x2 - x1 + 1) * (y2 - y1 + 1)."""
    extra = 1 if plus_one else 0
    return (boxes[..., 2] - boxes[..., 0] + extra) * (boxes[..., 3] - boxes[..., 1] + extra)


def pairwise_iou(
    boxes1: Num[Array, "rows 4"], boxes2: Num[Array, "columns 4"], plus_one: bool = False
) -> Float[Array, "rows columns"]:
    """Return the intersection over union of every pair; 0 where boxes do not overlap.

    `plus_one`: treat coordinates as inclusive pixel indices (VOC, RefCOCO's official evaluation, VL-BERT's labels).
    """
    is_numpy = isinstance(boxes1, np.ndarray)
    first = torch.as_tensor(boxes1)
    second = torch.as_tensor(boxes2)
    extra = 1 if plus_one else 0
    top_left = torch.maximum(first[:, None, :2], second[None, :, :2])
    bottom_right = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    sides = (bottom_right - top_left + extra).clamp(min=0)
    inter = sides[..., 0] * sides[..., 1]
    union = area(first, plus_one)[:, None] + area(second, plus_one)[None] - inter
    iou = torch.where(inter > 0, inter / union, torch.zeros_like(inter))
    return iou.numpy() if is_numpy else iou


def is_larger(boxes: Num[Array, "*R 4"], side: float = 0.0) -> Bool[Array, "*R"]:
    """Return whether both sides of a box exceed `side`."""
    return (boxes[..., 2:] - boxes[..., :2] > side).all(-1)


def is_at_least(boxes: Num[Array, "*R 4"], side: float) -> Bool[Array, "*R"]:
    """Return whether both sides of a box are at least `side` long."""
    return (boxes[..., 2:] - boxes[..., :2] >= side).all(-1)


def rescale_detections(
    boxes: Float[Tensor, "R 4"], size: Sequence[int], output_size: Sequence[int]
) -> tuple[Float[Tensor, "kept 4"], Int64[Tensor, " kept"]]:
    """Rescale detections in an image of (height, width) `size` to `output_size`; return boxes and their rows.

    The two axes are scaled separately, boxes are clipped, boxes without area dropped (Detectron2's post-processing).
    """
    scale_y = float(output_size[0]) / float(size[0])
    scale_x = float(output_size[1]) / float(size[1])
    scaled = clip_boxes_to_image(boxes * boxes.new_tensor([scale_x, scale_y, scale_x, scale_y]), output_size)
    rows = is_larger(scaled).nonzero()[:, 0]
    return scaled[rows], rows


def encode_deltas(
    boxes: Float[Tensor, "*R 4"], targets: Float[Tensor, "*R 4"], weights: Sequence[float]
) -> Float[Tensor, "*R 4"]:
    """Compute the deltas (dx, dy, dw, dh) that move `boxes` onto `targets` (R-CNN, appendix C), times `weights`.

    The order of the operations is Detectron2's, so that the results are equal bit for bit.
    """
    weights = boxes.new_tensor(weights)
    sizes = boxes[..., 2:] - boxes[..., :2]
    target_sizes = targets[..., 2:] - targets[..., :2]
    shifts = (targets[..., :2] + 0.5 * target_sizes) - (boxes[..., :2] + 0.5 * sizes)
    return torch.cat((weights[:2] * shifts / sizes, weights[2:] * torch.log(target_sizes / sizes)), dim=-1)


def decode_deltas(
    deltas: Float[Tensor, "... deltas"], boxes: Float[Tensor, "... 4"], weights: Sequence[float]
) -> Float[Tensor, "... deltas"]:
    """Move boxes by their deltas without clipping them to the image; deltas and boxes are broadcast.

    They are float32, or float64 where the deltas are. (As in Detectron2, the networks return deltas in float32 under
    mixed precision too.)

    Args:
        deltas: 4 columns, or 4 for each of several classes.
        weights: divisors of (dx, dy, dw, dh). dw and dh are clamped from above only, as in Detectron2.
    """
    deltas = deltas.to(torch.promote_types(deltas.dtype, torch.float32)).unflatten(-1, (-1, 4))
    deltas = deltas / deltas.new_tensor(weights)
    boxes = boxes.to(deltas.dtype)[..., None, :]
    sizes = boxes[..., 2:] - boxes[..., :2]
    centres = deltas[..., :2] * sizes + (boxes[..., :2] + 0.5 * sizes)
    half = 0.5 * (deltas[..., 2:].clamp(max=MAX_LOG_SCALE).exp() * sizes)
    return torch.cat((centres - half, centres + half), dim=-1).flatten(-2)


def whole_image_boxes(sizes: Int64[Tensor, "N 2"]) -> list[Float32[Tensor, "1 4"]]:
    """Return [0, 0, width - 1, height - 1] of each image of (height, width): VL-BERT's box of the whole image."""
    corner = sizes.flip(1).float() - 1
    return list(torch.cat((torch.zeros_like(corner), corner), dim=1)[:, None])


def prepend(
    first: list[Float[Tensor, "1 columns"]], rest: list[Float[Tensor, "_R columns"]]
) -> list[Float[Tensor, "_R columns"]]:
    """Put one row in front of the rows of each image."""
    return [torch.cat(pair) for pair in zip(first, rest, strict=True)]


def are_valid(boxes: Num[Tensor, "R 4"]) -> Bool[Tensor, " R"]:
    """Return whether each box is finite and has an area."""
    return torch.isfinite(boxes).all(dim=1) & is_larger(boxes)


def check_boxes(boxes: Sequence[Array], names: Sequence[str], what: str = "box") -> None:
    """Raise UserError where a box that comes from outside is not finite or has no area.

    Args:
        boxes: [R, 4] for each image. There is one synchronisation for the whole batch.
        names: the images (or files) that the boxes belong to.
        what: the word for a row of these boxes, e.g. "annotated box".
    """
    joined = torch.cat([torch.as_tensor(rows) for rows in boxes])
    is_valid = are_valid(joined)
    if bool(is_valid.all()):
        return
    for rows, valid, name in zip(boxes, is_valid.split([len(rows) for rows in boxes]), names, strict=True):
        for row in (~valid).nonzero()[:1, 0].tolist():
            values = ", ".join(f"{value:g}" for value in rows[row].tolist())
            raise UserError(
                f"{name}: {what} {row} [{values}] is not finite or has no area; boxes are [x1, y1, x2, y2], x1 < x2."
            )


IOU_LOSSES = {  # kind -> function of torchvision
    "giou": "generalized_box_iou_loss",
    "diou": "distance_box_iou_loss",
    "ciou": "complete_box_iou_loss",
}


def box_regression_loss(
    deltas: Float[Tensor, "positives 4"],
    boxes: Float[Tensor, "positives 4"],
    targets: Float[Tensor, "positives 4"],
    *,
    weights: Sequence[float],
    kind: str,
    smooth_l1_beta: float,
) -> Float[Tensor, ""]:
    """Compute the regression loss of the RPN or the box head, summed over positive boxes as in Detectron2.

    Args:
        deltas, boxes, targets: predictions, anchors or proposals, and annotated boxes of the positives.
        weights: weights of the box coder.
        kind: "smooth_l1" compares deltas; "giou", "diou" and "ciou" compare decoded boxes.
        smooth_l1_beta: where L1 becomes L2; 0 is plain L1.

    Returns:
        the sum, in float32 (float64 where the deltas are); 0 (with a gradient of 0) where there are no positives.
    """
    if kind == "smooth_l1":
        deltas = deltas.to(torch.promote_types(deltas.dtype, torch.float32))
        return F.smooth_l1_loss(deltas, encode_deltas(boxes, targets, weights), beta=smooth_l1_beta, reduction="sum")
    from torchvision import ops  # late: it imports torch's compiler

    decoded = decode_deltas(deltas, boxes, weights)
    return getattr(ops, IOU_LOSSES[kind])(decoded, targets.to(decoded.dtype), reduction="sum")


def match(
    iou: Float[Tensor, "G candidates"],
    thresholds: Sequence[float],
    labels: Sequence[int],
    allow_low_quality: bool = False,
) -> tuple[Int64[Tensor, " candidates"], Int8[Tensor, " candidates"]]:
    """Assign to each candidate the object it overlaps most, and a label by that overlap (Faster R-CNN, section 3.1.2).

    Args:
        thresholds: n rising bounds that cut the IoU range into n + 1 intervals, each closed below.
        labels: n + 1 labels, one per interval: 1 positive, 0 negative, -1 ignored.
        allow_low_quality: also make the best candidates of every object positive, however small their overlap
            (ties included). The object that they are assigned to does not change.

    Returns:
        row of the matched object (0 if there is no object), and the label.
    """
    num_objects, num_candidates = iou.shape
    if num_objects == 0 or num_candidates == 0:
        zeros = torch.zeros(num_candidates, dtype=torch.int64, device=iou.device)
        return zeros, torch.full_like(zeros, labels[0], dtype=torch.int8)
    best, matched = iou.max(dim=0)
    label = torch.full_like(matched, labels[0], dtype=torch.int8)
    for threshold, value in zip(thresholds, labels[1:], strict=True):  # no tensor of constants: a GPU would wait for it
        label.masked_fill_(best >= threshold, value)
    if allow_low_quality:
        label[(iou == iou.max(dim=1, keepdim=True).values).any(dim=0)] = 1
    return matched, label


def subsample(
    labels: Sequence[Int8[Tensor, " _candidates"]], number: int, positive_fraction: float
) -> list[tuple[Int64[Tensor, " _positives"], Int64[Tensor, " _negatives"]]]:
    """Return the positive and negative rows of each image to train on, in random order (torch's global generator).

    They are at most `number * positive_fraction` positives, filled up with negatives.

    The numbers drawn are those of Detectron2. The host waits for a GPU once, for the counts of all images. `labels`: of
    each image; 1 positive, 0 negative, -1 ignored.
    """
    counts = torch.stack([torch.stack(((label == 1).sum(), (label == 0).sum())) for label in labels]).tolist()
    sampled = []
    for label, (positives, negatives) in zip(labels, counts, strict=True):
        rows = label.argsort(descending=True, stable=True)  # positives, then negatives, each in their order
        num_positive = min(positives, int(number * positive_fraction))
        num_negative = min(negatives, number - num_positive)
        drawn_positive = torch.randperm(positives, device=label.device)[:num_positive]
        drawn_negative = torch.randperm(negatives, device=label.device)[:num_negative]
        sampled.append((rows[drawn_positive], rows[positives + drawn_negative]))
    return sampled


MAX_JOINT_NMS = 30_000  # boxes; 112 MB of GPU memory
WITHOUT_FLOAT64 = ("mps",)  # types of devices


def nms_per_image(
    boxes: Float[Tensor, "J 4"],
    scores: Float[Tensor, " J"],
    image: Int64[Tensor, " J"],
    group: Int64[Tensor, " J"],
    *,
    sizes: Sequence[tuple[int, int]],
    num_groups: int,
    threshold: float,
    limit: int,
    is_usable: Bool[Tensor, " J"] | None = None,
    jointly: bool | None = None,
) -> list[Int64[Tensor, " _kept"]]:
    """Apply non-maximum suppression to the boxes of each image and group; groups are feature maps or classes.

    On a GPU, one call serves all images (of up to `MAX_JOINT_NMS` boxes together, because its memory grows with their
    square), so the host waits twice and not twice per image; once for a single image whose boxes all take part. The
    boxes of each image and group are moved apart, in float64, where no coordinate is rounded; a device without float64
    takes the images one by one.

    Args:
        boxes: of all images, inside their image.
        image, group: which each box belongs to; groups are 0 .. `num_groups` - 1.
        sizes: (height, width) of the images.
        limit: maximum number of boxes of one image.
        is_usable: boxes that take part; None: all.
        jointly: one call for all images; None: on a GPU with float64.

    Returns:
        the kept rows of each image, best score first.
    """
    if jointly is None:
        jointly = boxes.device.type not in ("cpu", *WITHOUT_FLOAT64) and len(boxes) <= MAX_JOINT_NMS
    if not jointly:
        rows_of_images = []
        for number in range(len(sizes)):
            takes_part = image == number
            if is_usable is not None:
                takes_part = takes_part & is_usable
            rows = takes_part.nonzero()[:, 0]
            rows_of_images.append(rows[batched_nms(boxes[rows], scores[rows], group[rows], threshold)[:limit]])
        return rows_of_images
    side = max(max(size) for size in sizes) + 1
    moved = boxes.double() + ((image * num_groups + group) * side)[:, None]
    scores = scores.double()
    if is_usable is not None:  # the others come last, as boxes of one more image
        moved = torch.where(is_usable[:, None], moved, 0.0)  # a box without area overlaps nothing
        scores = scores.masked_fill(~is_usable, -torch.inf)
        image = image.masked_fill(~is_usable, len(sizes))
    rows = nms(moved, scores, threshold)
    if len(sizes) == 1 and is_usable is None:
        return [rows[:limit]]
    owner = image[rows]
    counts = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=rows.device)
    counts = counts.index_add(0, owner, torch.ones_like(owner)).tolist()
    return [part[:limit] for part in rows[owner.argsort(stable=True)].split(counts)[:-1]]


# Selection of the boxes that are used as regions

MAX_NMS_THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def select_regions(
    scores: Float[Tensor, " R"] | Float[np.ndarray, " R"], rule: SelectionRule
) -> Int64[Tensor, " kept"]:
    """Select boxes like VL-BERT: those with a high enough score, within the limits on their number.

    Returns indices in order of descending score; equal scores keep their order.
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
    number = _num_selected(confidence, rule)
    if passing == number:
        return (confidence >= rule.min_score).nonzero()[:, 0]
    return confidence.argsort(descending=True, stable=True)[:number]


def max_conf(
    boxes: Float[Tensor, "R 4"], class_probs: Float[Tensor, "R K"], nms_threshold: float = 0.3
) -> Float[Tensor, " R"]:
    """Compute each proposal's highest class probability after class-wise NMS, or 0 if every class was suppressed.

    All classes have the same boxes, so they share the overlaps, and their NMS runs in parallel, rank by rank.
    """
    _check_scores(class_probs)
    overlaps = pairwise_iou(boxes.float(), boxes.float(), plus_one=True) > nms_threshold
    is_kept = torch.ones_like(class_probs, dtype=torch.bool).T.contiguous()  # [K, R]
    classes = torch.arange(len(is_kept), device=boxes.device)
    for rows in class_probs.argsort(dim=0, descending=True, stable=True):  # the next best box of each class
        is_kept_now = is_kept[classes, rows]
        is_kept &= ~(overlaps[rows] & is_kept_now[:, None])
        is_kept[classes, rows] = is_kept_now
    return (class_probs * is_kept.T).amax(dim=1)


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
        rows = nms(boxes.float(), scores.float(), threshold)
        if len(rows) >= rule.min_regions:
            break
    return rows[: rule.max_regions], threshold


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
    number = max(int((scores >= rule.min_score).sum()), rule.min_regions)
    return number if rule.max_regions is None else min(number, rule.max_regions)


def _check_scores(scores: Tensor) -> Tensor:
    if scores.isnan().any():
        raise UserError("A score is NaN; check the detector's weights and its input.")
    return scores
