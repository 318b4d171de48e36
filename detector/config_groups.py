"""The groups of the built-in detector's settings: one dataclass per part of the network.

Every field states its Detectron2 key and has Detectron2's default. `detector.detector_config` puts the groups together
and checks the rules between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from detector.config_file import plain
from detector.errors import UserError

C4_BACKBONE, FPN_BACKBONE = "build_resnet_backbone", "build_resnet_fpn_backbone"
MOBILENET_BACKBONE = "build_mobilenet_v3_large_fpn_backbone"  # not a name of Detectron2, see `detector.mobilenet`
RES5_HEADS, STANDARD_HEADS = "Res5ROIHeads", "StandardROIHeads"
BOX_HEAD = "FastRCNNConvFCHead"
STAGES = ("res2", "res3", "res4", "res5")
NORMS = ("FrozenBN", "BN", "SyncBN", "GN")
NORM_EPS = 1e-5  # of frozen batch norms, in Detectron2 and here
BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
# Lower bounds of numbers (of all numbers of a list). Detectron2 gives a meaning to some values below (MIN_SIZE_TEST 0,
# DETECTIONS_PER_IMAGE -1); they are not built here.
POSITIVE, NOT_NEGATIVE = "positive", "0 or more"

LARGEST = 1 << 24  # of any number, and far beyond what a detector needs
MOST_VALUES = 1000  # of a list
_LAYERS = 64

Rules = list[tuple[bool, str]]  # whether a rule holds, and the rule in words


def setting(key: str, default: Any, *, ours: bool = False, **limits: Any) -> Any:
    """A field; `limits` are arguments of `_check_value`."""
    return dataclasses.field(default=default, metadata={"key": key, "ours": ours, "limits": limits})


class MapShape(NamedTuple):
    """A feature map of the padded batch."""

    channels: int
    stride: int  # pixels of the network input per cell


class SettingsGroup:
    """Settings of one part of the detector, or of all of it.

    Raises:
        ValueError: a value from which, alone or with others of the group, no detector can be built; names its key.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "key" not in field.metadata:
                continue
            _check_value(field.metadata["key"], plain(getattr(self, field.name)), **field.metadata["limits"])
        for holds, message in self._rules():
            if not holds:
                raise UserError(f"{message}.")

    def _rules(self) -> Rules:
        """Rules that are more than limits of one value."""
        return []


def _check_value(
    key: str,
    value: Any,
    *,
    choices: Sequence[Any] = (),
    length: int | None = None,
    least: str | None = None,
    most: float | None = None,
) -> None:
    wrong = [item for item in (value if isinstance(value, list) else [value]) if choices and item not in choices]
    if wrong:
        raise UserError(f"{key} must be one of {_listed(choices)}, not {_listed(wrong)}.")
    if length is not None and len(value) != length:
        raise UserError(f"{key} must have {length} values, not {len(value)}.")
    leaves = _leaves(value)
    if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves):
        raise UserError(f"{key} is {value}; it must be finite.")
    if least and (not leaves or not all(leaf > 0 or (leaf == 0 and least == NOT_NEGATIVE) for leaf in leaves)):
        raise UserError(f"{key} is {value}; it must be {least}.")
    if len(leaves) > MOST_VALUES:
        raise UserError(f"{key} has {len(leaves)} values; it must have at most {MOST_VALUES}.")
    most = LARGEST if most is None else most
    if any(isinstance(leaf, int | float) and leaf > most for leaf in leaves):
        raise UserError(f"{key} is {value}; it must be at most {most}.")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(str(value) if value != "" else '""' for value in values)


def is_in_order(stages: Sequence[str]) -> bool:
    """Whether names of stages rise."""
    return list(stages) == sorted(set(stages))


def _leaves(value: Any) -> list[Any]:
    """All values of a nested list."""
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def _sampling_rules(part: RPNConfig | ROIHeadsConfig, prefix: str) -> Rules:
    thresholds = part.iou_thresholds
    return [
        (part.positive_fraction <= 1, f"{prefix}.POSITIVE_FRACTION must be at most 1"),
        (
            len(part.iou_labels) == len(thresholds) + 1 and set(part.iou_labels) <= {-1, 0, 1},
            f"{prefix}.IOU_LABELS must hold one of -1, 0, 1 per interval of {prefix}.IOU_THRESHOLDS",
        ),
        (
            list(thresholds) == sorted(thresholds) and min(thresholds, default=1) > 0,
            f"{prefix}.IOU_THRESHOLDS must be positive and rise",
        ),
    ]


