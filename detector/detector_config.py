"""The built-in detector's settings, read from Detectron2 YAML files.

Every field states its Detectron2 key and has Detectron2's default. Keys fall into four groups:

- read: the fields below;
- ours: keys that Detectron2 does not have (`OUR_KEYS`), written only where they differ from their default;
- fixed: keys that Detectron2 reads but for which only one value is built here (`FIXED`): any other value is an error;
- ignored: keys that a C4 Faster R-CNN does not read, or that belong to the training run (`IGNORED`).

Any other key is an error that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Sequence
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

BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
# Lower bounds of numbers (of all numbers of a list). Detectron2 gives a meaning to some values below (MIN_SIZE_TEST 0,
# DETECTIONS_PER_IMAGE -1); they are not built here.
POSITIVE, NOT_NEGATIVE = "positive", "0 or more"

Rules = list[tuple[bool, str]]  # whether a rule holds, and the rule in words


def _key(key: str, default: Any, *, ours: bool = False, **limits: Any) -> Any:
    """A field; `limits` are arguments of `_check_value`."""
    return dataclasses.field(default=default, metadata={"key": key, "ours": ours, "limits": limits})


class _Group:
    """Settings of one part of the detector.

    Raises:
        ValueError: a value from which, alone or with others of the group, no detector can be built; names its key.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field.metadata["key"], plain(getattr(self, field.name)), **field.metadata["limits"])
        for holds, message in self._rules():
            if not holds:
                raise ValueError(f"{message}.")

    def _rules(self) -> Rules:
        """Rules that are more than limits of one value."""
        return []


def _check_value(
    key: str, value: Any, *, choices: Sequence[Any] = (), length: int | None = None, least: str | None = None
) -> None:
    if choices and value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(map(str, choices))}, not {value}.")
    if length is not None and len(value) != length:
        raise ValueError(f"{key} must have {length} values, not {len(value)}.")
    leaves = _leaves(value)
    if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves):
        raise ValueError(f"{key} is {value}; it must be finite.")
    if least and (not leaves or not all(leaf > 0 or (leaf == 0 and least == NOT_NEGATIVE) for leaf in leaves)):
        raise ValueError(f"{key} is {value}; it must be {least}.")


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
class InputConfig(_Group):
    """How images reach the network. Sizes are pixels of the resized image."""

    format: str = _key("INPUT.FORMAT", "BGR", choices=("BGR", "RGB"))
    pixel_mean: tuple[float, ...] = _key("MODEL.PIXEL_MEAN", (103.53, 116.28, 123.675), length=3)
    pixel_std: tuple[float, ...] = _key("MODEL.PIXEL_STD", (1.0, 1.0, 1.0), length=3, least=POSITIVE)
    min_size_train: tuple[int, ...] = _key("INPUT.MIN_SIZE_TRAIN", (800,), least=POSITIVE)
    min_size_train_sampling: str = _key("INPUT.MIN_SIZE_TRAIN_SAMPLING", "choice", choices=("choice", "range"))
    max_size_train: int = _key("INPUT.MAX_SIZE_TRAIN", 1333, least=POSITIVE)
    min_size_test: int = _key("INPUT.MIN_SIZE_TEST", 800, least=POSITIVE)
    max_size_test: int = _key("INPUT.MAX_SIZE_TEST", 1333, least=POSITIVE)


