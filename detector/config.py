"""Config of the built-in detector, read from Detectron2 YAML files. This module does not import torch.

Each field has Detectron2's key and default value. There are four kinds of keys:

- supported: the fields of the classes below;
- additional: supported keys that Detectron2 does not have (`OUR_KEYS`), written only if they differ from their default;
- fixed: Detectron2 keys for which only one value is supported (`FIXED`); any other value raises an error;
- ignored: keys that do not affect the network, such as those of training (`IGNORED`). The keys of FPN, of the box head
  (`StandardROIHeads`) or of the mask head are also ignored if the model does not have that part.

Any other key raises an error. MODEL.BACKBONE.NAME (a key of `BACKBONES`) and MODEL.ROI_HEADS.NAME (res5 on RoI maps, or
a box head) determine the architecture.
"""

from __future__ import annotations

import abc
import ast
import difflib
import operator
import pkgutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import yaml
from msgspec import UNSET, Meta, Struct, UnsetType, field
from typing_extensions import override

from detector.errors import UserError
from detector.yaml_tree import flatten, load_tree, merge_bases, nest

# Keys with a single supported value.
FIXED: dict[str, Any] = {
    "VERSION": 2,
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
    "MODEL.LOAD_PROPOSALS": False,
    "MODEL.KEYPOINT_ON": False,
    "MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False, False, False, False],
    "MODEL.PROPOSAL_GENERATOR.NAME": "RPN",
    "MODEL.ANCHOR_GENERATOR.NAME": "DefaultAnchorGenerator",
    "MODEL.RPN.HEAD_NAME": "StandardRPNHead",
    "MODEL.ROI_BOX_HEAD.USE_FED_LOSS": False,
    "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": False,
    "INPUT.CROP.ENABLED": False,
    "TEST.AUG.ENABLED": False,
}

# What is supported instead, for keys that published files often set to other values.
SUPPORTED: dict[str, str] = {
    "MODEL.META_ARCHITECTURE": "only two-stage box detectors are supported: GeneralizedRCNN with C4, DC5 or FPN",
    "MODEL.KEYPOINT_ON": "only boxes are supported; set MODEL.KEYPOINT_ON: False to load the box part",
}

# Keys, or prefixes of keys, that do not affect the model's output.
IGNORED: tuple[str, ...] = (
    "CUDNN_BENCHMARK",
    "DATALOADER.",
    "DATASETS.",
    "FLOAT32_PRECISION",
    "GLOBAL.",
    "OUTPUT_DIR",
    "SEED",
    "SOLVER.",
    "VIS_PERIOD",
    "INPUT.CROP.",
    "INPUT.MASK_FORMAT",
    "INPUT.RANDOM_FLIP",
    "MODEL.DEVICE",
    "MODEL.PANOPTIC_FPN.",
    "MODEL.ANCHOR_GENERATOR.ANGLES",
    "MODEL.RESNETS.DEFORM_MODULATED",
    "MODEL.RESNETS.DEFORM_NUM_GROUPS",
    "MODEL.RETINANET.",
    "MODEL.ROI_BOX_CASCADE_HEAD.",
    "MODEL.ROI_BOX_HEAD.FED_LOSS_",
    "MODEL.SEM_SEG_HEAD.",
    "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES",
    "MODEL.ROI_KEYPOINT_HEAD.",
    "TEST.AUG.",
    "TEST.EVAL_PERIOD",
    "TEST.EXPECTED_RESULTS",
    "TEST.KEYPOINT_OKS_SIGMAS",
    "TEST.PRECISE_BN.",
)

# Keys that Detectron2 does not have.
OUR_KEYS: tuple[str, ...] = (
    "MODEL.RESNETS.STEM_POOL",
    "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS",
    "MODEL.ANCHOR_GENERATOR.STRIDES",
    "MODEL.RPN.MIN_SIDE",
    "MODEL.RPN.SCORE_THRESH",
    "MODEL.RPN.LOSS_NORMALISER",
    "MODEL.ROI_HEADS.MIN_SIDE",
    "MODEL.ROI_HEADS.FEATURES_OF",
    "MODEL.ROI_BOX_HEAD.LEVEL_RULE",
    "MODEL.ROI_BOX_HEAD.REGION_FEATURE",
    "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES",
    "MODEL.ROI_BOX_HEAD.ATTRIBUTES.EMBEDDING_DIM",
    "MODEL.ROI_BOX_HEAD.ATTRIBUTES.HIDDEN_DIM",
    "MODEL.ROI_BOX_HEAD.ATTRIBUTES.LOSS_WEIGHT",
    "MODEL.R2C.FEATURE_DIM",
    "MODEL.R2C.MASK_CHANNELS",
    "MODEL.R2C.CLASS_DIM",
    "MODEL.R2C.DROPOUT",
    "MODEL.R2C.CANVAS",
    "MODEL.R2C.FROZEN_STATISTICS",
    "MODEL.TRANSFORMERS_BACKBONE.NAME",
    "MODEL.TRANSFORMERS_BACKBONE.CONFIG",
)

