"""The built-in detector's settings, read from Detectron2 YAML files.

Every field carries the Detectron2 key it stands for, and Detectron2's default. Keys fall into four groups:

- read: the fields below;
- ours: keys that Detectron2 does not have (`OUR_KEYS`), written only where they differ from their default;
- fixed: keys that Detectron2 reads but for which only one value is built here (`FIXED`): another value is an error;
- ignored: what a C4 Faster R-CNN does not read, or what belongs to the training run (`IGNORED`).

Anything else is an error that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from pathlib import Path
from typing import Any

import yaml

from detector.config_file import (
    FIXED,
    IGNORED,
    PORT_KEYS,
    convert,
    decode,
    flatten,
    load_tree,
    merge_bases,
    nest,
    plain,
)

POOLER_TYPES = ("ROIAlignV2", "ROIAlign", "ROIPool")
NORMS = ("FrozenBN", "BN", "SyncBN", "GN")
BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
STEM_POOLS = ("max", "caffe_max", "none")

# Keys whose numbers (those in lists too) must be above 0, or at least 0. Detectron2 gives some values below a meaning
# (MIN_SIZE_TEST 0, DETECTIONS_PER_IMAGE -1); they are not built here.
POSITIVE = (
    *("INPUT.MIN_SIZE_TRAIN", "INPUT.MAX_SIZE_TRAIN", "INPUT.MIN_SIZE_TEST", "INPUT.MAX_SIZE_TEST", "MODEL.PIXEL_STD"),
    *("MODEL.RESNETS.NUM_GROUPS", "MODEL.RESNETS.WIDTH_PER_GROUP"),
    *("MODEL.RESNETS.STEM_OUT_CHANNELS", "MODEL.RESNETS.RES2_OUT_CHANNELS"),
    *("MODEL.ANCHOR_GENERATOR.SIZES", "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"),
    *("MODEL.RPN.BATCH_SIZE_PER_IMAGE", "MODEL.RPN.BBOX_REG_WEIGHTS"),
    *("MODEL.RPN.PRE_NMS_TOPK_TRAIN", "MODEL.RPN.PRE_NMS_TOPK_TEST"),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", "MODEL.RPN.POST_NMS_TOPK_TEST"),
    *("MODEL.ROI_HEADS.NUM_CLASSES", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE"),
    *("TEST.DETECTIONS_PER_IMAGE", "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS"),
    *("MODEL.ROI_BOX_HEAD.ATTRIBUTES.EMBEDDING_DIM", "MODEL.ROI_BOX_HEAD.ATTRIBUTES.HIDDEN_DIM"),
)
NOT_NEGATIVE = (
    *("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", "MODEL.RPN.POSITIVE_FRACTION", "MODEL.ROI_HEADS.POSITIVE_FRACTION"),
    *("MODEL.RPN.NMS_THRESH", "MODEL.ROI_HEADS.NMS_THRESH_TEST"),
    *("MODEL.RPN.LOSS_WEIGHT", "MODEL.RPN.BBOX_REG_LOSS_WEIGHT", "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT"),
    *("MODEL.RPN.SMOOTH_L1_BETA", "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA", "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO"),
    *("MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES", "MODEL.ROI_BOX_HEAD.ATTRIBUTES.LOSS_WEIGHT"),
)


def _key(key: str, default: Any, *, ours: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"key": key, "ours": ours})


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """How images reach the network. Sizes are pixels of the resized image."""

    format: str = _key("INPUT.FORMAT", "BGR")
    pixel_mean: tuple[float, ...] = _key("MODEL.PIXEL_MEAN", (103.53, 116.28, 123.675))
    pixel_std: tuple[float, ...] = _key("MODEL.PIXEL_STD", (1.0, 1.0, 1.0))
    min_size_train: tuple[int, ...] = _key("INPUT.MIN_SIZE_TRAIN", (800,))
    min_size_train_sampling: str = _key("INPUT.MIN_SIZE_TRAIN_SAMPLING", "choice")
    max_size_train: int = _key("INPUT.MAX_SIZE_TRAIN", 1333)
    min_size_test: int = _key("INPUT.MIN_SIZE_TEST", 800)
    max_size_test: int = _key("INPUT.MAX_SIZE_TEST", 1333)


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Stem, res2 .. res4 and (in the RoI head) res5.

    `freeze_at`: 0 trains everything, 1 freezes the stem, 2 also res2, and so on. `res5_dilation` 2: all res5 blocks
    have stride 1 and their 3x3 convolutions dilation 2 (VL-BERT, bottom-up attention); stock Detectron2 ignores the
    key in `Res5ROIHeads`. `stem_pool`: "max" 3x3/2 padding 1; "caffe_max" 3x3/2 without padding, sizes rounded up;
    "none" leaves the stem at stride 2, so that res4 has stride 8.
    """

    depth: int = _key("MODEL.RESNETS.DEPTH", 50)
    norm: str = _key("MODEL.RESNETS.NORM", "FrozenBN")
    num_groups: int = _key("MODEL.RESNETS.NUM_GROUPS", 1)
    width_per_group: int = _key("MODEL.RESNETS.WIDTH_PER_GROUP", 64)
    stem_out_channels: int = _key("MODEL.RESNETS.STEM_OUT_CHANNELS", 64)
    res2_out_channels: int = _key("MODEL.RESNETS.RES2_OUT_CHANNELS", 256)
    stride_in_1x1: bool = _key("MODEL.RESNETS.STRIDE_IN_1X1", True)
    res5_dilation: int = _key("MODEL.RESNETS.RES5_DILATION", 1)
    freeze_at: int = _key("MODEL.BACKBONE.FREEZE_AT", 2)
    stem_pool: str = _key("MODEL.RESNETS.STEM_POOL", "max", ours=True)

    @property
    def res4_channels(self) -> int:
        return self.res2_out_channels * 4

    @property
    def res5_channels(self) -> int:
        return self.res2_out_channels * 8

    @property
    def res4_stride(self) -> int:
        """Pixels of the network input per cell of res4."""
        return 8 if self.stem_pool == "none" else 16


