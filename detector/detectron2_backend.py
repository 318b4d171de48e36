"""Detectron2 backend: Detectron2's own modules with this project's detector interface.

The modules are called in the same order as in `GeneralizedRCNN` and `FasterRCNN`. Both backends use Detectron2's
parameter names, so their checkpoints are interchangeable.

Shape legend: see `detector/structures.py`. B = anchors on one feature map, `head_dim` = size of the box predictor's
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor, nn
from typing_extensions import override

from detector.backbones.resnet import BLOCKS_PER_STAGE
from detector.config import C4_BACKBONE, FPN_BACKBONE, OUR_KEYS, STAGES, DetectorConfig, ResNetConfig
from detector.errors import MissingPackageError, UserError
from detector.faster_rcnn import TwoStageDetector, pad_to_multiple
from detector.roi_heads import CHUNK, AttributeHead, Detections, mask_maps
from detector.rpn import configured_cell_anchors
from detector.structures import (
    DetectionTargets,
    FeatureMap,
    FeatureMaps,
    ImageBatch,
    ImageBoxes,
    ImageSizes,
    Loss,
    RoIFeatures,
)
from detector.yaml_tree import nest

try:
    from detectron2.config import CfgNode, get_cfg
    from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
    from detectron2.modeling import build_model, build_proposal_generator, build_roi_heads
    from detectron2.modeling.backbone import FPN, BasicStem, ResNet
    from detectron2.modeling.backbone.fpn import LastLevelMaxPool
    from detectron2.modeling.backbone.resnet import BasicBlock
    from detectron2.modeling.roi_heads import FastRCNNOutputLayers
    from detectron2.structures import Boxes, Instances
    from detectron2.utils.events import EventStorage
except ImportError as error:
    raise MissingPackageError(
        f"The detectron2 backend needs Detectron2, which cannot be imported here ({error}); install it with: "
        "python -m pip install 'git+https://github.com/facebookresearch/detectron2.git'"
    ) from error


# Keys that only the built-in detector supports; they follow torchvision.
BUILTIN_KEYS = (
    "MODEL.ANCHOR_GENERATOR.STRIDES",
    "MODEL.RPN.LOSS_NORMALISER",
    "MODEL.RPN.MIN_SIDE",
    "MODEL.RPN.SCORE_THRESH",
    "MODEL.ROI_HEADS.MIN_SIDE",
    "MODEL.ROI_BOX_HEAD.LEVEL_RULE",
)


class LevelOutputs(NamedTuple):
    """Output of the RPN for every anchor, one entry per feature map."""

    anchors: list[Boxes]
    objectness: list[Float32[Tensor, "N _B"]]  # logits
    deltas: list[Float32[Tensor, "N _B 4"]]


class SampledInstances(NamedTuple):
    """RoIs sampled from N images to train the box head, with Detectron2's labels."""

    boxes: list[Float32[Tensor, "_P 4"]]
    instances: list[Instances]


class OutputLayers(AttributeHead, FastRCNNOutputLayers):
    """Detectron2's box predictor with an attribute head."""


class Stem(nn.Module):
    """Detectron2's stem with another pool: "caffe_max" (no padding, output sizes rounded up) or "none"."""

    def __init__(self, conv1: nn.Module, pool: str) -> None:
        super().__init__()
        self.conv1 = conv1
        self.pool = pool

    def forward(self, x: Float[Tensor, "N 3 H W"]) -> FeatureMap:
        x = F.relu_(self.conv1(x))
        return x if self.pool == "none" else F.max_pool2d(x, kernel_size=3, stride=2, padding=0, ceil_mode=True)


