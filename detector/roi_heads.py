"""RoI heads of both architectures, named as in Detectron2: pool RoIs, describe each, predict, sample, detect, mask.

Shape legend: see `detector/structures.py`.

`Res5ROIHeads` (C4) run res5 on maps pooled from res4 and average: D is the number of channels of res5; its maps have
S = 7, or 14 where it is dilated. `StandardROIHeads` run a box head on maps pooled from the levels of an FPN.
"""

from __future__ import annotations

import abc
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor, nn
from typing_extensions import override

from detector.backbones.layers import ConvNorm
from detector.backbones.resnet import Res5
from detector.boxes import (
    box_regression_loss,
    decode_deltas,
    is_at_least,
    match,
    nms_per_image,
    pairwise_iou,
    subsample,
)
from detector.config import AttributeConfig, BoxHeadConfig, DetectorConfig, ROIHeadsConfig
from detector.errors import UserError
from detector.mask_head import MaskHead
from detector.roi_pooler import RoIPooler, to_rois
from detector.structures import (
    DetectionTargets,
    FeatureMap,
    FeatureMaps,
    ImageBoxes,
    ImageSizes,
    LevelMaps,
    Loss,
    RoIFeatures,
)


class BoxHead(nn.Module):
    """NUM_CONV 3x3 convolutions (with norm and ReLU), then NUM_FC fully connected layers (with ReLU).

    Named as Detectron2's `FastRCNNConvFCHead`.
    """

    def __init__(self, config: BoxHeadConfig, in_channels: int, side: int) -> None:
        """Create the layers; `in_channels` and `side` are those of the RoI maps."""
        super().__init__()
        self.region_feature = config.region_feature
        self.convs = [f"conv{number}" for number in range(1, config.num_conv + 1)]
        self.fcs = [f"fc{number}" for number in range(1, config.num_fc + 1)]
        channels = in_channels
        for name in self.convs:
            self.add_module(name, ConvNorm(channels, config.conv_dim, 3, norm=config.norm, padding=1))
            channels = config.conv_dim
        width = channels * side**2
        for name in self.fcs:
            layer = nn.Linear(width, config.fc_dim)
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)
            self.add_module(name, layer)
            width = config.fc_dim
        self.predictor_dim = width

    def forward(self, maps: Float[Tensor, "J channels S S"]) -> RoIFeatures:
        x = maps
        if self.convs:
            x = x.contiguous(memory_format=torch.channels_last)
        for name in self.convs:
            x = F.relu(getattr(self, name)(x))
        x = x.flatten(1)
        outputs = []
        for name in self.fcs:
            x = F.relu(getattr(self, name)(x))
            outputs.append(x)
        if self.region_feature == "mean":
            return RoIFeatures(maps.mean(dim=(2, 3)), x)
        if not outputs:
            return RoIFeatures(x, x)
        chosen = {"fc6": 0, "fc7": 1, "head": -1}[self.region_feature]
        return RoIFeatures(outputs[chosen], x)


class AttributeHead(nn.Module):
    """Adds bottom-up attention's attribute head (Anderson et al., section 3.1) to a box predictor of either backend.

    The class embedding (`cls_embedding`) is concatenated to the feature; a hidden layer (`fc_attr`) and the attribute
    scores (`attr_score`) follow.
    """

    num_classes: int  # K
    cls_score: nn.Linear
    attribute_config: AttributeConfig

    def class_logits(self, features: Float[Tensor, "J head_dim"]) -> Float32[Tensor, "J K_plus_1"]:
        return self.cls_score(features).float()

    def add_attribute_layers(self, feature_dim: int, config: AttributeConfig) -> None:
        """Create the layers for features of width `feature_dim`, unless the config has no attributes."""
        self.attribute_config = config
        if self.has_attributes:
            self.cls_embedding = nn.Embedding(self.num_classes + 1, config.embedding_dim)
            self.fc_attr = nn.Linear(feature_dim + config.embedding_dim, config.hidden_dim)
            self.attr_score = nn.Linear(config.hidden_dim, config.num_classes + 1)
            nn.init.normal_(self.cls_embedding.weight, std=0.01)
            nn.init.normal_(self.attr_score.weight, std=0.01)
            nn.init.zeros_(self.attr_score.bias)

    @property
    def has_attributes(self) -> bool:
        return self.attribute_config.num_classes > 0

    def attributes(
        self, features: Float[Tensor, "J head_dim"], classes: Int64[Tensor, " J"]
    ) -> Float32[Tensor, "J A_plus_1"]:
        """Compute attribute logits of features for the classes 0 .. K (K = background)."""
        joined = torch.cat((features, self.cls_embedding(classes).to(features.dtype)), dim=1)
        return self.attr_score(F.relu(self.fc_attr(joined))).float()

    def attribute_loss(
        self, features: Float[Tensor, "J head_dim"], classes: Int64[Tensor, " J"], labels: Int64[Tensor, "J T"]
    ) -> Loss:
        """Average the cross entropy over an object's labels, and sum it over the foreground RoIs that have any.

        Args:
            classes: target class, K = background; its embedding is the head's second input.
            labels: attributes of the object that a RoI is matched with, -1 = none in this slot.
        """
        labelled = ((classes < self.num_classes) & (labels >= 0).any(dim=1)).nonzero()[:, 0]
        labels = labels[labelled]
        log_probs = self.attributes(features[labelled], classes[labelled]).log_softmax(dim=1)
        is_label = labels >= 0
        picked = -log_probs.gather(1, labels.clamp(min=0)) * is_label
        total = (picked.sum(dim=1) / is_label.sum(dim=1)).sum() * self.attribute_config.loss_weight
        return Loss(total, total.detach().new_tensor(float(len(labelled))))