@dataclasses.dataclass(frozen=True)
class AnchorConfig:
    """Anchors of res4: the square roots of their areas in pixels of the resized image, and their height / width.

    `cell_anchors` gives their corners (x1, y1, x2, y2) relative to the cell's origin instead, in the same order (sizes
    outer, ratios inner): for detectors whose anchors were rounded (Caffe). Empty = from sizes and ratios.
    """

    sizes: tuple[tuple[float, ...], ...] = _key("MODEL.ANCHOR_GENERATOR.SIZES", ((32.0, 64.0, 128.0, 256.0, 512.0),))
    aspect_ratios: tuple[tuple[float, ...], ...] = _key("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", ((0.5, 1.0, 2.0),))
    offset: float = _key("MODEL.ANCHOR_GENERATOR.OFFSET", 0.0)
    cell_anchors: tuple[tuple[float, ...], ...] = _key("MODEL.ANCHOR_GENERATOR.CELL_ANCHORS", (), ours=True)


@dataclasses.dataclass(frozen=True)
class RPNConfig:
    """Region proposal network: matching, sampling, losses, and the choice of proposals."""

    conv_dims: tuple[int, ...] = _key("MODEL.RPN.CONV_DIMS", (-1,))
    boundary_thresh: int = _key("MODEL.RPN.BOUNDARY_THRESH", -1)
    iou_thresholds: tuple[float, ...] = _key("MODEL.RPN.IOU_THRESHOLDS", (0.3, 0.7))
    iou_labels: tuple[int, ...] = _key("MODEL.RPN.IOU_LABELS", (0, -1, 1))
    batch_size_per_image: int = _key("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 256)
    positive_fraction: float = _key("MODEL.RPN.POSITIVE_FRACTION", 0.5)
    box_loss_type: str = _key("MODEL.RPN.BBOX_REG_LOSS_TYPE", "smooth_l1")
    box_loss_weight: float = _key("MODEL.RPN.BBOX_REG_LOSS_WEIGHT", 1.0)
    box_weights: tuple[float, ...] = _key("MODEL.RPN.BBOX_REG_WEIGHTS", (1.0, 1.0, 1.0, 1.0))
    smooth_l1_beta: float = _key("MODEL.RPN.SMOOTH_L1_BETA", 0.0)
    loss_weight: float = _key("MODEL.RPN.LOSS_WEIGHT", 1.0)
    pre_nms_topk_train: int = _key("MODEL.RPN.PRE_NMS_TOPK_TRAIN", 12000)
    pre_nms_topk_test: int = _key("MODEL.RPN.PRE_NMS_TOPK_TEST", 6000)
    post_nms_topk_train: int = _key("MODEL.RPN.POST_NMS_TOPK_TRAIN", 2000)
    post_nms_topk_test: int = _key("MODEL.RPN.POST_NMS_TOPK_TEST", 1000)
    nms_thresh: float = _key("MODEL.RPN.NMS_THRESH", 0.7)
    min_size: int = _key("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 0)


@dataclasses.dataclass(frozen=True)
class ROIHeadsConfig:
    """RoIs: sampling for training, thresholds for testing, pooling, and the box predictor.

    `features_of` says what the features of detected boxes are taken from: "final", the refined boxes, pooled again; or
    "proposal", the proposals they came from (what bottom-up attention does).
    """

    num_classes: int = _key("MODEL.ROI_HEADS.NUM_CLASSES", 80)
    iou_thresholds: tuple[float, ...] = _key("MODEL.ROI_HEADS.IOU_THRESHOLDS", (0.5,))
    iou_labels: tuple[int, ...] = _key("MODEL.ROI_HEADS.IOU_LABELS", (0, 1))
    batch_size_per_image: int = _key("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 512)
    positive_fraction: float = _key("MODEL.ROI_HEADS.POSITIVE_FRACTION", 0.25)
    append_objects: bool = _key("MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", True)
    score_thresh: float = _key("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.05)
    nms_thresh: float = _key("MODEL.ROI_HEADS.NMS_THRESH_TEST", 0.5)
    detections_per_image: int = _key("TEST.DETECTIONS_PER_IMAGE", 100)
    pooler_type: str = _key("MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlignV2")
    pooler_resolution: int = _key("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 14)
    pooler_sampling_ratio: int = _key("MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO", 0)
    box_loss_type: str = _key("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE", "smooth_l1")
    box_loss_weight: float = _key("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT", 1.0)
    box_weights: tuple[float, ...] = _key("MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (10.0, 10.0, 5.0, 5.0))
    smooth_l1_beta: float = _key("MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA", 0.0)
    class_agnostic_boxes: bool = _key("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", False)
    features_of: str = _key("MODEL.ROI_HEADS.FEATURES_OF", "final", ours=True)


@dataclasses.dataclass(frozen=True)
class AttributeConfig:
    """Optional attribute head of bottom-up attention; 0 classes = no head. "No attribute" is an extra, last class."""

    num_classes: int = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES", 0, ours=True)
    embedding_dim: int = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.EMBEDDING_DIM", 256, ours=True)
    hidden_dim: int = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.HIDDEN_DIM", 512, ours=True)
    loss_weight: float = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.LOSS_WEIGHT", 0.2, ours=True)


@dataclasses.dataclass(frozen=True)
class DetectorConfig:
    """All settings of the built-in detector. `weights` is kept for the caller; building a detector does not load it."""

    weights: str = _key("MODEL.WEIGHTS", "")
    input: InputConfig = dataclasses.field(default_factory=InputConfig)
    resnet: ResNetConfig = dataclasses.field(default_factory=ResNetConfig)
    anchors: AnchorConfig = dataclasses.field(default_factory=AnchorConfig)
    rpn: RPNConfig = dataclasses.field(default_factory=RPNConfig)
    roi_heads: ROIHeadsConfig = dataclasses.field(default_factory=ROIHeadsConfig)
    attributes: AttributeConfig = dataclasses.field(default_factory=AttributeConfig)

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def from_yaml(cls, source: str | Path | dict[str, Any]) -> DetectorConfig:
        """Read a Detectron2 YAML file, or a nested dict of the same keys. `_BASE_` files are merged first.

        Raises:
            FileNotFoundError: the file or a `_BASE_` of it does not exist.
            ValueError: a key is unknown, has a value of the wrong type, or a value that is not supported.
        """
        if isinstance(source, dict):
            name, tree = "detector config", merge_bases(source, Path())
        else:
            name, tree = str(source), load_tree(Path(source))
        return cls.from_flat(flatten(tree), name)

    @classmethod
    def from_flat(cls, flat: dict[str, Any], name: str = "detector config") -> DetectorConfig:
        """Build from dotted keys, e.g. {"MODEL.RESNETS.DEPTH": 101}; `name` is used in error messages."""
        known = {key for _, _, key, _ in _fields(cls)}
        for key, value in flat.items():
            if key in known:
                continue
            if key in FIXED:
                if decode(value) != FIXED[key]:
                    raise ValueError(f"{name}: {key} = {value!r} is not supported; the only value is {FIXED[key]!r}.")
            elif key == "INPUT.RANDOM_FLIP" and decode(value) not in ("horizontal", "none"):
                raise ValueError(
                    f"{name}: {key} = {value!r} is not supported; images are mirrored left and right, as often as the "
                    "run's data.flip says."
                )
            elif not key.startswith(IGNORED):
                close = difflib.get_close_matches(key, [*known, *FIXED], n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                if key in PORT_KEYS:
                    hint = f" It belongs to a port of bottom-up attention; here it is {PORT_KEYS[key]}."
                raise ValueError(f"{name}: {key} is neither a key of Detectron2 nor one of this project.{hint}")
        groups: dict[str, dict[str, Any]] = {}
        for group, field, key, hint in _fields(cls):
            if key in flat:
                groups.setdefault(group, {})[field.name] = convert(flat[key], hint, f"{name}: {key}")
        parts = {field.name: field.default_factory for field in dataclasses.fields(cls) if field.name != "weights"}
        try:
            return cls(**groups.get("", {}), **{part: make(**groups.get(part, {})) for part, make in parts.items()})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def to_flat(self) -> dict[str, Any]:
        """Dotted keys and plain values; keys of ours only where they differ from their default."""
        flat = dict(FIXED)
        for group, field, key, _ in _fields(type(self)):
            value = getattr(getattr(self, group) if group else self, field.name)
            if not field.metadata["ours"] or value != field.default:
                flat[key] = plain(value)
        return flat

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal config, and Detectron2 too if no key of ours is used."""
        return yaml.safe_dump(nest(self.to_flat()), default_flow_style=None, sort_keys=True)


def check(config: DetectorConfig) -> None:
    """Raise a ValueError that names the first key whose value, alone or with others, makes no detector."""
    resnet, rpn, heads = config.resnet, config.rpn, config.roi_heads
    rules: list[tuple[bool, str]] = [
        (config.input.format in ("BGR", "RGB"), "INPUT.FORMAT must be BGR or RGB"),
        (len(config.input.pixel_mean) == 3, "MODEL.PIXEL_MEAN must have 3 values"),
        (len(config.input.pixel_std) == 3, "MODEL.PIXEL_STD must have 3 values"),
        (len(config.input.min_size_train) > 0, "INPUT.MIN_SIZE_TRAIN must not be empty"),
        (
            config.input.min_size_train_sampling in ("choice", "range"),
            "INPUT.MIN_SIZE_TRAIN_SAMPLING must be choice or range",
        ),
        (resnet.depth in (18, 34, 50, 101, 152), "MODEL.RESNETS.DEPTH must be 18, 34, 50, 101 or 152"),
        (resnet.norm in NORMS, f"MODEL.RESNETS.NORM must be one of {', '.join(NORMS)}"),
        (resnet.res5_dilation in (1, 2), "MODEL.RESNETS.RES5_DILATION must be 1 or 2"),
        (0 <= resnet.freeze_at <= 5, "MODEL.BACKBONE.FREEZE_AT must be 0 .. 5"),
        (resnet.stem_pool in STEM_POOLS, f"MODEL.RESNETS.STEM_POOL must be one of {', '.join(STEM_POOLS)}"),
        (resnet.depth >= 50 or resnet.num_groups == 1, "MODEL.RESNETS.NUM_GROUPS must be 1 for depths 18 and 34"),
        (len(config.anchors.sizes) == 1, "MODEL.ANCHOR_GENERATOR.SIZES must be one list in a list (one feature map)"),
        (len(config.anchors.aspect_ratios) == 1, "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS must be one list in a list"),
        (0 <= config.anchors.offset < 1, "MODEL.ANCHOR_GENERATOR.OFFSET must be in [0, 1)"),
        (
            _is_one_box_per_anchor(config.anchors),
            "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS must hold [x1, y1, x2, y2] for each pair of SIZES and ASPECT_RATIOS",
        ),
        (len(rpn.conv_dims) > 0, "MODEL.RPN.CONV_DIMS must not be empty"),
        (all(dim == -1 or dim > 0 for dim in rpn.conv_dims), "MODEL.RPN.CONV_DIMS must hold positive widths or -1"),
        (rpn.positive_fraction <= 1, "MODEL.RPN.POSITIVE_FRACTION must be at most 1"),
        (heads.positive_fraction <= 1, "MODEL.ROI_HEADS.POSITIVE_FRACTION must be at most 1"),
        (
            heads.pooler_type in POOLER_TYPES,
            f"MODEL.ROI_BOX_HEAD.POOLER_TYPE must be one of {', '.join(POOLER_TYPES)}",
        ),
        (heads.features_of in ("final", "proposal"), "MODEL.ROI_HEADS.FEATURES_OF must be final or proposal"),
    ]
    for part, prefix in ((rpn, "MODEL.RPN"), (heads, "MODEL.ROI_HEADS")):
        box = "MODEL.RPN" if part is rpn else "MODEL.ROI_BOX_HEAD"
        rules += [
            (
                len(part.iou_labels) == len(part.iou_thresholds) + 1 and set(part.iou_labels) <= {-1, 0, 1},
                f"{prefix}.IOU_LABELS must hold one of -1, 0, 1 per interval of {prefix}.IOU_THRESHOLDS",
            ),
            (
                list(part.iou_thresholds) == sorted(part.iou_thresholds) and min(part.iou_thresholds, default=1) > 0,
                f"{prefix}.IOU_THRESHOLDS must be positive and rise",
            ),
            (part.box_loss_type in BOX_LOSSES, f"{box}.BBOX_REG_LOSS_TYPE must be one of {', '.join(BOX_LOSSES)}"),
            (len(part.box_weights) == 4, f"{box}.BBOX_REG_WEIGHTS must have 4 values"),
        ]
    for holds, message in rules:
        if not holds:
            raise ValueError(f"{message}.")
    flat = config.to_flat()
    for key, value in flat.items():
        if any(isinstance(number, float) and not math.isfinite(number) for number in _numbers(value)):
            raise ValueError(f"{key} is {value}; it must be finite.")
    for keys, allows_zero, needed in ((POSITIVE, False, "positive"), (NOT_NEGATIVE, True, "0 or more")):
        for key in keys:
            value = flat.get(key, 1)  # keys of ours have a good value unless they are written
            numbers = _numbers(value)
            if not numbers or not all(number > 0 or (allows_zero and number == 0) for number in numbers):
                raise ValueError(f"{key} is {value}; it must be {needed}.")


def _numbers(value: Any) -> list[float]:
    """All numbers of a nested list."""
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else [value]


def _is_one_box_per_anchor(anchors: AnchorConfig) -> bool:
    # lists of different lengths are refused by rules of their own
    number = sum(len(ratios) * len(sizes) for sizes, ratios in zip(anchors.sizes, anchors.aspect_ratios, strict=False))
    is_box = all(len(cell) == 4 and cell[0] < cell[2] and cell[1] < cell[3] for cell in anchors.cell_anchors)
    return not anchors.cell_anchors or (is_box and len(anchors.cell_anchors) == number)


def _fields(cls: type) -> list[tuple[str, dataclasses.Field, str, Any]]:
    """(group, field, dotted key, type) of every leaf; the group of a top-level leaf is ""."""
    leaves = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "key" in field.metadata:
            leaves.append(("", field, field.metadata["key"], hints[field.name]))
        else:
            leaves += [(field.name, *leaf[1:]) for leaf in _fields(hints[field.name])]
    return leaves


OUR_KEYS: tuple[str, ...] = tuple(key for _, field, key, _ in _fields(DetectorConfig) if field.metadata["ours"])