class Detectron2Detector(TwoStageDetector):
    """Detectron2's Faster R-CNN: C4 (`Res5ROIHeads`) or with a box head (`StandardROIHeads`, e.g. FPN).

    `normalise_images` prepares the images, so `GeneralizedRCNN.preprocess_image` is not used.
    """

    def __init__(self, config: DetectorConfig, class_names: Sequence[str] | None = None) -> None:
        super().__init__(config, class_names)
        if config.mask_on:
            raise UserError(
                "Masks need the built-in detector; set detector.backend to builtin, or MODEL.MASK_ON: false."
            )
        if config.backbone not in (C4_BACKBONE, FPN_BACKBONE):
            raise UserError(
                f"Detectron2 does not have MODEL.BACKBONE.NAME {config.backbone}; set detector.backend to builtin."
            )
        flat = config.to_flat()  # contains `OUR_KEYS` only if they differ from their default
        unread = [key for key in BUILTIN_KEYS if key in flat]
        if config.has_box_head and config.resnet.stem_pool == "none":
            unread.append("MODEL.RESNETS.STEM_POOL none with a box head")
        if unread:
            raise UserError(f"Detectron2 does not support {unread[0]}; remove it, or set detector.backend to builtin.")
        cfg = make_cfg(config)
        self.backbone, self.proposal_generator, self.roi_heads = build_parts(cfg, config)
        apply_settings(self.backbone, self.proposal_generator, self.roi_heads, config)
        head_dim = self.roi_heads.box_predictor.cls_score.in_features
        predictor = OutputLayers(cfg, ShapeSpec(channels=head_dim, height=1, width=1))
        predictor.add_attribute_layers(head_dim, config.attributes)
        self.roi_heads.box_predictor = predictor

    @override
    def features(self, images: ImageBatch) -> FeatureMaps:
        """Return feature maps by name: `res4` for C4, `p2` .. `p6` for FPN."""
        return self.backbone(pad_to_multiple(images.pixels, max(self.backbone.size_divisibility, 1)))

    @override
    def run_rpn(self, features: FeatureMaps) -> LevelOutputs:
        rpn = self.proposal_generator
        maps = [features[name] for name in rpn.in_features]
        objectness, deltas = rpn.rpn_head(maps)
        return LevelOutputs(
            anchors=rpn.anchor_generator(maps),
            objectness=[scores.float().permute(0, 2, 3, 1).flatten(1) for scores in objectness],
            deltas=[
                rows.float()
                .unflatten(1, (-1, 4))
                .permute(0, 3, 4, 1, 2)
                .flatten(1, 3)  # [N, cell_anchors * 4, h, w] -> [N, B, 4]
                for rows in deltas
            ],
        )

    @override
    def propose(self, rpn_output: LevelOutputs, sizes: ImageSizes) -> ImageBoxes:
        proposals = self.proposal_generator.predict_proposals(*rpn_output, sizes)
        return [instances.proposal_boxes.tensor for instances in proposals]

    @override
    def rpn_losses(self, rpn_output: LevelOutputs, targets: DetectionTargets, sizes: ImageSizes) -> dict[str, Loss]:
        rpn = self.proposal_generator
        with EventStorage():  # required by Detectron2, whose modules log to it
            labels, matched = rpn.label_and_sample_anchors(rpn_output.anchors, to_instances(targets, sizes))
            losses = rpn.losses(rpn_output.anchors, rpn_output.objectness, labels, rpn_output.deltas, matched)
        return to_sums(losses, rpn.batch_size_per_image * len(sizes))

    @override
    def sample(self, proposals: ImageBoxes, targets: DetectionTargets, sizes: ImageSizes) -> SampledInstances:
        candidates = [
            Instances(size, proposal_boxes=Boxes(boxes), objectness_logits=boxes.new_zeros(len(boxes)))
            for size, boxes in zip(sizes, proposals, strict=True)
        ]
        with EventStorage():
            instances = self.roi_heads.label_and_sample_proposals(candidates, to_instances(targets, sizes))
        return SampledInstances([rows.proposal_boxes.tensor for rows in instances], instances)

    @override
    def head_losses(
        self, inputs: Float[Tensor, "J head_dim"], sampled: SampledInstances, targets: DetectionTargets
    ) -> dict[str, Loss]:
        predictor = self.roi_heads.box_predictor
        with EventStorage():
            losses = predictor.losses(predictor(inputs), sampled.instances)
        losses = to_sums(losses, len(inputs))
        if predictor.has_attributes and targets.attributes is not None:
            labels = []
            for rows, attributes in zip(sampled.instances, targets.attributes, strict=True):
                if rows.has("gt_attributes"):
                    labels.append(rows.gt_attributes)
                else:  # an image without objects
                    labels.append(attributes.new_full((len(rows), attributes.shape[1]), -1))
            classes = torch.cat([rows.gt_classes for rows in sampled.instances])
            losses["loss_attribute"] = predictor.attribute_loss(inputs, classes, torch.cat(labels))
        return losses

    def pool(self, features: FeatureMaps, rois: Float[Tensor, "J 5"]) -> Float[Tensor, "J channels S S"]:
        """Pool RoI maps. The rows of `rois` must be sorted by image."""
        heads = self.roi_heads
        maps = [features[name] for name in heads.in_features]
        maps = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in maps]  # like the built-in detector
        counts = torch.bincount(rois[:, 0].long(), minlength=len(maps[0])).tolist()
        boxes = [Boxes(rows) for rows in rois[:, 1:].split(counts)]
        pooler = heads.box_pooler if self.config.has_box_head else heads.pooler
        return pooler(maps, boxes)

    @override
    def describe(
        self,
        features: FeatureMaps,
        rois: Float[Tensor, "J 5"],
        masks: Float[Tensor, "masks rows columns"] | None = None,
    ) -> RoIFeatures:
        if not (torch.is_grad_enabled() or self.training or len(rois) <= CHUNK):
            parts = []
            for rows in torch.arange(len(rois), device=rois.device).split(CHUNK):
                chunk_masks = None if masks is None else masks[rows]
                parts.append(self.describe(features, rois[rows], chunk_masks))
            return RoIFeatures.join(parts)
        order = rois[:, 0].argsort(stable=True)
        back = order.argsort()
        maps = self.pool(features, rois[order])
        if not self.config.has_box_head:
            maps = self.roi_heads.res5(maps)
        if masks is not None:
            masks = masks[order]
        maps = mask_maps(maps, masks)
        if not self.config.has_box_head:
            mean = maps.mean(dim=(2, 3))[back]
            return RoIFeatures(mean, mean)
        outputs = {"mean": maps.mean(dim=(2, 3))}
        x = maps
        for name, layer in self.roi_heads.box_head.named_children():
            x = outputs[name] = layer(x)
        x = outputs["head"] = x.flatten(1)
        names = {"fc6": "fc_relu1", "fc7": "fc_relu2"}
        region_feature = self.config.box_head.region_feature
        region = outputs[names.get(region_feature, region_feature)]
        return RoIFeatures(region, x).apply(lambda rows: rows[back])

    @override
    def choose(
        self, predictions: tuple[Float[Tensor, "J K_plus_1"], Tensor], proposals: ImageBoxes, sizes: ImageSizes
    ) -> Detections:
        candidates = [
            Instances(size, proposal_boxes=Boxes(boxes)) for size, boxes in zip(sizes, proposals, strict=True)
        ]
        with torch.no_grad():
            detections, index = self.roi_heads.box_predictor.inference(predictions, candidates)
        return Detections(
            boxes=[rows.pred_boxes.tensor for rows in detections],
            scores=[rows.scores for rows in detections],
            classes=[rows.pred_classes for rows in detections],
            proposal_index=index,
        )


