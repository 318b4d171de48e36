"""RoI head of a C4 detector: pool RoIs from res4, run res5 on each, average, predict (`Res5ROIHeads` in Detectron2).

Shape legend
    N   images
    R   RoIs of all images; rows are [image, x1, y1, x2, y2]
    S   side of the res5 map of a RoI (7, or 14 where res5 is dilated)
    D   width of a RoI feature = channels of res5
    K   foreground classes, background is class K
    P   proposals or sampled RoIs of one image
    G   annotated objects of one image
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms, roi_pool

from detector.boxes import clip, decode_deltas, pairwise_iou
from detector.config import DetectorConfig
from detector.predictor import BoxPredictor
from detector.resnet import make_res5
from detector.roi_align import align_rois
from detector.sampling import match, subsample
from detector.structures import DetectionTargets, Loss

CHUNK = 256  # RoIs that go through res5 at a time where nothing is kept for a backward pass


class SampledRoIs(NamedTuple):
    """The RoIs the box head is trained on, and what they should be."""

    boxes: list[Tensor]  # N x float32 [P, 4]
    classes: list[Tensor]  # N x int64 [P], K = background
    matched: list[Tensor]  # N x int64 [P], row of the object a RoI overlaps most (0 if there is none)


class Detections(NamedTuple):
    """Final boxes of N images, best score first. No gradient flows through them."""

    boxes: list[Tensor]  # N x float32 [R, 4], clipped to the image
    scores: list[Tensor]  # N x float32 [R]
    classes: list[Tensor]  # N x int64 [R]
    proposal_index: list[Tensor]  # N x int64 [R], row of the proposal each box came from


def to_rois(boxes: list[Tensor]) -> Tensor:
    """N x [R, 4] -> float32 [sum of R, 5] with the image index in front."""
    counts = torch.tensor([len(rows) for rows in boxes], device=boxes[0].device)
    image = torch.repeat_interleave(torch.arange(len(boxes), device=counts.device), counts)
    joined = torch.cat(boxes).float()
    return torch.cat((image[:, None].to(joined.dtype), joined), dim=1)


def mask_maps(maps: Tensor, masks: Tensor) -> Tensor:
    """RoI maps [R, D, S, S] times masks [R, S, S]; a ValueError if the shapes do not fit."""
    if masks.shape != maps.shape[:1] + maps.shape[2:]:
        raise ValueError(
            f"RoI masks have shape {list(masks.shape)}, but the res5 maps of the boxes need "
            f"{[maps.shape[0], *maps.shape[2:]]}."
        )
    return maps * masks.to(maps.dtype)[:, None]


class Res5ROIHeads(nn.Module):
    """RoI pooling, res5 and box predictor."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config.roi_heads
        self.spatial_scale = 1.0 / config.resnet.res4_stride
        self.num_classes = config.roi_heads.num_classes
        self.res5 = make_res5(config.resnet)
        self.box_predictor = BoxPredictor(config.resnet.res5_channels, config.roi_heads, config.attributes)

    def pool(self, features: Tensor, rois: Tensor, stride: int = 1) -> Tensor:
        """Feature maps [N, channels, h, w] and rois [R, 5] -> RoI maps float32 [R, channels, S, S].

        S is the pooler's resolution, divided by `stride` where only every so many cells are asked for.
        """
        config = self.config
        # pooling coordinates need more than bfloat16's 8 bits; float64 stays
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        rois = rois.to(features.dtype)
        if config.pooler_type == "ROIPool":
            side = (config.pooler_resolution, config.pooler_resolution)
            maps = roi_pool(features, rois, side, self.spatial_scale)[:, :, ::stride, ::stride]
            return maps.contiguous(memory_format=torch.channels_last)
        return align_rois(
            features,
            rois,
            config.pooler_resolution,
            self.spatial_scale,
            sampling_ratio=config.pooler_sampling_ratio,
            aligned=config.pooler_type == "ROIAlignV2",
            stride=stride,
        )

    def res5_map(self, features: Tensor, rois: Tensor) -> Tensor:
        """[R, D, S, S], one res5 map per RoI of the res4 maps [N, channels, h, w]."""
        cells = len(features) * features.shape[2] * features.shape[3]
        if self.config.pooler_type != "ROIPool" and cells < len(rois) * self.config.pooler_resolution**2:
            return self.res5(features, lambda maps, stride: self.pool(maps, rois, stride))
        return self.res5(self.pool(features, rois))

    def describe(self, features: Tensor, rois: Tensor, masks: Tensor | None = None) -> Tensor:
        """Pooled features [R, D]; `masks` float [R, S, S] multiply the res5 maps before the mean over S * S cells.

        In evaluation without gradients only `CHUNK` RoIs are in memory at a time, in the order of their images.
        """
        fits = masks is None or len(masks) == len(rois)
        if torch.is_grad_enabled() or self.training or len(rois) <= CHUNK or not fits:
            return self._describe(features, rois, masks)
        order = rois[:, 0].argsort(stable=True)
        parts = []
        for rows in order.split(CHUNK):
            chunk = rois[rows]
            first, last = int(chunk[0, 0]), int(chunk[-1, 0])
            chunk[:, 0] -= first
            parts.append(self._describe(features[first : last + 1], chunk, None if masks is None else masks[rows]))
        return torch.cat(parts)[order.argsort()]

    def _describe(self, features: Tensor, rois: Tensor, masks: Tensor | None) -> Tensor:
        maps = self.res5_map(features, rois)
        if masks is not None:
            maps = mask_maps(maps, masks)
        return maps.mean(dim=(2, 3))

    @torch.no_grad()
    def label_and_sample(self, proposals: list[Tensor], targets: DetectionTargets) -> SampledRoIs:
        """Match proposals (N x [P, 4]) with the annotated objects and keep a random mix of fore- and background.

        With PROPOSAL_APPEND_GT the annotated boxes join the proposals first.
        """
        sampled = SampledRoIs([], [], [])
        for boxes, objects, object_classes in zip(proposals, targets.boxes, targets.classes, strict=True):
            if self.config.append_objects:
                boxes = torch.cat((boxes, objects))
            matched, label = match(pairwise_iou(objects, boxes), self.config.iou_thresholds, self.config.iou_labels)
            if len(objects):
                classes = object_classes[matched].masked_fill(label == 0, self.num_classes)
                classes = classes.masked_fill(label == -1, -1)
            else:
                classes = torch.full_like(matched, self.num_classes)
            positive, negative = subsample(
                (classes >= 0) & (classes < self.num_classes),
                classes == self.num_classes,
                self.config.batch_size_per_image,
                self.config.positive_fraction,
            )
            rows = torch.cat((positive, negative))
            sampled.boxes.append(boxes[rows])
            sampled.classes.append(classes[rows])
            sampled.matched.append(matched[rows])
        return sampled

    def losses(self, features: Tensor, sampled: SampledRoIs, targets: DetectionTargets) -> dict[str, Loss]:
        """Losses of the sampled RoIs of all images; features [R, D]."""
        logits, deltas = self.box_predictor(features)
        classes = torch.cat(sampled.classes)
        losses = self.box_predictor.box_losses(
            logits, deltas, torch.cat(sampled.boxes), classes, _take_matched(targets.boxes, sampled)
        )
        if self.box_predictor.has_attributes and targets.attributes is not None:
            labels = _take_matched(targets.attributes, sampled)
            losses["loss_attribute"] = self.box_predictor.attribute_loss(features, classes, labels)
        return losses

    @torch.no_grad()
    def detect(
        self, logits: Tensor, deltas: Tensor, proposals: list[Tensor], sizes: list[tuple[int, int]]
    ) -> Detections:
        """Detectron2's test-time rule: class scores above SCORE_THRESH_TEST, NMS within each class, best k.

        Args:
            logits: [R, K + 1] of all images' proposals, deltas: [R, 4 * K] or [R, 4].
            proposals: N x [P, 4].
            sizes: N x (height, width) without padding; boxes are clipped to it.
        """
        counts = [len(boxes) for boxes in proposals]
        decoded = decode_deltas(deltas, torch.cat(proposals), self.config.box_weights)
        probs = logits.softmax(dim=1)
        result = Detections([], [], [], [])
        for boxes, scores, size in zip(decoded.split(counts), probs.split(counts), sizes, strict=True):
            finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores).all(dim=1)
            candidate = (scores[:, :-1] > self.config.score_thresh) & finite[:, None]
            proposal, category = candidate.nonzero(as_tuple=True)
            column = torch.zeros_like(category) if self.config.class_agnostic_boxes else category
            boxes = clip(boxes.unflatten(1, (-1, 4))[proposal, column], size)
            scores = scores[proposal, category]
            kept = batched_nms(boxes, scores, category, self.config.nms_thresh)[: self.config.detections_per_image]
            result.boxes.append(boxes[kept])
            result.scores.append(scores[kept])
            result.classes.append(category[kept])
            result.proposal_index.append(proposal[kept])
        return result


def _take_matched(values: list[Tensor], sampled: SampledRoIs) -> Tensor:
    """Rows of N x [G, ...] that belong to the matched objects, joined; zeros for images without objects."""
    rows = []
    for value, matched in zip(values, sampled.matched, strict=True):
        empty = value.new_zeros((len(matched), *value.shape[1:]))
        rows.append(value[matched] if len(value) else empty)
    return torch.cat(rows)