class BoxPredictor(AttributeHead):
    """Linear layers on the feature of a RoI (Fast R-CNN, section 2), named as in Detectron2."""

    def __init__(self, feature_dim: int, config: ROIHeadsConfig, attributes: AttributeConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.cls_score = nn.Linear(feature_dim, config.num_classes + 1)
        num_boxes = 1 if config.class_agnostic_boxes else config.num_classes
        self.bbox_pred = nn.Linear(feature_dim, 4 * num_boxes)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)
        self.add_attribute_layers(feature_dim, attributes)

    def forward(
        self, features: Float[Tensor, "J head_dim"]
    ) -> tuple[Float32[Tensor, "J K_plus_1"], Float32[Tensor, "J deltas"]]:
        """Return class logits, and box deltas in 4 * K columns (or 4 if class-agnostic)."""
        return self.class_logits(features), self.bbox_pred(features).float()


CHUNK = 256  # RoIs that go through the head at a time if no gradient is needed


class SampledRoIs(NamedTuple):
    """The RoIs of N images that the box head is trained on, and their targets."""

    boxes: list[Float[Tensor, "_P 4"]]
    classes: list[Int64[Tensor, " _P"]]  # K = background
    matched: list[Int64[Tensor, " _P"]]  # row of the object that a RoI overlaps most (0 if there is no object)
    foreground: list[int]  # number of foreground RoIs, which come first


class Detections(NamedTuple):
    """Final boxes of N images, clipped to the image, best score first. No gradient flows through them."""

    boxes: list[Float[Tensor, "_R 4"]]
    scores: list[Float32[Tensor, " _R"]]
    classes: list[Int64[Tensor, " _R"]]
    proposal_index: list[Int64[Tensor, " _R"]]  # row of the proposal that each box came from


def mask_maps(
    maps: Float[Tensor, "J D S S"], masks: Float[Tensor, "masks rows columns"] | None
) -> Float[Tensor, "J D S S"]:
    """Multiply RoI maps by their masks [J, S, S]; they are unchanged without masks."""
    if masks is None:
        return maps
    if masks.shape != maps[:, 0].shape:
        raise UserError(f"RoI masks have shape {list(masks.shape)}; these boxes need {list(maps[:, 0].shape)}.")
    return maps * masks.to(maps.dtype)[:, None]