C4_BACKBONE = "build_resnet_backbone"
FPN_BACKBONE = "build_resnet_fpn_backbone"
R2C_BACKBONE = "build_r2c_backbone"
TRANSFORMERS_BACKBONE = "build_transformers_backbone"
TRANSFORMERS_FPN_BACKBONE = "build_transformers_fpn_backbone"
AUTO_BACKBONE = "detector.backbones.auto_backbone"  # the only module of the detector that imports transformers
RES5_HEADS = "Res5ROIHeads"
STANDARD_HEADS = "StandardROIHeads"
STAGES = ("res2", "res3", "res4", "res5")
STRIDES = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}  # of the maps of other networks than ResNets
NORM_EPS = 1e-5  # epsilon of frozen batch norms, as in Detectron2
BACKENDS = ("builtin", "detectron2")  # detectors that this file configures
# of a weights file, see `EXPECT` in checkpoint.py
EXPECTED_PARTS = ("all", "no_attributes", "no_predictor", "no_mask_head", "backbone")

# Types of fields. Some special values of Detectron2 are not supported (MIN_SIZE_TEST 0, DETECTIONS_PER_IMAGE -1).
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Dropout = Annotated[float, Meta(ge=0, lt=1)]
ConvDims = Annotated[tuple[Annotated[int, Meta(ge=-1)], ...], Meta(min_length=1)]
BoxWeights = tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat]
FloatLists = tuple[Annotated[tuple[PositiveFloat, ...], Meta(min_length=1)], ...]
Stage = Literal["res2", "res3", "res4", "res5"]
Norm = Literal["FrozenBN", "BN", "SyncBN", "GN"]
OptionalNorm = Literal["", "FrozenBN", "BN", "SyncBN", "GN", "LN"]
# see `detector.images.ResizeRule`
Rounding = Literal["detectron2", "truncate", "torchvision", "opencv", "r2c"]
ResizeLibrary = Literal["torch", "pil"]
BoxLoss = Literal["smooth_l1", "giou", "diou", "ciou"]
PoolerType = Literal["ROIAlignV2", "ROIAlign", "ROIPool"]


def _parse_literal(value: Any) -> Any:
    """Parse strings such as "(640, 672)" as Python literals, like Detectron2."""
    if isinstance(value, str) and value.startswith(("(", "[")):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return value


def _under(section: str) -> Callable[[str], str]:
    """Map a field name to its default YAML key."""
    return lambda name: f"{section}.{name.upper()}"


class MapShape(NamedTuple):
    """Size of a feature map relative to the padded batch."""

    channels: int
    stride: int  # pixels of the padded image per cell


class InputConfig(Struct, frozen=True, rename=_under("INPUT")):
    """Resizing and normalisation of images. Sizes are in pixels of the resized image."""

    format: Literal["BGR", "RGB"] = "BGR"
    pixel_mean: tuple[float, float, float] = field(default=(103.53, 116.28, 123.675), name="MODEL.PIXEL_MEAN")
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = field(
        default=(1.0, 1.0, 1.0), name="MODEL.PIXEL_STD"
    )
    min_size_train: tuple[PositiveInt, ...] = (800,)
    min_size_train_sampling: Literal["choice", "range"] = "choice"
    max_size_train: PositiveInt = 1333
    min_size_test: PositiveInt = 800
    max_size_test: PositiveInt = 1333


class ResNetConfig(Struct, frozen=True, rename=_under("MODEL.RESNETS")):
    """Stem and stages res2 .. res5. With `Res5ROIHeads`, res5 is part of the RoI heads.

    `freeze_at`: 0 trains all stages, 1 freezes the stem, 2 also res2, and so on.
    `res5_dilation` 2: all res5 blocks have stride 1, and their 3x3 convolutions dilation 2 (VL-BERT, bottom-up
    attention). Detectron2 ignores this key in `Res5ROIHeads`.
    `stem_pool`: "max", 3x3 with stride 2 and padding 1; "caffe_max", 3x3 with stride 2, no padding and output sizes
    rounded up; "none", a stem of stride 2, so that res4 has stride 8.
    """

    depth: Literal[18, 34, 50, 101, 152] = 50
    norm: Norm = "FrozenBN"
    num_groups: PositiveInt = 1
    width_per_group: PositiveInt = 64
    stem_out_channels: PositiveInt = 64
    res2_out_channels: PositiveInt = 256
    stride_in_1x1: bool = True
    res5_dilation: Literal[1, 2] = 1
    freeze_at: Literal[0, 1, 2, 3, 4, 5] = field(default=2, name="MODEL.BACKBONE.FREEZE_AT")
    out_features: tuple[Stage, ...] = ("res4",)
    stem_pool: Literal["max", "caffe_max", "none"] = "max"

    @property
    def shapes(self) -> dict[str, MapShape]:
        """Channels and strides of res2 .. res5 when they are applied to the whole image."""
        stride = 2 if self.stem_pool == "none" else 4
        shapes = {}
        channels = self.res2_out_channels
        for name in STAGES:
            shapes[name] = MapShape(channels, stride)
            channels *= 2
            if name != "res4" or self.res5_dilation == 1:
                stride *= 2
        return shapes


class FPNConfig(Struct, frozen=True, rename=_under("MODEL.FPN")):
    """Feature pyramid network on the ResNet's maps `in_features`; p6 is a max pool of the last level."""

    in_features: tuple[Stage, ...] = ()
    out_channels: PositiveInt = 256
    norm: OptionalNorm = ""
    fuse_type: Literal["sum", "avg"] = "sum"


