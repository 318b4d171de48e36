"""RoI heads of both architectures, named as in Detectron2: pool RoIs, describe each, predict, sample, detect.

Shape legend
    J  RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    R  regions (candidate boxes) of one image
    P  proposals or sampled RoIs of one image
    G  annotated objects of one image
    S  side of a RoI map
    D  width of a region feature
    K  foreground classes; K is also the label of the background

`Res5ROIHeads` (C4) run res5 on maps pooled from res4 and average: D is the number of channels of res5; its maps have
S = 7, or 14 where it is dilated. `StandardROIHeads` run a box head on maps pooled from the levels of an FPN.
"""

from __future__ import annotations

import abc
import dataclasses

import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor, nn
from torchvision.ops import batched_nms, clip_boxes_to_image

from detector.box_head import BoxHead
from detector.box_predictor import BoxPredictor
from detector.boxes import decode_deltas, is_at_least, pairwise_iou
from detector.detector_config import DetectorConfig
from detector.errors import UserError
from detector.matching import match, subsample
from detector.resnet import make_res5
from detector.roi_features import RoIFeatures
from detector.roi_pooler import RoIPooler
from detector.structures import (
    DetectionTargets,
    FeatureMap,
    FeatureMaps,
    ImageBoxes,
    ImageSizes,
    LevelMaps,
    Loss,
    PerImage,
)

CHUNK = 256  # RoIs that go through the head at a time where nothing is kept for a backward pass


@dataclasses.dataclass
class SampledRoIs(PerImage):
    """The RoIs of N images that the box head is trained on, and their targets."""

    classes: list[Int64[Tensor, " _P"]]  # K = background
    matched: list[Int64[Tensor, " _P"]]  # row of the object that a RoI overlaps most (0 if there is no object)


@dataclasses.dataclass
class Detections(PerImage):
    """Final boxes of N images, clipped to the image, best score first. No gradient flows through them."""

    scores: list[Float32[Tensor, " _R"]]
    classes: list[Int64[Tensor, " _R"]]
    proposal_index: list[Int64[Tensor, " _R"]]  # row of the proposal that each box came from


def mask_maps(maps: Float[Tensor, "J D S S"], masks: Float[Tensor, "masks rows columns"]) -> Float[Tensor, "J D S S"]:
    """RoI maps times their masks.

    Raises:
        UserError: the masks are not [J, S, S].
    """
    if masks.shape != maps.shape[:1] + maps.shape[2:]:
        raise UserError(
            f"RoI masks have shape {list(masks.shape)}, but the RoI maps of the boxes need "
            f"{[maps.shape[0], *maps.shape[2:]]}."
        )
    return maps * masks.to(maps.dtype)[:, None]