@dataclasses.dataclass(frozen=True)
class InputConfig(SettingsGroup):
    """How images reach the network. Sizes are pixels of the resized image."""

    format: str = setting("INPUT.FORMAT", "BGR", choices=("BGR", "RGB"))
    pixel_mean: tuple[float, ...] = setting("MODEL.PIXEL_MEAN", (103.53, 116.28, 123.675), length=3)
    pixel_std: tuple[float, ...] = setting("MODEL.PIXEL_STD", (1.0, 1.0, 1.0), length=3, least=POSITIVE)
    min_size_train: tuple[int, ...] = setting("INPUT.MIN_SIZE_TRAIN", (800,), least=POSITIVE, most=1 << 15)
    min_size_train_sampling: str = setting("INPUT.MIN_SIZE_TRAIN_SAMPLING", "choice", choices=("choice", "range"))
    max_size_train: int = setting("INPUT.MAX_SIZE_TRAIN", 1333, least=POSITIVE)
    min_size_test: int = setting("INPUT.MIN_SIZE_TEST", 800, least=POSITIVE, most=1 << 15)
    max_size_test: int = setting("INPUT.MAX_SIZE_TEST", 1333, least=POSITIVE)


@dataclasses.dataclass(frozen=True)
class ResNetConfig(SettingsGroup):
    """Stem and res2 .. res5. Where the RoI heads are `Res5ROIHeads`, res5 belongs to them.

    `freeze_at`: 0 trains all stages, 1 freezes the stem, 2 also res2, and so on. `res5_dilation` 2: all res5 blocks
    have stride 1 and their 3x3 convolutions dilation 2 (VL-BERT, bottom-up attention); stock Detectron2 ignores the
    key in `Res5ROIHeads`. `stem_pool`: "max" 3x3/2 padding 1; "caffe_max" 3x3/2 without padding, sizes rounded up;
    "none" leaves the stem at stride 2, so that res4 has stride 8.
    """

    depth: int = setting("MODEL.RESNETS.DEPTH", 50, choices=(18, 34, 50, 101, 152))
    norm: str = setting("MODEL.RESNETS.NORM", "FrozenBN", choices=NORMS)
    num_groups: int = setting("MODEL.RESNETS.NUM_GROUPS", 1, least=POSITIVE)
    width_per_group: int = setting("MODEL.RESNETS.WIDTH_PER_GROUP", 64, least=POSITIVE)
    stem_out_channels: int = setting("MODEL.RESNETS.STEM_OUT_CHANNELS", 64, least=POSITIVE)
    res2_out_channels: int = setting("MODEL.RESNETS.RES2_OUT_CHANNELS", 256, least=POSITIVE)
    stride_in_1x1: bool = setting("MODEL.RESNETS.STRIDE_IN_1X1", True)
    res5_dilation: int = setting("MODEL.RESNETS.RES5_DILATION", 1, choices=(1, 2))
    freeze_at: int = setting("MODEL.BACKBONE.FREEZE_AT", 2, choices=(0, 1, 2, 3, 4, 5))
    out_features: tuple[str, ...] = setting("MODEL.RESNETS.OUT_FEATURES", ("res4",), choices=STAGES)
    stem_pool: str = setting("MODEL.RESNETS.STEM_POOL", "max", ours=True, choices=("max", "caffe_max", "none"))

    def _rules(self) -> Rules:
        return [
            (self.depth >= 50 or self.num_groups == 1, "MODEL.RESNETS.NUM_GROUPS must be 1 for depths 18 and 34"),
            (
                len(self.out_features) > 0 and is_in_order(self.out_features),
                "MODEL.RESNETS.OUT_FEATURES must name stages from res2 to res5, in order",
            ),
            (
                self.depth >= 50 or self.res5_dilation == 1 or "res5" not in self.out_features,
                "MODEL.RESNETS.RES5_DILATION must be 1 for depths 18 and 34",
            ),
        ]

    @property
    def shapes(self) -> dict[str, MapShape]:
        """Channels and strides of res2 .. res5, as a whole image sees them."""
        stride = 2 if self.stem_pool == "none" else 4
        strides = [stride, 2 * stride, 4 * stride, (4 if self.res5_dilation == 2 else 8) * stride]
        return {
            name: MapShape(self.res2_out_channels * 2**number, stride)
            for number, (name, stride) in enumerate(zip(STAGES, strides, strict=True))
        }