class AnchorConfig(Struct, frozen=True, rename=_under("MODEL.ANCHOR_GENERATOR")):
    """Anchors of the RPN.

    `sizes`: square roots of the anchor areas, in pixels of the resized image. `aspect_ratios`: height / width. Both
    have one list for all feature maps, or one list per map in `RPNConfig.in_features`.
    `cell_anchors`: corners (x1, y1, x2, y2) relative to the cell's origin, used instead of sizes and ratios, for
    detectors with rounded anchors (Caffe). They are listed map by map, with sizes in the outer loop and ratios in the
    inner one.
    `strides`: distance between neighbouring anchors. "fixed": the stride of the feature map (Detectron2). "image": the
    padded side of the image divided by the side of the map, rounded down (torchvision; for a side of 800, this is 61
    on p6, not 64).
    """

    sizes: FloatLists = ((32.0, 64.0, 128.0, 256.0, 512.0),)
    aspect_ratios: FloatLists = ((0.5, 1.0, 2.0),)
    offset: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    cell_anchors: tuple[tuple[float, float, float, float], ...] = ()
    strides: Literal["fixed", "image"] = "fixed"

    def pairs(self, num_maps: int) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """Return (sizes, ratios) for each of `num_maps` feature maps."""
        sizes = self.sizes
        ratios = self.aspect_ratios
        if len(sizes) == 1:
            sizes = sizes * num_maps
        if len(ratios) == 1:
            ratios = ratios * num_maps
        return list(zip(sizes, ratios, strict=True))


class RPNConfig(Struct, frozen=True, rename=_under("MODEL.RPN")):
    """Region proposal network: matching, sampling, losses, and selection of proposals.

    `conv_dims`: -1 means as many channels as the feature map has.
    `loss_normaliser`: losses are divided by BATCH_SIZE_PER_IMAGE for each image ("batch_size", Detectron2) or by the
    number of sampled anchors ("sampled", torchvision).
    A proposal is kept if both its sides are longer than `min_size` (Detectron2) and not shorter than `min_side`
    (torchvision's min_size), both in pixels, and its probability of being an object is at least `score_thresh`
    (torchvision).
    """

    in_features: tuple[str, ...] = ("res4",)
    conv_dims: ConvDims = (-1,)
    boundary_thresh: int = -1
    iou_thresholds: tuple[PositiveFloat, ...] = (0.3, 0.7)
    iou_labels: tuple[Literal[-1, 0, 1], ...] = (0, -1, 1)
    batch_size_per_image: PositiveInt = 256
    positive_fraction: Fraction = 0.5
    box_loss_type: BoxLoss = field(default="smooth_l1", name="MODEL.RPN.BBOX_REG_LOSS_TYPE")
    box_loss_weight: NonNegativeFloat = field(default=1.0, name="MODEL.RPN.BBOX_REG_LOSS_WEIGHT")
    box_weights: BoxWeights = field(default=(1.0, 1.0, 1.0, 1.0), name="MODEL.RPN.BBOX_REG_WEIGHTS")
    smooth_l1_beta: NonNegativeFloat = 0.0
    loss_weight: NonNegativeFloat = 1.0
    pre_nms_topk_train: PositiveInt = 12000
    pre_nms_topk_test: PositiveInt = 6000
    post_nms_topk_train: PositiveInt = 2000
    post_nms_topk_test: PositiveInt = 1000
    nms_thresh: Fraction = 0.7
    min_size: NonNegativeInt = field(default=0, name="MODEL.PROPOSAL_GENERATOR.MIN_SIZE")
    min_side: NonNegativeFloat = 0.0
    score_thresh: Fraction = 0.0
    loss_normaliser: Literal["batch_size", "sampled"] = "batch_size"


class ROIHeadsConfig(Struct, frozen=True, rename=_under("MODEL.ROI_HEADS")):
    """RoI heads: sampling in training, thresholds in inference, pooling, and the box predictor.

    `features_of`: features of detections are pooled from the refined boxes ("final") or from the proposals that they
    were refined from ("proposal", bottom-up attention).
    `level_rule`: how RoIs are assigned to feature maps, see `assign_levels`.
    `min_side`: detections with a side shorter than this many pixels are dropped (torchvision: 0.01; Detectron2: 0).
    """

    name: Literal["Res5ROIHeads", "StandardROIHeads"] = "Res5ROIHeads"
    in_features: tuple[str, ...] = ("res4",)
    num_classes: PositiveInt = 80
    iou_thresholds: tuple[PositiveFloat, ...] = (0.5,)
    iou_labels: tuple[Literal[-1, 0, 1], ...] = (0, 1)
    batch_size_per_image: PositiveInt = 512
    positive_fraction: Fraction = 0.25
    append_objects: bool = field(default=True, name="MODEL.ROI_HEADS.PROPOSAL_APPEND_GT")
    score_thresh: Fraction = field(default=0.05, name="MODEL.ROI_HEADS.SCORE_THRESH_TEST")
    nms_thresh: Fraction = field(default=0.5, name="MODEL.ROI_HEADS.NMS_THRESH_TEST")
    detections_per_image: PositiveInt = field(default=100, name="TEST.DETECTIONS_PER_IMAGE")
    pooler_type: PoolerType = field(default="ROIAlignV2", name="MODEL.ROI_BOX_HEAD.POOLER_TYPE")
    pooler_resolution: PositiveInt = field(default=14, name="MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION")
    pooler_sampling_ratio: NonNegativeInt = field(default=0, name="MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO")
    box_loss_type: BoxLoss = field(default="smooth_l1", name="MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE")
    box_loss_weight: NonNegativeFloat = field(default=1.0, name="MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT")
    box_weights: BoxWeights = field(default=(10.0, 10.0, 5.0, 5.0), name="MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS")
    smooth_l1_beta: NonNegativeFloat = field(default=0.0, name="MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA")
    class_agnostic_boxes: bool = field(default=False, name="MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG")
    min_side: NonNegativeFloat = 0.0
    level_rule: Literal["detectron2", "torchvision"] = field(default="detectron2", name="MODEL.ROI_BOX_HEAD.LEVEL_RULE")
    features_of: Literal["final", "proposal"] = "final"