class ROIHeads(nn.Module, abc.ABC):
    """What both kinds of heads share: all but the way from feature maps to the features of a RoI."""

    box_predictor: BoxPredictor

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config.roi_heads
        self.num_classes = config.roi_heads.num_classes
        self.in_features = config.roi_heads.in_features
        self.pool = RoIPooler(config)

    @abc.abstractmethod
    def _describe(
        self,
        maps: LevelMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None,
    ) -> RoIFeatures:
        """`describe` without chunks, from the maps of IN_FEATURES."""

    def describe(
        self,
        features: FeatureMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None = None,
    ) -> RoIFeatures:
        """Features of RoIs; `masks` [J, S, S] multiply the last RoI maps: the output of res5 before its mean over
        S * S cells, or the pooled maps before the box head.

        In evaluation without gradients only `CHUNK` RoIs are in memory at a time, in the order of their images.

        Raises:
            UserError: see `mask_maps`.
        """
        maps = [features[name] for name in self.in_features]
        fits = masks is None or len(masks) == len(rois)
        if torch.is_grad_enabled() or self.training or len(rois) <= CHUNK or not fits:
            return self._describe(maps, rois, masks)
        order = rois[:, 0].argsort(stable=True)
        parts = []
        for rows in order.split(CHUNK):
            chunk = rois[rows]
            first, last = int(chunk[0, 0]), int(chunk[-1, 0])
            chunk[:, 0] -= first
            images = [level[first : last + 1] for level in maps]
            parts.append(self._describe(images, chunk, None if masks is None else masks[rows]))
        back = order.argsort()
        return RoIFeatures.join(parts).apply(lambda joined: joined[back])

    @torch.no_grad()
    def label_and_sample(self, proposals: ImageBoxes, targets: DetectionTargets) -> SampledRoIs:
        """Match proposals with the annotated objects and keep a random mix of foreground and background.

        With PROPOSAL_APPEND_GT the annotated boxes join the proposals first.
        """
        images = zip(proposals, targets.boxes, targets.classes, strict=True)
        return SampledRoIs(*map(list, zip(*(self._sample_one(*image) for image in images), strict=True)))

    def _sample_one(
        self, boxes: Float[Tensor, "P 4"], objects: Float[Tensor, "G 4"], object_classes: Int64[Tensor, " G"]
    ) -> tuple[Float[Tensor, "sampled 4"], Int64[Tensor, " sampled"], Int64[Tensor, " sampled"]]:
        """`label_and_sample` of one image: boxes, classes, rows of the matched objects."""
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
        return boxes[rows], classes[rows], matched[rows]

    def losses(
        self, features: Float[Tensor, "J head_dim"], sampled: SampledRoIs, targets: DetectionTargets
    ) -> dict[str, Loss]:
        """Losses of the sampled RoIs of all images, from the inputs of the box predictor."""
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
        self,
        logits: Float[Tensor, "J K_plus_1"],
        deltas: Float[Tensor, "J deltas"],
        proposals: ImageBoxes,
        sizes: ImageSizes,
    ) -> Detections:
        """Detectron2's test-time rule: class scores above SCORE_THRESH_TEST, NMS within each class, the best boxes.

        Args:
            logits: of the proposals of all images, joined.
            deltas: 4 * K columns, or 4 if class-agnostic.
            sizes: N (height, width) without padding; boxes are clipped to it.
        """
        counts = [len(boxes) for boxes in proposals]
        decoded = decode_deltas(deltas, torch.cat(proposals), self.config.box_weights)
        images = zip(decoded.split(counts), logits.softmax(dim=1).split(counts), sizes, strict=True)
        return Detections(*map(list, zip(*(self._detect_one(*image) for image in images), strict=True)))

    def _detect_one(
        self, boxes: Float[Tensor, "P deltas"], scores: Float[Tensor, "P K_plus_1"], size: tuple[int, int]
    ) -> tuple[Float[Tensor, "R 4"], Float[Tensor, " R"], Int64[Tensor, " R"], Int64[Tensor, " R"]]:
        """`detect` in one image: boxes, scores, classes, rows of the proposals."""
        finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores).all(dim=1)
        candidate = (scores[:, :-1] > self.config.score_thresh) & finite[:, None]
        proposal, category = candidate.nonzero(as_tuple=True)
        column = torch.zeros_like(category) if self.config.class_agnostic_boxes else category
        boxes = clip_boxes_to_image(boxes.unflatten(1, (-1, 4))[proposal, column], size)
        scores = scores[proposal, category]
        if self.config.min_side > 0:
            large = is_at_least(boxes, self.config.min_side).nonzero()[:, 0]
            boxes, scores, proposal, category = boxes[large], scores[large], proposal[large], category[large]
        kept = batched_nms(boxes, scores, category, self.config.nms_thresh)[: self.config.detections_per_image]
        return boxes[kept], scores[kept], category[kept], proposal[kept]


class Res5ROIHeads(ROIHeads):
    """RoI pooling, res5 and box predictor (C4)."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        self.res5 = make_res5(config.resnet)
        self.box_predictor = BoxPredictor(config.feature_dim, config.roi_heads, config.attributes)

    def res5_map(self, features: FeatureMap, rois: Float[Tensor, "J 5"]) -> Float[Tensor, "J D S S"]:
        """One res5 map per RoI of the res4 maps."""
        cells = len(features) * features.shape[2] * features.shape[3]
        if self.config.pooler_type != "ROIPool" and cells < len(rois) * self.config.pooler_resolution**2:
            return self.res5(features, lambda maps, step: self.pool([maps], rois, step))
        return self.res5(self.pool([features], rois))

    def _describe(
        self,
        maps: LevelMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None,
    ) -> RoIFeatures:
        last = self.res5_map(maps[0], rois)
        if masks is not None:
            last = mask_maps(last, masks)
        mean = last.mean(dim=(2, 3))
        return RoIFeatures(mean, mean)


class StandardROIHeads(ROIHeads):
    """RoI pooling from one or several levels, box head and box predictor (FPN)."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        channels = config.map_shapes[self.in_features[0]].channels
        self.box_head = BoxHead(config.box_head, channels, config.roi_heads.pooler_resolution)
        self.box_predictor = BoxPredictor(self.box_head.predictor_dim, config.roi_heads, config.attributes)

    def _describe(
        self,
        maps: LevelMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None,
    ) -> RoIFeatures:
        pooled = self.pool(maps, rois)
        if masks is not None:
            pooled = mask_maps(pooled, masks)
        return self.box_head(pooled)


def _take_matched(values: list[Shaped[Tensor, "_G ..."]], sampled: SampledRoIs) -> Shaped[Tensor, "J ..."]:
    """The values of the matched objects, joined; zeros for images without objects."""
    rows = []
    for value, matched in zip(values, sampled.matched, strict=True):
        empty = value.new_zeros((len(matched), *value.shape[1:]))
        rows.append(value[matched] if len(value) else empty)
    return torch.cat(rows)