class ROIHeads(nn.Module, abc.ABC):
    """What both kinds of heads share: all but the way from feature maps to the features of a RoI."""

    box_predictor: BoxPredictor
    mask_head: MaskHead  # only with MODEL.MASK_ON

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config.roi_heads
        self.num_classes = config.roi_heads.num_classes
        self.in_features = config.roi_heads.in_features
        self.pool = RoIPooler(config)

    @abc.abstractmethod
    def _mask_maps(self, maps: LevelMaps, rois: Float[Tensor, "J 5"]) -> Float[Tensor, "J channels S S"]:
        """Return the RoI maps that the mask head reads, from the maps of IN_FEATURES."""

    def mask_logits(
        self, features: FeatureMaps, rois: Float[Tensor, "J 5"], classes: Int64[Tensor, " J"]
    ) -> Float32[Tensor, "J side side"]:
        """Return the mask of each RoI for its class, as logits; only with MODEL.MASK_ON."""
        maps = [features[name] for name in self.in_features]
        return self.mask_head(self._mask_maps(maps, rois), classes).float()

    @abc.abstractmethod
    def _describe(
        self, maps: LevelMaps, rois: Float[Tensor, "J 5"], masks: Float[Tensor, "masks rows columns"] | None
    ) -> RoIFeatures:
        """Compute the features of RoIs, all at once, from the maps of IN_FEATURES; see `describe`."""

    def describe(
        self,
        features: FeatureMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None = None,
    ) -> RoIFeatures:
        """Return the features of RoIs.

        `masks` [J, S, S] multiply the last RoI maps: the output of res5 before its mean over S * S cells, or the pooled
        maps before the box head.
        In evaluation without gradients only `CHUNK` RoIs are in memory at a time, in the order of their images.
        """
        maps = [features[name] for name in self.in_features]
        if torch.is_grad_enabled() or self.training or len(rois) <= CHUNK:
            return self._describe(maps, rois, masks)
        order = rois[:, 0].argsort(stable=True)
        image = rois[order, 0].cpu()  # a GPU waits once, and not for each chunk
        parts = []
        for rows, numbers in zip(order.split(CHUNK), image.split(CHUNK), strict=True):
            chunk = rois[rows]
            first = int(numbers[0])
            last = int(numbers[-1])
            chunk[:, 0] -= first
            images = [level[first : last + 1] for level in maps]
            chunk_masks = None if masks is None else masks[rows]
            parts.append(self._describe(images, chunk, chunk_masks))
        back = order.argsort()
        return RoIFeatures.join(parts).apply(lambda joined: joined[back])

    @torch.no_grad()
    def label_and_sample(self, proposals: ImageBoxes, targets: DetectionTargets) -> SampledRoIs:
        """Match proposals with the annotated objects and keep a random mix of foreground and background.

        With PROPOSAL_APPEND_GT the annotated boxes join the proposals first.
        """
        images = []
        labels = []
        for boxes, objects, object_classes in zip(proposals, targets.boxes, targets.classes, strict=True):
            if self.config.append_objects:
                boxes = torch.cat((boxes, objects))
            matched, label = match(pairwise_iou(objects, boxes), self.config.iou_thresholds, self.config.iou_labels)
            if len(objects):
                classes = object_classes[matched].masked_fill(label == 0, self.num_classes)
            else:
                classes = torch.full_like(matched, self.num_classes)
                label = torch.zeros_like(label)
            labels.append(label)
            images.append((boxes, classes, matched))
        sampled = subsample(labels, self.config.batch_size_per_image, self.config.positive_fraction)
        rows = [torch.cat(pair) for pair in sampled]
        columns = []
        for values_of_images in zip(*images, strict=True):  # boxes, classes, matched objects
            columns.append([values[index] for values, index in zip(values_of_images, rows, strict=True)])
        return SampledRoIs(*columns, [len(positive) for positive, _ in sampled])

    def losses(
        self, features: Float[Tensor, "J head_dim"], sampled: SampledRoIs, targets: DetectionTargets
    ) -> dict[str, Loss]:
        """Compute losses of the sampled RoIs of all images, divided by their number, from the predictor's inputs."""
        config = self.config
        predictor = self.box_predictor
        logits, deltas = predictor(features)
        classes = torch.cat(sampled.classes)
        starts = itertools.accumulate((len(rows) for rows in sampled.classes[:-1]), initial=0)
        pairs = zip(starts, sampled.foreground, strict=True)  # known to the host, so a GPU need not be asked
        foreground = torch.cat([torch.arange(first, first + n, device=classes.device) for first, n in pairs])
        column = torch.zeros_like(foreground) if config.class_agnostic_boxes else classes[foreground]
        reg = box_regression_loss(
            deltas.unflatten(1, (-1, 4))[foreground, column],
            torch.cat(sampled.boxes)[foreground],
            _take_matched(targets.boxes, sampled)[foreground],
            weights=config.box_weights,
            kind=config.box_loss_type,
            smooth_l1_beta=config.smooth_l1_beta,
        )
        count = reg.new_tensor(float(len(classes)))
        losses = {
            "loss_cls": Loss(F.cross_entropy(logits, classes, reduction="sum"), count),
            "loss_box_reg": Loss(reg * config.box_loss_weight, count),
        }
        if predictor.has_attributes and targets.attributes is not None:
            labels = _take_matched(targets.attributes, sampled)
            losses["loss_attribute"] = predictor.attribute_loss(features, classes, labels)
        return losses

    @torch.no_grad()
    def detect(
        self,
        logits: Float[Tensor, "J K_plus_1"],
        deltas: Float[Tensor, "J deltas"],
        proposals: ImageBoxes,
        sizes: ImageSizes,
    ) -> Detections:
        """Choose boxes as Detectron2 does: class scores above SCORE_THRESH_TEST, NMS within each class, the best boxes.

        `logits` and `deltas` are of the proposals of all images, joined.
        """
        decoded = decode_deltas(deltas, torch.cat(proposals), self.config.box_weights).unflatten(1, (-1, 4))
        probabilities = logits.softmax(dim=1)
        is_finite = torch.isfinite(decoded).flatten(1).all(dim=1) & torch.isfinite(probabilities).all(dim=1)
        rois, classes = ((probabilities[:, :-1] > self.config.score_thresh) & is_finite[:, None]).nonzero(as_tuple=True)
        column = torch.zeros_like(classes) if self.config.class_agnostic_boxes else classes
        image = to_rois(proposals)[:, 0].long()[rois]
        limits = torch.tensor(sizes, dtype=decoded.dtype).flip(1).to(decoded.device)[image]  # (width, height)
        boxes = decoded[rois, column].clamp(min=0).minimum(limits.repeat(1, 2))
        scores = probabilities[rois, classes]
        is_usable = is_at_least(boxes, self.config.min_side) if self.config.min_side > 0 else None
        rows_of_images = nms_per_image(
            boxes,
            scores,
            image,
            classes,
            sizes=sizes,
            num_groups=self.num_classes,
            threshold=self.config.nms_thresh,
            limit=self.config.detections_per_image,
            is_usable=is_usable,
        )
        starts = [sum(len(rows) for rows in proposals[:number]) for number in range(len(proposals))]
        return Detections(
            [boxes[rows] for rows in rows_of_images],
            [scores[rows] for rows in rows_of_images],
            [classes[rows] for rows in rows_of_images],
            [rois[rows] - start for rows, start in zip(rows_of_images, starts, strict=True)],
        )