class BoxHeadConfig(Struct, frozen=True, rename=_under("MODEL.ROI_BOX_HEAD")):
    """Convolutions and fully connected layers on RoI maps (`StandardROIHeads`).

    `region_feature`: the feature of a region is the input of the box predictor ("head"), the output of the first or
    second fully connected layer after its ReLU ("fc6", "fc7"), or the mean of the pooled RoI map ("mean").
    """

    name: Literal["", "FastRCNNConvFCHead"] = ""
    num_conv: NonNegativeInt = 0
    conv_dim: PositiveInt = 256
    num_fc: NonNegativeInt = 0
    fc_dim: PositiveInt = 1024
    norm: OptionalNorm = ""
    region_feature: Literal["head", "fc6", "fc7", "mean"] = "head"


class MaskHeadConfig(Struct, frozen=True, rename=_under("MODEL.ROI_MASK_HEAD")):
    """Mask head of Mask R-CNN, with MODEL.MASK_ON: NUM_CONV 3x3 convolutions, a deconvolution and a 1x1 convolution.

    With `StandardROIHeads` its maps are pooled as the POOLER keys say; in a C4 detector they are those of res5.
    """

    name: Literal["MaskRCNNConvUpsampleHead"] = "MaskRCNNConvUpsampleHead"
    pooler_type: PoolerType = "ROIAlignV2"
    pooler_resolution: PositiveInt = 14
    pooler_sampling_ratio: NonNegativeInt = 0
    num_conv: NonNegativeInt = 0
    conv_dim: PositiveInt = 256
    norm: OptionalNorm = ""
    class_agnostic: bool = field(default=False, name="MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK")


class AttributeConfig(Struct, frozen=True, rename=_under("MODEL.ROI_BOX_HEAD.ATTRIBUTES")):
    """Attribute head of bottom-up attention; 0 classes disable it. "No attribute" is an additional last class."""

    num_classes: NonNegativeInt = 0
    embedding_dim: PositiveInt = 256
    hidden_dim: PositiveInt = 512
    loss_weight: NonNegativeFloat = 0.2


class R2CConfig(Struct, frozen=True, rename=_under("MODEL.R2C")):
    """R2C's network for VCR, see `detector.r2c`. `feature_dim` 0 disables it.

    `class_dim`: size of the class embedding; 0 disables it.
    `canvas`: (height, width) in pixels of a black canvas on which each image is placed.
    `frozen_statistics`: the batch norms of frozen stages normalise with their "stored" statistics, or with those of the
    "batch", even in evaluation (official VisualBERT code).
    """

    feature_dim: NonNegativeInt = 0
    mask_channels: PositiveInt = 32
    class_dim: NonNegativeInt = 128
    dropout: Dropout = 0.1
    canvas: tuple[PositiveInt, PositiveInt] | None = None
    frozen_statistics: Literal["stored", "batch"] = "stored"


class TransformersConfig(Struct, frozen=True, rename=_under("MODEL.TRANSFORMERS_BACKBONE")):
    """Which network of transformers is the backbone: one that `AutoBackbone` makes.

    `name`: a name on the Hugging Face hub, or a folder with a `config.json`; its weights are where training starts.
    `config`: settings of the network's own configuration that differ from those of `name`. With a `model_type`, it is
    the whole configuration; without `name` the network is random. Once a config is read, it is whole.
    """

    name: str = ""
    config: dict[str, Any] | None = None


class RegionShape(NamedTuple):
    """Size of what a network makes of each region."""

    feature_dim: int
    mask_size: int  # side of the instance masks that it reads