@dataclasses.dataclass(frozen=True)
class FPNConfig(SettingsGroup):
    """Feature pyramid network on the maps `in_features` of the ResNet, with a max-pool on top (p6)."""

    in_features: tuple[str, ...] = setting("MODEL.FPN.IN_FEATURES", (), choices=STAGES)
    out_channels: int = setting("MODEL.FPN.OUT_CHANNELS", 256, least=POSITIVE)
    norm: str = setting("MODEL.FPN.NORM", "", choices=("", *NORMS))
    fuse_type: str = setting("MODEL.FPN.FUSE_TYPE", "sum", choices=("sum", "avg"))


@dataclasses.dataclass(frozen=True)
class AnchorConfig(SettingsGroup):
    """Anchors: the square roots of their areas in pixels of the resized image, and their height / width.

    `strides` says how far the anchors of a map are apart: "fixed", the map's own stride (Detectron2); "image", the
    padded side of the image divided by the side of the map, rounded down (torchvision; 61, not 64, on p6 for a side of
    800).

    Sizes and ratios are lists, one for all feature maps or one per map of `RPNConfig.in_features`. `cell_anchors` gives
    the corners (x1, y1, x2, y2) relative to the cell's origin instead, map by map, in the same order (sizes outer,
    ratios inner): for detectors whose anchors were rounded (Caffe). Empty = from sizes and ratios.
    """

    sizes: tuple[tuple[float, ...], ...] = setting(
        "MODEL.ANCHOR_GENERATOR.SIZES", ((32.0, 64.0, 128.0, 256.0, 512.0),), least=POSITIVE
    )
    aspect_ratios: tuple[tuple[float, ...], ...] = setting(
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", ((0.5, 1.0, 2.0),), least=POSITIVE
    )
    offset: float = setting("MODEL.ANCHOR_GENERATOR.OFFSET", 0.0)
    cell_anchors: tuple[tuple[float, ...], ...] = setting("MODEL.ANCHOR_GENERATOR.CELL_ANCHORS", (), ours=True)
    strides: str = setting("MODEL.ANCHOR_GENERATOR.STRIDES", "fixed", ours=True, choices=("fixed", "image"))

    def _rules(self) -> Rules:
        are_boxes = all(len(cell) == 4 and cell[0] < cell[2] and cell[1] < cell[3] for cell in self.cell_anchors)
        return [
            (0 <= self.offset < 1, "MODEL.ANCHOR_GENERATOR.OFFSET must be in [0, 1)"),
            (are_boxes, "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS must hold [x1, y1, x2, y2] for each anchor"),
        ]

    def pairs(self, num_maps: int) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """Sizes and ratios of each of `num_maps` feature maps."""
        sizes, ratios = (lists * num_maps if len(lists) == 1 else lists for lists in (self.sizes, self.aspect_ratios))
        return list(zip(sizes, ratios, strict=True))