class Res5ROIHeads(ROIHeads):
    """RoI pooling, res5 and box predictor (C4)."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        self.res5 = Res5(config.resnet)
        self.box_predictor = BoxPredictor(config.feature_dim, config.roi_heads, config.attributes)
        if config.mask_on:
            self.mask_head = MaskHead(config.mask_head, config.feature_dim, self.num_classes)

    def res5_map(self, features: FeatureMap, rois: Float[Tensor, "J 5"]) -> Float[Tensor, "J D S S"]:
        cells = len(features) * features.shape[2] * features.shape[3]
        if self.config.pooler_type != "ROIPool" and cells < len(rois) * self.config.pooler_resolution**2:
            return self.res5(features, lambda maps, step: self.pool([maps], rois, step))
        return self.res5(self.pool([features], rois))

    @override
    def _mask_maps(self, maps: LevelMaps, rois: Float[Tensor, "J 5"]) -> Float[Tensor, "J D S S"]:
        return self.res5_map(maps[0], rois)

    @override
    def _describe(
        self, maps: LevelMaps, rois: Float[Tensor, "J 5"], masks: Float[Tensor, "masks rows columns"] | None
    ) -> RoIFeatures:
        mean = mask_maps(self.res5_map(maps[0], rois), masks).mean(dim=(2, 3))
        return RoIFeatures(mean, mean)


class StandardROIHeads(ROIHeads):
    """RoI pooling from one or several levels, box head and box predictor (FPN)."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        channels = config.map_shapes[self.in_features[0]].channels
        self.box_head = BoxHead(config.box_head, channels, config.roi_heads.pooler_resolution)
        self.box_predictor = BoxPredictor(self.box_head.predictor_dim, config.roi_heads, config.attributes)
        if config.mask_on:
            self.mask_pool = RoIPooler(config, config.mask_head)
            self.mask_head = MaskHead(config.mask_head, channels, self.num_classes)

    @override
    def _mask_maps(self, maps: LevelMaps, rois: Float[Tensor, "J 5"]) -> Float[Tensor, "J channels S S"]:
        return self.mask_pool(maps, rois)

    @override
    def _describe(
        self, maps: LevelMaps, rois: Float[Tensor, "J 5"], masks: Float[Tensor, "masks rows columns"] | None
    ) -> RoIFeatures:
        return self.box_head(mask_maps(self.pool(maps, rois), masks))


def _take_matched(values: list[Shaped[Tensor, "_G ..."]], sampled: SampledRoIs) -> Shaped[Tensor, "J ..."]:
    """Join the values of the matched objects; zeros for images without objects."""
    matched_values = []
    for rows, index in zip(values, sampled.matched, strict=True):
        if len(rows):
            matched_values.append(rows[index])
        else:
            matched_values.append(rows.new_zeros((len(index), *rows.shape[1:])))
    return torch.cat(matched_values)