class BackboneSpec(abc.ABC):
    """A backbone as the config knows it."""

    # prefixes of the detector's keys that `expect: backbone` loads
    weight_prefixes: ClassVar[tuple[str, ...]] = ("backbone.",)
    reads_fpn: ClassVar[bool] = False  # whether the keys of MODEL.FPN are its settings
    # whether the keys of MODEL.TRANSFORMERS_BACKBONE are its settings
    reads_transformers: ClassVar[bool] = False
    feeds_res5: ClassVar[bool] = False  # whether its res4 can be the input of `Res5ROIHeads`
    max_freeze_at: ClassVar[int] = 5  # largest MODEL.BACKBONE.FREEZE_AT
    norms: ClassVar[tuple[str, ...]] = ("FrozenBN", "BN", "SyncBN", "GN")  # values of MODEL.RESNETS.NORM
    backend: ClassVar[str | None] = None  # the only detector that is built around it; None: a Faster R-CNN

    @abc.abstractmethod
    def maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        """Return the feature maps that the network gives, finest first."""

    def complete(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Return the dotted keys of a config with those that the network states itself."""
        return flat

    def size_divisibility(self, config: DetectorConfig) -> int:
        """Return the number of pixels of which the sides of padded images must be multiples."""
        return 1

    def region_shape(self, config: DetectorConfig) -> RegionShape | None:
        """Return the size of what the network makes of a region, or None if the RoI heads determine it."""
        return None

    def check(self, config: DetectorConfig) -> None:
        """Raise a UserError if the network cannot follow the settings."""
        resnet = config.resnet
        if config.r2c.feature_dim > 0:
            raise UserError(
                f"MODEL.R2C.FEATURE_DIM does not fit MODEL.BACKBONE.NAME {config.backbone}; remove one of them."
            )
        if config.transformers != TransformersConfig() and not self.reads_transformers:
            raise UserError(
                f"MODEL.TRANSFORMERS_BACKBONE does not fit MODEL.BACKBONE.NAME {config.backbone}; set the latter to "
                f"{TRANSFORMERS_FPN_BACKBONE} or {TRANSFORMERS_BACKBONE}."
            )
        if resnet.freeze_at > self.max_freeze_at:
            raise UserError(
                f"MODEL.BACKBONE.FREEZE_AT {resnet.freeze_at} is more than the {self.max_freeze_at} stages that "
                f"MODEL.BACKBONE.NAME {config.backbone} can freeze."
            )
        if resnet.norm not in self.norms:
            raise UserError(
                f"MODEL.RESNETS.NORM {resnet.norm} is not supported by MODEL.BACKBONE.NAME {config.backbone}; choose "
                f"from {', '.join(self.norms)}."
            )


class ResNetSpec(BackboneSpec):
    """The stages of a ResNet in OUT_FEATURES. The res5 of a C4 detector is part of its RoI heads."""

    weight_prefixes = ("backbone.", "roi_heads.res5.")
    feeds_res5 = True

    @override
    def maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        stages = config.resnet.shapes
        return {name: stages[name] for name in config.resnet.out_features}


class FPNSpec(BackboneSpec):
    """A feature pyramid on the maps of MODEL.FPN.IN_FEATURES: p2 .. p6, named after log2 of their strides."""

    weight_prefixes = ("backbone.bottom_up.",)
    reads_fpn = True

    @abc.abstractmethod
    def bottom_up_maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        """Return the maps of the network below the pyramid: some of res2 .. res5, finest first."""

    @override
    def maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        strides = [self.bottom_up_maps(config)[name].stride for name in config.fpn.in_features]
        strides.append(2 * strides[-1])
        return {f"p{stride.bit_length() - 1}": MapShape(config.fpn.out_channels, stride) for stride in strides}

    @override
    def size_divisibility(self, config: DetectorConfig) -> int:
        return self.bottom_up_maps(config)[config.fpn.in_features[-1]].stride

    @override
    def check(self, config: DetectorConfig) -> None:
        super().check(config)
        names = tuple(self.bottom_up_maps(config))
        if not config.fpn.in_features or not {*config.fpn.in_features} <= {*names}:
            raise UserError(f"MODEL.FPN.IN_FEATURES must be maps of the network below it: {', '.join(names)}.")


class ResNetFPNSpec(FPNSpec):
    """A feature pyramid on a ResNet."""

    @override
    def bottom_up_maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        return config.resnet.shapes


class MobileNetFPNSpec(BackboneSpec):
    """torchvision's MobileNetV3 with a feature pyramid. The maps have torchvision's names."""

    weight_prefixes = ("backbone.body.",)
    norms = ("FrozenBN", "BN")

    @override
    def maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        return {"0": MapShape(256, 32), "1": MapShape(256, 32), "pool": MapShape(256, 64)}

    @override
    def size_divisibility(self, config: DetectorConfig) -> int:
        return 32


class R2CSpec(ResNetSpec):
    """The ResNet of R2C's network, see `detector/r2c.py`."""

    backend = "r2c"

    @override
    def region_shape(self, config: DetectorConfig) -> RegionShape:
        return RegionShape(config.r2c.feature_dim, mask_size=2 * config.roi_heads.pooler_resolution)

    @override
    def check(self, config: DetectorConfig) -> None:
        resnet = config.resnet
        if (
            config.r2c.feature_dim == 0
            or config.has_box_head
            or config.roi_heads.pooler_type == "ROIPool"
            or resnet.stem_pool != "max"
            or resnet.res2_out_channels != 4 * resnet.width_per_group
            or resnet.num_groups > 1
            or resnet.freeze_at > 4
            or config.mask_on
        ):
            raise UserError(
                "MODEL.R2C.FEATURE_DIM needs MODEL.ROI_HEADS.NAME Res5ROIHeads, MODEL.ROI_BOX_HEAD.POOLER_TYPE "
                "ROIAlign, MODEL.MASK_ON false, MODEL.BACKBONE.FREEZE_AT 4 or less, and of MODEL.RESNETS STEM_POOL "
                "max, NUM_GROUPS 1 and RES2_OUT_CHANNELS 4 times WIDTH_PER_GROUP."
            )


class NetworkSpec(BackboneSpec):
    """A network of transformers, which must be imported, as must torch, to measure the maps."""

    reads_transformers = True
    norms = ("FrozenBN", "BN")

    def outline(self, config: DetectorConfig) -> Any:
        """Return the `NetworkOutline` of the network."""
        return pkgutil.resolve_name(f"{AUTO_BACKBONE}:measure")(config.transformers.config)

    @override
    def complete(self, flat: dict[str, Any]) -> dict[str, Any]:
        return pkgutil.resolve_name(f"{AUTO_BACKBONE}:complete_settings")(flat)

    @override
    def check(self, config: DetectorConfig) -> None:
        super().check(config)
        pkgutil.resolve_name(f"{AUTO_BACKBONE}:check_settings")(config, self.outline(config))


class TransformersSpec(NetworkSpec):
    """The maps of a network in OUT_FEATURES, with the names of a ResNet's maps of the same strides."""

    @override
    def maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        shapes = self.outline(config).maps
        names = config.resnet.out_features
        if not {*names} <= shapes.keys():
            raise UserError(f"MODEL.RESNETS.OUT_FEATURES must be maps of the network: {', '.join(shapes)}.")
        return {name: shapes[name] for name in names}

    @override
    def size_divisibility(self, config: DetectorConfig) -> int:
        return max(shape.stride for shape in self.maps(config).values())


class TransformersFPNSpec(NetworkSpec, FPNSpec):
    """A feature pyramid on a network of transformers; on a ViT, which has one map, a simple feature pyramid."""

    @override
    def bottom_up_maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        outline = self.outline(config)
        if not outline.is_plain:
            return outline.maps
        [shape] = outline.maps.values()
        return {name: MapShape(shape.channels, stride) for name, stride in STRIDES.items()}


class BackboneEntry(NamedTuple):
    """What the config knows of a backbone, and its network, which "module:Class" imports when it is built."""

    spec: BackboneSpec
    implementation: str | type[Any]  # a `Backbone`, constructed with a `DetectorConfig`, or a function that makes one

    @property
    def cls(self) -> type[Any]:
        if isinstance(self.implementation, str):
            return pkgutil.resolve_name(self.implementation)
        return self.implementation


# by MODEL.BACKBONE.NAME; only the first two are names of Detectron2
BACKBONES = {
    C4_BACKBONE: BackboneEntry(ResNetSpec(), "detector.backbones.resnet:ResNet"),
    FPN_BACKBONE: BackboneEntry(ResNetFPNSpec(), "detector.backbones.fpn:ResNetFPN"),
    "build_mobilenet_v3_large_fpn_backbone": BackboneEntry(
        MobileNetFPNSpec(), "detector.backbones.mobilenet:MobileNetFPN"
    ),
    R2C_BACKBONE: BackboneEntry(R2CSpec(), "detector.r2c:R2CTrunk"),
    TRANSFORMERS_BACKBONE: BackboneEntry(TransformersSpec(), f"{AUTO_BACKBONE}:TransformersBackbone"),
    TRANSFORMERS_FPN_BACKBONE: BackboneEntry(TransformersFPNSpec(), f"{AUTO_BACKBONE}:build_pyramid"),
}


class DetectorConfig(Struct, frozen=True):
    """Config of the built-in detector. Constructing a detector does not load `weights`."""

    weights: str = field(default="", name="MODEL.WEIGHTS")
    backbone: str = field(default=C4_BACKBONE, name="MODEL.BACKBONE.NAME")  # a key of `BACKBONES`
    input: InputConfig = InputConfig()
    resnet: ResNetConfig = ResNetConfig()
    fpn: FPNConfig = FPNConfig()
    anchors: AnchorConfig = AnchorConfig()
    rpn: RPNConfig = RPNConfig()
    roi_heads: ROIHeadsConfig = ROIHeadsConfig()
    box_head: BoxHeadConfig = BoxHeadConfig()
    mask_on: bool = field(default=False, name="MODEL.MASK_ON")
    mask_head: MaskHeadConfig = MaskHeadConfig()
    attributes: AttributeConfig = AttributeConfig()
    r2c: R2CConfig = R2CConfig()
    transformers: TransformersConfig = TransformersConfig()

    @property
    def backbone_spec(self) -> BackboneSpec:
        """What is known of the backbone without torch."""
        return BACKBONES[self.backbone].spec

    @property
    def has_box_head(self) -> bool:
        """Whether RoI maps are the input of a box head; otherwise they are the input of res5 (C4)."""
        return self.roi_heads.name == STANDARD_HEADS

    @property
    def map_shapes(self) -> dict[str, MapShape]:
        """Feature maps of the backbone by name, finest first."""
        return self.backbone_spec.maps(self)

    @property
    def size_divisibility(self) -> int:
        """Images are padded to a multiple of this many pixels."""
        return self.backbone_spec.size_divisibility(self)

    @property
    def map_size(self) -> int:
        """Side of the RoI masks, which are multiplied with the pooled maps of a box head or with res5's output."""
        side = self.roi_heads.pooler_resolution
        region_shape = self.backbone_spec.region_shape(self)
        if region_shape is not None:
            return region_shape.mask_size
        if self.has_box_head or self.resnet.res5_dilation == 2:
            return side
        return (side + 1) // 2

    @property
    def feature_dim(self) -> int:
        """Width of a region feature."""
        head = self.box_head
        region_shape = self.backbone_spec.region_shape(self)
        if region_shape is not None:
            return region_shape.feature_dim
        if not self.has_box_head:
            return self.resnet.shapes["res5"].channels
        if head.region_feature == "mean":
            return self.map_shapes[self.roi_heads.in_features[0]].channels
        return head.fc_dim if head.num_fc else head.conv_dim * self.roi_heads.pooler_resolution**2

    def __post_init__(self) -> None:
        """Reject combinations that would silently build another network."""
        resnet = self.resnet
        head = self.box_head
        pooled = self.roi_heads.in_features
        if self.backbone not in BACKBONES:
            names = ", ".join(repr(name) for name in BACKBONES)
            raise UserError(f"MODEL.BACKBONE.NAME: invalid enum value {self.backbone!r}; choose from {names}.")
        if self.r2c.feature_dim and self.backbone == C4_BACKBONE:  # R2C's network needs no other name
            msgspec.structs.force_setattr(self, "backbone", R2C_BACKBONE)
        spec = self.backbone_spec
        is_c4 = spec.feeds_res5 and resnet.out_features == pooled == ("res4",)
        if not self.has_box_head and not is_c4:
            raise UserError(
                f"MODEL.ROI_HEADS.NAME {RES5_HEADS} needs MODEL.BACKBONE.NAME {C4_BACKBONE}, and [res4] as "
                f"MODEL.RESNETS.OUT_FEATURES and MODEL.ROI_HEADS.IN_FEATURES; other backbones need {STANDARD_HEADS}."
            )
        if head.region_feature != "head" and (
            not self.has_box_head or head.num_fc < {"mean": 0, "fc6": 1, "fc7": 2}[head.region_feature]
        ):
            raise UserError(
                f"MODEL.ROI_BOX_HEAD.REGION_FEATURE {head.region_feature} needs MODEL.ROI_HEADS.NAME {STANDARD_HEADS} "
                "and at least as many layers in MODEL.ROI_BOX_HEAD.NUM_FC."
            )
        spec.check(self)
        maps = self.map_shapes
        if not {*self.rpn.in_features, *pooled} <= maps.keys():
            raise UserError(
                "MODEL.RPN.IN_FEATURES and MODEL.ROI_HEADS.IN_FEATURES must be maps of the backbone: "
                f"{', '.join(maps)}."
            )
        strides = [maps[name].stride for name in pooled]
        if strides != [strides[0] * 2**level for level in range(len(strides))]:
            raise UserError(f"MODEL.ROI_HEADS.IN_FEATURES {', '.join(pooled)} must be consecutive, finest first.")

    @classmethod
    def from_yaml(cls, source: str | Path | dict[str, Any]) -> DetectorConfig:
        """Read a Detectron2 YAML file or a nested dict with the same keys. `_BASE_` files are merged first."""
        if isinstance(source, dict):
            return cls.from_flat(flatten(merge_bases(source, Path())))
        return cls.from_flat(flatten(load_tree(Path(source))), str(source))

    @classmethod
    def from_flat(cls, flat: dict[str, Any], name: str = "detector config") -> DetectorConfig:
        """Create a config from dotted keys, e.g. {"MODEL.RESNETS.DEPTH": 101}. `name` is for error messages."""
        flat = {key: _parse_literal(value) for key, value in flat.items()}
        for key, value in flat.items():
            plain = list(value) if isinstance(value, tuple) else value
            if key in FIXED and plain != FIXED[key]:
                supported = SUPPORTED.get(key, f"the only value is {FIXED[key]!r}")
                raise UserError(f"{name}: {key} = {value!r} is not supported; {supported}.")
            if key not in KEYS and key not in FIXED and not key.startswith(IGNORED):
                close = difflib.get_close_matches(key, [*KEYS, *FIXED], n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise UserError(f"{name}: {key} is not a known key of Detectron2 or of this project.{hint}")
        if isinstance(flat.get("INPUT.MIN_SIZE_TRAIN"), int):  # Detectron2 also accepts a single size
            flat["INPUT.MIN_SIZE_TRAIN"] = [flat["INPUT.MIN_SIZE_TRAIN"]]
        entry = BACKBONES.get(flat.get("MODEL.BACKBONE.NAME"))
        if entry is not None:
            flat = entry.spec.complete(flat)
        unused = _unused_groups(
            flat.get("MODEL.BACKBONE.NAME"), flat.get("MODEL.ROI_HEADS.NAME"), flat.get("MODEL.MASK_ON", False)
        )
        nested: dict[str, Any] = {}
        for key in flat.keys() & KEYS.keys():
            group = KEYS[key][0]
            if group is None:
                nested[key] = flat[key]
            elif group not in unused or key in OUR_KEYS:
                nested.setdefault(group, {})[key] = flat[key]
        try:
            return msgspec.convert(nested, cls)
        except msgspec.ValidationError as error:
            raise UserError(f"{name}: {_format_error(error)}") from error

    def to_flat(self) -> dict[str, Any]:
        """Convert to dotted keys and plain values; `OUR_KEYS` are included only if they differ from their default."""
        flat = dict(FIXED)
        unused = _unused_groups(self.backbone, self.roi_heads.name, self.mask_on)
        for key, (group, setting) in KEYS.items():
            settings = getattr(self, group) if group else self
            value = getattr(settings, setting.name)
            is_written = group not in unused
            if key in OUR_KEYS:
                is_written = value != setting.default
            if is_written:
                flat[key] = msgspec.json.decode(msgspec.json.encode(value))  # tuples become lists
        return flat

    def to_yaml(self) -> str:
        """Convert to YAML for `from_yaml`. Detectron2 can read it too if none of `OUR_KEYS` is used."""
        return yaml.safe_dump(nest(self.to_flat()), default_flow_style=None, sort_keys=True)


# dotted key -> (group, field); the group is None for fields of `DetectorConfig` itself
KEYS: dict[str, tuple[str | None, msgspec.structs.FieldInfo]] = {}
for _setting in msgspec.structs.fields(DetectorConfig):
    if isinstance(_setting.type, type) and issubclass(_setting.type, Struct):
        KEYS |= {leaf.encode_name: (_setting.name, leaf) for leaf in msgspec.structs.fields(_setting.type)}
    else:
        KEYS[_setting.encode_name] = (None, _setting)


def _format_error(error: msgspec.ValidationError) -> str:
    """Add the key and the choices of a `Literal` to msgspec's message."""
    reason, _, path = str(error).partition(" - at `$")
    names_in_path = [name for name in KEYS if name in path]
    key = max(names_in_path, key=len, default=None)
    if key is None:
        return reason
    message = f"{key}: {reason[:1].lower()}{reason[1:]}"
    if "enum" in reason:
        kind = KEYS[key][1].type
        while typing.get_origin(kind) not in (None, Literal):
            kind = typing.get_args(kind)[0]
        message += f"; choose from {', '.join(map(repr, typing.get_args(kind)))}"
    return f"{message}."


def _unused_groups(backbone: Any, heads: Any, mask_on: Any) -> set[str]:
    """Return the groups that an architecture does not have. Their keys, except `OUR_KEYS`, are ignored."""
    unused = set()
    if backbone not in BACKBONES or not BACKBONES[backbone].spec.reads_fpn:
        unused.add("fpn")
    if heads != STANDARD_HEADS:
        unused.add("box_head")
    if not mask_on:
        unused.add("mask_head")
    return unused


class SelectionRule(Struct, frozen=True, forbid_unknown_fields=True):
    """Keep boxes with scores of at least `min_score`, but at least `min_regions` and at most `max_regions` boxes.

    The defaults are VL-BERT's (section 4.1): 0.5, 10 and 100. What is stated wins over a default: with a stated
    `min_score`, limits that are not stated do not apply, and a stated limit moves the default of the other one. Once a
    rule is constructed, all fields have values; `max_regions` None: no limit. Bottom-up attention uses 0.2 with 10 to
    100 boxes. For a fixed number of boxes, such as LXMERT's 36, set `min_regions == max_regions`.
    """

    min_score: float | UnsetType = UNSET
    min_regions: NonNegativeInt | UnsetType = UNSET
    max_regions: PositiveInt | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        stated = (self.min_score, self.min_regions, self.max_regions)
        for name, value in zip(self.__struct_fields__, _complete_selection(stated, (0.5, 10, 100)), strict=True):
            msgspec.structs.force_setattr(self, name, value)
        if self.max_regions is not None and not 1 <= self.max_regions >= self.min_regions:
            raise UserError(f"max_regions {self.max_regions} must be positive and >= min_regions {self.min_regions}.")

    def with_stated(
        self, min_score: float | None = None, min_regions: int | None = None, max_regions: int | None = None
    ) -> SelectionRule:
        """Return the rule for what a user states, with the values of this rule as defaults. None: not stated.

        Raises:
            UserError: the limits are no counts or contradict each other, or the score is no probability.
        """
        if isinstance(min_score, str) or not (min_score is None or 0 <= min_score <= 1):
            raise UserError(f"min_score {min_score!r} must be a probability, from 0 to 1.")
        _require_count("min_regions", min_regions, 0)
        _require_count("max_regions", max_regions, 1)
        stated = tuple(UNSET if value is None else value for value in (min_score, min_regions, max_regions))
        return SelectionRule(*_complete_selection(stated, (self.min_score, self.min_regions, self.max_regions)))


def _require_count(name: str, value: Any, least: int) -> None:
    """Raise a UserError if a limit is neither None nor an integer of at least `least`."""
    if value is None:
        return
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise UserError(f"{name} {value!r} must be an integer of at least {least}.")


def _complete_selection(
    stated: tuple[Any, Any, Any], defaults: tuple[float, int, int | None]
) -> tuple[float, int, int | None]:
    """Return `min_score`, `min_regions` and `max_regions`, where those that are UNSET give way to the stated ones."""
    min_score, min_regions, max_regions = stated
    default_score, default_min, default_max = defaults
    if min_score is UNSET:
        min_score = default_score
    else:
        default_min = 0
        default_max = None
    if min_regions is UNSET:
        has_limit = max_regions is not UNSET and max_regions is not None
        min_regions = min(default_min, max_regions) if has_limit else default_min
    if max_regions is UNSET:
        max_regions = None if default_max is None else max(default_max, min_regions)
    return min_score, min_regions, max_regions