@dataclasses.dataclass(frozen=True)
class ResNetConfig(_Group):
    """Stem, res2 .. res4 and (in the RoI head) res5.

    `freeze_at`: 0 trains all stages, 1 freezes the stem, 2 also res2, and so on. `res5_dilation` 2: all res5 blocks
    have stride 1 and their 3x3 convolutions dilation 2 (VL-BERT, bottom-up attention); stock Detectron2 ignores the
    key in `Res5ROIHeads`. `stem_pool`: "max" 3x3/2 padding 1; "caffe_max" 3x3/2 without padding, sizes rounded up;
    "none" leaves the stem at stride 2, so that res4 has stride 8.
    """

    depth: int = _key("MODEL.RESNETS.DEPTH", 50, choices=(18, 34, 50, 101, 152))
    norm: str = _key("MODEL.RESNETS.NORM", "FrozenBN", choices=("FrozenBN", "BN", "SyncBN", "GN"))
    num_groups: int = _key("MODEL.RESNETS.NUM_GROUPS", 1, least=POSITIVE)
    width_per_group: int = _key("MODEL.RESNETS.WIDTH_PER_GROUP", 64, least=POSITIVE)
    stem_out_channels: int = _key("MODEL.RESNETS.STEM_OUT_CHANNELS", 64, least=POSITIVE)
    res2_out_channels: int = _key("MODEL.RESNETS.RES2_OUT_CHANNELS", 256, least=POSITIVE)
    stride_in_1x1: bool = _key("MODEL.RESNETS.STRIDE_IN_1X1", True)
    res5_dilation: int = _key("MODEL.RESNETS.RES5_DILATION", 1, choices=(1, 2))
    freeze_at: int = _key("MODEL.BACKBONE.FREEZE_AT", 2, choices=(0, 1, 2, 3, 4, 5))
    stem_pool: str = _key("MODEL.RESNETS.STEM_POOL", "max", ours=True, choices=("max", "caffe_max", "none"))

    def _rules(self) -> Rules:
        return [(self.depth >= 50 or self.num_groups == 1, "MODEL.RESNETS.NUM_GROUPS must be 1 for depths 18 and 34")]

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
class AnchorConfig(_Group):
    """Anchors of res4: the square roots of their areas in pixels of the resized image, and their height / width.

    `cell_anchors` gives their corners (x1, y1, x2, y2) relative to the cell's origin instead, in the same order (sizes
    outer, ratios inner): for detectors whose anchors were rounded (Caffe). Empty = from sizes and ratios.
    """

    sizes: tuple[tuple[float, ...], ...] = _key(
        "MODEL.ANCHOR_GENERATOR.SIZES", ((32.0, 64.0, 128.0, 256.0, 512.0),), least=POSITIVE
    )
    aspect_ratios: tuple[tuple[float, ...], ...] = _key(
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", ((0.5, 1.0, 2.0),), least=POSITIVE
    )
    offset: float = _key("MODEL.ANCHOR_GENERATOR.OFFSET", 0.0)
    cell_anchors: tuple[tuple[float, ...], ...] = _key("MODEL.ANCHOR_GENERATOR.CELL_ANCHORS", (), ours=True)

    def _rules(self) -> Rules:
        number = sum(map(len, self.sizes)) * sum(map(len, self.aspect_ratios))  # one list each, by the first two rules
        are_boxes = all(len(cell) == 4 and cell[0] < cell[2] and cell[1] < cell[3] for cell in self.cell_anchors)
        return [
            (len(self.sizes) == 1, "MODEL.ANCHOR_GENERATOR.SIZES must be one list in a list (one feature map)"),
            (len(self.aspect_ratios) == 1, "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS must be one list in a list"),
            (0 <= self.offset < 1, "MODEL.ANCHOR_GENERATOR.OFFSET must be in [0, 1)"),
            (
                not self.cell_anchors or (are_boxes and len(self.cell_anchors) == number),
                "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS must hold [x1, y1, x2, y2] for each pair of SIZES and "
                "ASPECT_RATIOS",
            ),
        ]