def make_cfg(config: DetectorConfig) -> CfgNode:
    """Make a Detectron2 config without the settings that it does not support; `apply_settings` applies those."""
    flat = {key: value for key, value in config.to_flat().items() if key not in OUR_KEYS}
    if not config.has_box_head:
        flat["MODEL.RESNETS.RES5_DILATION"] = 1
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode(nest(flat)))
    cfg.MODEL.DEVICE = "cpu"  # the whole model is moved later
    cfg.freeze()
    return cfg


def build_parts(cfg: CfgNode, config: DetectorConfig) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Build the backbone, proposal generator and RoI heads.

    Detectron2's `build_model` supports ResNet-18 and -34 only with RES2_OUT_CHANNELS 64; for other widths, the same
    classes are combined here.
    """
    resnet = config.resnet
    fpn = config.fpn
    if resnet.depth >= 50 or resnet.res2_out_channels == 64:
        model = build_model(cfg)
        return model.backbone, model.proposal_generator, model.roi_heads
    backbone = build_shallow_resnet(resnet)
    if config.backbone == FPN_BACKBONE:
        options = {"norm": fpn.norm, "top_block": LastLevelMaxPool(), "fuse_type": fpn.fuse_type}
        backbone = FPN(backbone, list(fpn.in_features), fpn.out_channels, **options)
    shape = backbone.output_shape()
    return backbone, build_proposal_generator(cfg, shape), build_roi_heads(cfg, shape)


def build_shallow_resnet(config: ResNetConfig) -> nn.Module:
    """Build a ResNet-18 or -34 of any width."""
    stages = []
    channels = config.stem_out_channels
    last = STAGES.index(config.out_features[-1])
    for name, num_blocks in list(zip(STAGES, BLOCKS_PER_STAGE[config.depth], strict=True))[: last + 1]:
        stage = ResNet.make_stage(
            BasicBlock,
            num_blocks,
            stride_per_block=[1 if name == "res2" else 2, *[1] * (num_blocks - 1)],
            in_channels=channels,
            out_channels=config.shapes[name].channels,
            norm=config.norm,
        )
        stages.append(stage)
        channels = config.shapes[name].channels
    stem = BasicStem(out_channels=config.stem_out_channels, norm=config.norm)
    return ResNet(stem, stages, out_features=list(config.out_features), freeze_at=config.freeze_at)


def apply_settings(backbone: nn.Module, rpn: nn.Module, heads: nn.Module, config: DetectorConfig) -> None:
    """Apply the settings that Detectron2 does not support: stem pool, dilated or frozen res5, cell anchors."""
    settings = config.resnet
    if not config.has_box_head and settings.freeze_at >= 5:
        for block in heads.res5:
            block.freeze()
    for module in (*backbone.modules(), *heads.modules()):
        if isinstance(module, FrozenBatchNorm2d):  # a frozen norm has an unused counter
            module.num_batches_tracked = None
    if settings.stem_pool != "max":
        resnet = getattr(backbone, "bottom_up", backbone)
        resnet.stem = Stem(resnet.stem.conv1, settings.stem_pool)
    if config.anchors.cell_anchors:
        cell_anchors = configured_cell_anchors(config.anchors, len(config.rpn.in_features))
        for cells, anchors in zip(rpn.anchor_generator.cell_anchors, cell_anchors, strict=True):
            cells.copy_(anchors)
    if config.has_box_head:
        return
    if settings.stem_pool == "none":
        stride = settings.shapes["res4"].stride
        rpn.anchor_generator.strides = [stride]
        heads.pooler.level_poolers[0].spatial_scale = 1.0 / stride
    if settings.res5_dilation == 2:
        for block in heads.res5:
            for conv in (block.conv1, block.conv2, block.shortcut):
                if conv is not None:
                    conv.stride = (1, 1)
            block.conv2.padding = block.conv2.dilation = (2, 2)


def to_instances(targets: DetectionTargets, sizes: ImageSizes) -> list[Instances]:
    """Convert annotated objects to Detectron2's `Instances`, one per image."""
    rows = []
    for number, (size, boxes, classes) in enumerate(zip(sizes, targets.boxes, targets.classes, strict=True)):
        fields = {} if targets.attributes is None else {"gt_attributes": targets.attributes[number]}
        rows.append(Instances(size, gt_boxes=Boxes(boxes), gt_classes=classes, **fields))
    return rows


def to_sums(losses: dict[str, Tensor], count: int) -> dict[str, Loss]:
    """Convert losses that Detectron2 divided by `count` back to sums, which processes can add up."""
    return {name: Loss(value * count, value.detach().new_tensor(float(count))) for name, value in losses.items()}