@dataclasses.dataclass(frozen=True)
class RPNConfig(SettingsGroup):
    """Region proposal network: matching, sampling, losses, and the choice of proposals.

    `loss_normaliser` says what divides the losses: "batch_size", BATCH_SIZE_PER_IMAGE of each image (Detectron2), or
    the number of "sampled" anchors (torchvision). Proposals stay whose sides are longer than `min_size` (Detectron2)
    and at least `min_side` (torchvision's min_size), both in pixels, and whose objectness is at least `score_thresh`,
    a probability (torchvision's score_thresh).
    """

    in_features: tuple[str, ...] = setting("MODEL.RPN.IN_FEATURES", ("res4",))
    conv_dims: tuple[int, ...] = setting("MODEL.RPN.CONV_DIMS", (-1,))
    boundary_thresh: int = setting("MODEL.RPN.BOUNDARY_THRESH", -1)
    iou_thresholds: tuple[float, ...] = setting("MODEL.RPN.IOU_THRESHOLDS", (0.3, 0.7))
    iou_labels: tuple[int, ...] = setting("MODEL.RPN.IOU_LABELS", (0, -1, 1))
    batch_size_per_image: int = setting("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 256, least=POSITIVE)
    positive_fraction: float = setting("MODEL.RPN.POSITIVE_FRACTION", 0.5, least=NOT_NEGATIVE)
    box_loss_type: str = setting("MODEL.RPN.BBOX_REG_LOSS_TYPE", "smooth_l1", choices=BOX_LOSSES)
    box_loss_weight: float = setting("MODEL.RPN.BBOX_REG_LOSS_WEIGHT", 1.0, least=NOT_NEGATIVE)
    box_weights: tuple[float, ...] = setting(
        "MODEL.RPN.BBOX_REG_WEIGHTS", (1.0, 1.0, 1.0, 1.0), length=4, least=POSITIVE
    )
    smooth_l1_beta: float = setting("MODEL.RPN.SMOOTH_L1_BETA", 0.0, least=NOT_NEGATIVE)
    loss_weight: float = setting("MODEL.RPN.LOSS_WEIGHT", 1.0, least=NOT_NEGATIVE)
    pre_nms_topk_train: int = setting("MODEL.RPN.PRE_NMS_TOPK_TRAIN", 12000, least=POSITIVE)
    pre_nms_topk_test: int = setting("MODEL.RPN.PRE_NMS_TOPK_TEST", 6000, least=POSITIVE)
    post_nms_topk_train: int = setting("MODEL.RPN.POST_NMS_TOPK_TRAIN", 2000, least=POSITIVE)
    post_nms_topk_test: int = setting("MODEL.RPN.POST_NMS_TOPK_TEST", 1000, least=POSITIVE)
    nms_thresh: float = setting("MODEL.RPN.NMS_THRESH", 0.7, least=NOT_NEGATIVE, most=1)
    min_size: int = setting("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 0, least=NOT_NEGATIVE)
    min_side: float = setting("MODEL.RPN.MIN_SIDE", 0.0, ours=True, least=NOT_NEGATIVE)
    score_thresh: float = setting("MODEL.RPN.SCORE_THRESH", 0.0, ours=True, least=NOT_NEGATIVE, most=1)
    loss_normaliser: str = setting(
        "MODEL.RPN.LOSS_NORMALISER", "batch_size", ours=True, choices=("batch_size", "sampled")
    )

    def _rules(self) -> Rules:
        return [
            (len(self.conv_dims) > 0, "MODEL.RPN.CONV_DIMS must not be empty"),
            (
                all(dim == -1 or dim > 0 for dim in self.conv_dims),
                "MODEL.RPN.CONV_DIMS must hold positive widths or -1",
            ),
            *_sampling_rules(self, "MODEL.RPN"),
        ]


@dataclasses.dataclass(frozen=True)
class ROIHeadsConfig(SettingsGroup):
    """RoIs: sampling for training, thresholds for testing, pooling, and the box predictor.

    `features_of` names the boxes that the features of detections are taken from: "final", the refined boxes, pooled
    again; or "proposal", the proposals that they came from (as in bottom-up attention). `level_rule` says how exactly a
    RoI is given a feature map, see `assign_levels`. Final boxes stay whose sides are at least `min_side` pixels long
    (torchvision: 0.01; Detectron2 keeps all).
    """

    name: str = setting("MODEL.ROI_HEADS.NAME", RES5_HEADS, choices=(RES5_HEADS, STANDARD_HEADS))
    in_features: tuple[str, ...] = setting("MODEL.ROI_HEADS.IN_FEATURES", ("res4",))
    num_classes: int = setting("MODEL.ROI_HEADS.NUM_CLASSES", 80, least=POSITIVE)
    iou_thresholds: tuple[float, ...] = setting("MODEL.ROI_HEADS.IOU_THRESHOLDS", (0.5,))
    iou_labels: tuple[int, ...] = setting("MODEL.ROI_HEADS.IOU_LABELS", (0, 1))
    batch_size_per_image: int = setting("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 512, least=POSITIVE)
    positive_fraction: float = setting("MODEL.ROI_HEADS.POSITIVE_FRACTION", 0.25, least=NOT_NEGATIVE)
    append_objects: bool = setting("MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", True)
    score_thresh: float = setting("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.05)
    nms_thresh: float = setting("MODEL.ROI_HEADS.NMS_THRESH_TEST", 0.5, least=NOT_NEGATIVE, most=1)
    detections_per_image: int = setting("TEST.DETECTIONS_PER_IMAGE", 100, least=POSITIVE)
    pooler_type: str = setting(
        "MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlignV2", choices=("ROIAlignV2", "ROIAlign", "ROIPool")
    )
    pooler_resolution: int = setting("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 14, least=POSITIVE, most=1 << 8)
    pooler_sampling_ratio: int = setting("MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO", 0, least=NOT_NEGATIVE, most=1 << 8)
    box_loss_type: str = setting("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE", "smooth_l1", choices=BOX_LOSSES)
    box_loss_weight: float = setting("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT", 1.0, least=NOT_NEGATIVE)
    box_weights: tuple[float, ...] = setting(
        "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (10.0, 10.0, 5.0, 5.0), length=4, least=POSITIVE
    )
    smooth_l1_beta: float = setting("MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA", 0.0, least=NOT_NEGATIVE)
    class_agnostic_boxes: bool = setting("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", False)
    min_side: float = setting("MODEL.ROI_HEADS.MIN_SIDE", 0.0, ours=True, least=NOT_NEGATIVE)
    level_rule: str = setting(
        "MODEL.ROI_BOX_HEAD.LEVEL_RULE", "detectron2", ours=True, choices=("detectron2", "torchvision")
    )
    features_of: str = setting("MODEL.ROI_HEADS.FEATURES_OF", "final", ours=True, choices=("final", "proposal"))

    def _rules(self) -> Rules:
        return _sampling_rules(self, "MODEL.ROI_HEADS")


@dataclasses.dataclass(frozen=True)
class BoxHeadConfig(SettingsGroup):
    """Convolutions and fully connected layers on RoI maps (`StandardROIHeads`).

    `region_feature` names what describes a region: "head" is the input of the box predictor; "fc6" and "fc7" are the
    outputs of the first and second fully connected layer after their ReLU; "mean" is the mean of the pooled RoI map.
    The box predictor always reads the last layer.
    """

    name: str = setting("MODEL.ROI_BOX_HEAD.NAME", "", choices=("", BOX_HEAD))
    num_conv: int = setting("MODEL.ROI_BOX_HEAD.NUM_CONV", 0, least=NOT_NEGATIVE, most=_LAYERS)
    conv_dim: int = setting("MODEL.ROI_BOX_HEAD.CONV_DIM", 256, least=POSITIVE)
    num_fc: int = setting("MODEL.ROI_BOX_HEAD.NUM_FC", 0, least=NOT_NEGATIVE, most=_LAYERS)
    fc_dim: int = setting("MODEL.ROI_BOX_HEAD.FC_DIM", 1024, least=POSITIVE)
    norm: str = setting("MODEL.ROI_BOX_HEAD.NORM", "", choices=("", *NORMS))
    region_feature: str = setting(
        "MODEL.ROI_BOX_HEAD.REGION_FEATURE", "head", ours=True, choices=("head", "fc6", "fc7", "mean")
    )

    def _rules(self) -> Rules:
        needed = {"fc6": 1, "fc7": 2}.get(self.region_feature, 0)
        return [
            (
                self.num_fc >= needed,
                f"MODEL.ROI_BOX_HEAD.REGION_FEATURE {self.region_feature} needs at least {needed} fully connected "
                f"layers, but NUM_FC is {self.num_fc}",
            )
        ]


@dataclasses.dataclass(frozen=True)
class AttributeConfig(SettingsGroup):
    """Optional attribute head of bottom-up attention; 0 classes = no head. "No attribute" is an extra, last class."""

    num_classes: int = setting("MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES", 0, ours=True, least=NOT_NEGATIVE)
    embedding_dim: int = setting("MODEL.ROI_BOX_HEAD.ATTRIBUTES.EMBEDDING_DIM", 256, ours=True, least=POSITIVE)
    hidden_dim: int = setting("MODEL.ROI_BOX_HEAD.ATTRIBUTES.HIDDEN_DIM", 512, ours=True, least=POSITIVE)
    loss_weight: float = setting("MODEL.ROI_BOX_HEAD.ATTRIBUTES.LOSS_WEIGHT", 0.2, ours=True, least=NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class R2CConfig(SettingsGroup):
    """The network of R2C on VCR, see `detector.r2c_network`; `feature_dim` 0 = another detector.

    `class_dim` is the width of the vector of a box's class; 0 = features without it.
    `canvas` is the (height, width) in pixels of the black canvas on which every image is placed; empty = none.
    `frozen_statistics` says what the batch norms of frozen stages normalise by: "stored" statistics, or the ones of the
    "batch", in evaluation too (official VisualBERT code).
    """

    feature_dim: int = setting("MODEL.R2C.FEATURE_DIM", 0, ours=True, least=NOT_NEGATIVE)
    mask_channels: int = setting("MODEL.R2C.MASK_CHANNELS", 32, ours=True, least=POSITIVE)
    class_dim: int = setting("MODEL.R2C.CLASS_DIM", 128, ours=True, least=NOT_NEGATIVE)
    dropout: float = setting("MODEL.R2C.DROPOUT", 0.1, ours=True, least=NOT_NEGATIVE)
    canvas: tuple[int, ...] = setting("MODEL.R2C.CANVAS", (), ours=True)
    frozen_statistics: str = setting("MODEL.R2C.FROZEN_STATISTICS", "stored", ours=True, choices=("stored", "batch"))

    def _rules(self) -> Rules:
        return [
            (self.dropout < 1, "MODEL.R2C.DROPOUT must be below 1"),
            (
                len(self.canvas) in (0, 2) and all(side > 0 for side in self.canvas),
                "MODEL.R2C.CANVAS must hold the height and the width of the canvas, or nothing",
            ),
        ]