@dataclasses.dataclass(frozen=True)
class RPNConfig(_Group):
    """Region proposal network: matching, sampling, losses, and the choice of proposals."""

    conv_dims: tuple[int, ...] = _key("MODEL.RPN.CONV_DIMS", (-1,))
    boundary_thresh: int = _key("MODEL.RPN.BOUNDARY_THRESH", -1)
    iou_thresholds: tuple[float, ...] = _key("MODEL.RPN.IOU_THRESHOLDS", (0.3, 0.7))
    iou_labels: tuple[int, ...] = _key("MODEL.RPN.IOU_LABELS", (0, -1, 1))
    batch_size_per_image: int = _key("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 256, least=POSITIVE)
    positive_fraction: float = _key("MODEL.RPN.POSITIVE_FRACTION", 0.5, least=NOT_NEGATIVE)
    box_loss_type: str = _key("MODEL.RPN.BBOX_REG_LOSS_TYPE", "smooth_l1", choices=BOX_LOSSES)
    box_loss_weight: float = _key("MODEL.RPN.BBOX_REG_LOSS_WEIGHT", 1.0, least=NOT_NEGATIVE)
    box_weights: tuple[float, ...] = _key("MODEL.RPN.BBOX_REG_WEIGHTS", (1.0, 1.0, 1.0, 1.0), length=4, least=POSITIVE)
    smooth_l1_beta: float = _key("MODEL.RPN.SMOOTH_L1_BETA", 0.0, least=NOT_NEGATIVE)
    loss_weight: float = _key("MODEL.RPN.LOSS_WEIGHT", 1.0, least=NOT_NEGATIVE)
    pre_nms_topk_train: int = _key("MODEL.RPN.PRE_NMS_TOPK_TRAIN", 12000, least=POSITIVE)
    pre_nms_topk_test: int = _key("MODEL.RPN.PRE_NMS_TOPK_TEST", 6000, least=POSITIVE)
    post_nms_topk_train: int = _key("MODEL.RPN.POST_NMS_TOPK_TRAIN", 2000, least=POSITIVE)
    post_nms_topk_test: int = _key("MODEL.RPN.POST_NMS_TOPK_TEST", 1000, least=POSITIVE)
    nms_thresh: float = _key("MODEL.RPN.NMS_THRESH", 0.7, least=NOT_NEGATIVE)
    min_size: int = _key("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", 0, least=NOT_NEGATIVE)

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
class ROIHeadsConfig(_Group):
    """RoIs: sampling for training, thresholds for testing, pooling, and the box predictor.

    `features_of` names the boxes that the features of detections are taken from: "final", the refined boxes, pooled
    again; or "proposal", the proposals that they came from (as in bottom-up attention).
    """

    num_classes: int = _key("MODEL.ROI_HEADS.NUM_CLASSES", 80, least=POSITIVE)
    iou_thresholds: tuple[float, ...] = _key("MODEL.ROI_HEADS.IOU_THRESHOLDS", (0.5,))
    iou_labels: tuple[int, ...] = _key("MODEL.ROI_HEADS.IOU_LABELS", (0, 1))
    batch_size_per_image: int = _key("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 512, least=POSITIVE)
    positive_fraction: float = _key("MODEL.ROI_HEADS.POSITIVE_FRACTION", 0.25, least=NOT_NEGATIVE)
    append_objects: bool = _key("MODEL.ROI_HEADS.PROPOSAL_APPEND_GT", True)
    score_thresh: float = _key("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.05)
    nms_thresh: float = _key("MODEL.ROI_HEADS.NMS_THRESH_TEST", 0.5, least=NOT_NEGATIVE)
    detections_per_image: int = _key("TEST.DETECTIONS_PER_IMAGE", 100, least=POSITIVE)
    pooler_type: str = _key(
        "MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlignV2", choices=("ROIAlignV2", "ROIAlign", "ROIPool")
    )
    pooler_resolution: int = _key("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", 14, least=POSITIVE)
    pooler_sampling_ratio: int = _key("MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO", 0, least=NOT_NEGATIVE)
    box_loss_type: str = _key("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE", "smooth_l1", choices=BOX_LOSSES)
    box_loss_weight: float = _key("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT", 1.0, least=NOT_NEGATIVE)
    box_weights: tuple[float, ...] = _key(
        "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (10.0, 10.0, 5.0, 5.0), length=4, least=POSITIVE
    )
    smooth_l1_beta: float = _key("MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA", 0.0, least=NOT_NEGATIVE)
    class_agnostic_boxes: bool = _key("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", False)
    features_of: str = _key("MODEL.ROI_HEADS.FEATURES_OF", "final", ours=True, choices=("final", "proposal"))

    def _rules(self) -> Rules:
        return _sampling_rules(self, "MODEL.ROI_HEADS")


@dataclasses.dataclass(frozen=True)
class AttributeConfig(_Group):
    """Optional attribute head of bottom-up attention; 0 classes = no head. "No attribute" is an extra, last class."""

    num_classes: int = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES", 0, ours=True, least=NOT_NEGATIVE)
    embedding_dim: int = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.EMBEDDING_DIM", 256, ours=True, least=POSITIVE)
    hidden_dim: int = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.HIDDEN_DIM", 512, ours=True, least=POSITIVE)
    loss_weight: float = _key("MODEL.ROI_BOX_HEAD.ATTRIBUTES.LOSS_WEIGHT", 0.2, ours=True, least=NOT_NEGATIVE)


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
        for key, value in flat.items():
            if key in KEYS:
                continue
            if key in FIXED:
                if decode(value) != FIXED[key]:
                    raise ValueError(f"{name}: {key} = {value!r} is not supported; the only value is {FIXED[key]!r}.")
            elif key == "INPUT.RANDOM_FLIP" and decode(value) not in ("horizontal", "none"):
                raise ValueError(
                    f"{name}: {key} = {value!r} is not supported; images are mirrored left and right only, with the "
                    "probability data.flip."
                )
            elif not key.startswith(IGNORED):
                close = difflib.get_close_matches(key, [*KEYS, *FIXED], n=1)
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
        """Dotted keys and plain values; our keys only where they differ from their default."""
        flat = dict(FIXED)
        for group, field, key, _ in _fields(DetectorConfig):  # a subclass may have more
            value = getattr(getattr(self, group) if group else self, field.name)
            if not field.metadata["ours"] or value != field.default:
                flat[key] = plain(value)
        return flat

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal config, and Detectron2 too if none of our keys is used."""
        return yaml.safe_dump(nest(self.to_flat()), default_flow_style=None, sort_keys=True)


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


KEYS: tuple[str, ...] = tuple(key for _, _, key, _ in _fields(DetectorConfig))
OUR_KEYS: tuple[str, ...] = tuple(key for _, field, key, _ in _fields(DetectorConfig) if field.metadata["ours"])
