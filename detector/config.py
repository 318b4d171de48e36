"""The built-in detector's settings, read from Detectron2 YAML files.

Every field (see `detector.config`) states its Detectron2 key and has Detectron2's default. Keys fall into four
groups:

- read: the fields below;
- ours: keys that Detectron2 does not have (`OUR_KEYS`), written only where they differ from their default;
- fixed: keys that Detectron2 reads but for which only one value is built here (`FIXED`): any other value is an error;
- ignored: keys that a Faster R-CNN does not read, or that belong to the training run (`IGNORED`); without FPN or box
  head (`StandardROIHeads`) also the keys of these parts.

Any other key is an error that names it. Two keys decide the architecture: MODEL.BACKBONE.NAME (with FPN or without) and
MODEL.ROI_HEADS.NAME (res5 on RoI maps, or a box head).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import itertools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from detector.errors import MissingFileError, UserError, user_path
from detector.io import read_yaml

# Reading Detectron2 YAML: `_BASE_` files, dotted keys, Python literals as values, keys that are not supported.


MAX_FILES = 50  # that a config is made of
LONGEST_PATH = 1000  # characters of the name of a base
LONGEST_LITERAL = 10_000  # characters of a text that is read as a Python literal

# Keys that have one possible value here.
FIXED: dict[str, Any] = {
    "VERSION": 2,
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
    "MODEL.LOAD_PROPOSALS": False,
    "MODEL.MASK_ON": False,
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

# What is built instead, for the keys that published files often set to another value.
SUPPORTED: dict[str, str] = {
    "MODEL.META_ARCHITECTURE": "two-stage detectors of boxes are supported: GeneralizedRCNN with C4, DC5 or FPN",
    "MODEL.MASK_ON": "only the box branch is supported; MODEL.MASK_ON: False reads the box part of a Mask R-CNN",
    "MODEL.KEYPOINT_ON": "only the box branch is supported; MODEL.KEYPOINT_ON: False reads the box part",
}

# Keys of the bottom-up attention ports, and how the same setting is written here.
PORT_KEYS: dict[str, str] = {
    "MODEL.CAFFE_MAXPOOL": "MODEL.RESNETS.STEM_POOL: caffe_max",
    "MODEL.PROPOSAL_GENERATOR.HID_CHANNELS": "MODEL.RPN.CONV_DIMS: [512]",
    "MODEL.ROI_BOX_HEAD.RES5HALVE": "MODEL.RESNETS.RES5_DILATION: 2 for false",
    "MODEL.ROI_BOX_HEAD.ATTR": "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES: 400",
    "MODEL.ROI_BOX_HEAD.NUM_ATTRS": "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES: 400",
    "MODEL.BUA.CAFFE": "configs/detector/bottom_up_attention_caffe.yaml",
}

# Prefixes of keys (or whole keys) that do not change the output of this model.
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
    "INPUT.RANDOM_FLIP",  # augmentation belongs to the data config
    "MODEL.DEVICE",
    "MODEL.ANCHOR_GENERATOR.ANGLES",
    "MODEL.PANOPTIC_FPN.",
    "MODEL.RESNETS.DEFORM_MODULATED",
    "MODEL.RESNETS.DEFORM_NUM_GROUPS",
    "MODEL.RETINANET.",
    "MODEL.ROI_BOX_CASCADE_HEAD.",
    "MODEL.ROI_BOX_HEAD.FED_LOSS_",
    "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES",
    "MODEL.ROI_KEYPOINT_HEAD.",
    "MODEL.ROI_MASK_HEAD.",
    "MODEL.SEM_SEG_HEAD.",
    "TEST.AUG.",
    "TEST.EVAL_PERIOD",
    "TEST.EXPECTED_RESULTS",
    "TEST.KEYPOINT_OKS_SIGMAS",
    "TEST.PRECISE_BN.",
)


def load_tree(path: Path, chain: tuple[Path, ...] = (), loaded: list[Path] | None = None) -> dict[str, Any]:
    """A YAML file with its `_BASE_` files merged below it.

    Args:
        path: the file.
        chain: the files that led here.
        loaded: all files so far, to which this one is added.

    Raises:
        MissingFileError: the file does not exist.
        UserError: it is not a YAML mapping, is its own base, or has too many bases.
    """
    loaded = [] if loaded is None else loaded
    if not path.is_file():
        raise MissingFileError(f"{path}: no such config file" + (f" (_BASE_ of {chain[-1]})." if chain else "."))
    if path.resolve() in chain:
        raise UserError(f"{path}: _BASE_ leads back to this file; remove it from one of the files.")
    loaded.append(path)
    if len(loaded) > MAX_FILES:
        raise UserError(f"{chain[0]}: its _BASE_ files are more than {MAX_FILES} in all; write fewer files.")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of keys, found {type(tree).__name__}.")
    return merge_bases(tree, path.parent, (*chain, path.resolve()), loaded)


def merge_bases(
    tree: dict[str, Any], folder: Path, chain: tuple[Path, ...] = (), loaded: list[Path] | None = None
) -> dict[str, Any]:
    """`tree` on top of the files (one or a list) in its `_BASE_`, whose paths are relative to `folder`."""
    tree = dict(tree)
    bases = tree.pop("_BASE_", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{folder}: _BASE_ is {bases!r}; it must be the path of a YAML file, or a list of paths.")
    merged: dict[str, Any] = {}
    loaded = [] if loaded is None else loaded
    for base in bases:
        if not base.endswith(".yaml") or "\0" in base or len(base) > LONGEST_PATH:
            raise UserError(
                f"{folder}: _BASE_ is {base[:80]!r}; it must be the path of a YAML file, whose name ends in .yaml."
            )
        merged = _merge(merged, load_tree(folder / user_path(base), chain, loaded))
    return _merge(merged, tree)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"A": {"B": 1}} -> {"A.B": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"A.B": 1} -> {"A": {"B": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def decode(value: Any) -> Any:
    """A value in which strings such as "(640, 672)" are read as Python literals, as in Detectron2."""
    if isinstance(value, str) and len(value) <= LONGEST_LITERAL:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two for thousands of signs
            return value
    return list(value) if isinstance(value, tuple) else value


def convert(value: Any, hint: Any, name: str) -> Any:
    """A YAML value as the type of its field.

    Raises:
        UserError: a value of a different type; the message begins with `name`.
    """
    if hint is not str:
        value = decode(value)
    if isinstance(hint, types.GenericAlias):
        item = hint.__args__[0]
        if isinstance(value, list):
            return tuple(convert(part, item, name) for part in value)
        if item is int and isinstance(value, int):  # Detectron2 accepts a single size too
            return (value,)
    elif isinstance(value, (int, float) if hint is float else hint) and isinstance(value, bool) == (hint is bool):
        return hint(value)
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    raise UserError(f"{name} = {value!r} has the wrong type; expected {shown}.")


def plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    return [plain(item) for item in value] if isinstance(value, tuple) else value


# The groups of the built-in detector's settings: one dataclass per part of the network.


C4_BACKBONE, FPN_BACKBONE = "build_resnet_backbone", "build_resnet_fpn_backbone"
MOBILENET_BACKBONE = "build_mobilenet_v3_large_fpn_backbone"  # not a name of Detectron2, see `detector.fpn`
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
    """The network of R2C on VCR, see `detector.r2c`; `feature_dim` 0 = another detector.

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


@dataclasses.dataclass(frozen=True)
class DetectorConfig(SettingsGroup):
    """All settings of the built-in detector. `weights` is kept for the caller; building a detector does not load it."""

    weights: str = setting("MODEL.WEIGHTS", "")
    backbone: str = setting("MODEL.BACKBONE.NAME", C4_BACKBONE, choices=(C4_BACKBONE, FPN_BACKBONE, MOBILENET_BACKBONE))
    input: InputConfig = dataclasses.field(default_factory=InputConfig)
    resnet: ResNetConfig = dataclasses.field(default_factory=ResNetConfig)
    fpn: FPNConfig = dataclasses.field(default_factory=FPNConfig)
    anchors: AnchorConfig = dataclasses.field(default_factory=AnchorConfig)
    rpn: RPNConfig = dataclasses.field(default_factory=RPNConfig)
    roi_heads: ROIHeadsConfig = dataclasses.field(default_factory=ROIHeadsConfig)
    box_head: BoxHeadConfig = dataclasses.field(default_factory=BoxHeadConfig)
    attributes: AttributeConfig = dataclasses.field(default_factory=AttributeConfig)
    r2c: R2CConfig = dataclasses.field(default_factory=R2CConfig)

    @property
    def is_r2c(self) -> bool:
        """Whether the settings are for the network of R2C, which has no RPN and no box predictor."""
        return self.r2c.feature_dim > 0

    @property
    def is_fpn(self) -> bool:
        return self.backbone == FPN_BACKBONE

    @property
    def is_mobilenet(self) -> bool:
        return self.backbone == MOBILENET_BACKBONE

    @property
    def has_box_head(self) -> bool:
        """Whether a box head reads RoI maps; otherwise res5 does (C4)."""
        return self.roi_heads.name == STANDARD_HEADS

    @property
    def map_shapes(self) -> dict[str, MapShape]:
        """Feature maps of the backbone: the stages of OUT_FEATURES, or with FPN p2 .. p6, named after log2(stride).

        A MobileNet has torchvision's names "0", "1" and "pool".
        """
        if self.is_mobilenet:
            return {"0": MapShape(256, 32), "1": MapShape(256, 32), "pool": MapShape(256, 64)}
        stages = self.resnet.shapes
        if not self.is_fpn:
            return {name: stages[name] for name in self.resnet.out_features}
        strides = [stages[name].stride for name in self.fpn.in_features]
        strides.append(2 * strides[-1])
        return {f"p{stride.bit_length() - 1}": MapShape(self.fpn.out_channels, stride) for stride in strides}

    @property
    def size_divisibility(self) -> int:
        """The sides of the padded batch are made multiples of this many pixels."""
        if self.is_mobilenet:
            return 32
        return self.resnet.shapes[self.fpn.in_features[-1]].stride if self.is_fpn else 1

    @property
    def map_size(self) -> int:
        """Side of the RoI masks: of the pooled maps of a box head, or of the output of res5, which they multiply."""
        side = self.roi_heads.pooler_resolution
        if self.is_r2c:
            return 2 * side
        return side if self.has_box_head or self.resnet.res5_dilation == 2 else (side + 1) // 2

    @property
    def feature_dim(self) -> int:
        """Width of a region feature."""
        head = self.box_head
        if self.is_r2c:
            return self.r2c.feature_dim
        if not self.has_box_head:
            return self.resnet.shapes["res5"].channels
        if head.region_feature == "mean":
            return self.map_shapes[self.roi_heads.in_features[0]].channels
        return head.fc_dim if head.num_fc else head.conv_dim * self.roi_heads.pooler_resolution**2

    def _rules(self) -> Rules:
        rules = _box_head_rules(self) if self.has_box_head else _c4_rules(self)
        rules += _fpn_rules(self) if self.is_fpn else []
        rules += _r2c_rules(self) if self.is_r2c else []
        if not all(holds for holds, _ in rules):
            return rules
        return rules + _map_rules(self) + _anchor_rules(self.anchors, len(self.rpn.in_features))

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
                    supported = SUPPORTED.get(key, f"the only value is {FIXED[key]!r}")
                    raise UserError(f"{name}: {key} = {value!r} is not supported; {supported}.")
            elif key == "INPUT.RANDOM_FLIP" and decode(value) not in ("horizontal", "none"):
                raise UserError(
                    f"{name}: {key} = {value!r} is not supported; images are mirrored left and right only, with the "
                    "probability data.flip."
                )
            elif not key.startswith(IGNORED):
                close = difflib.get_close_matches(key, [*KEYS, *FIXED], n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                if key in PORT_KEYS:
                    hint = f" It belongs to a port of bottom-up attention; here it is {PORT_KEYS[key]}."
                raise UserError(f"{name}: {key} is neither a key of Detectron2 nor one of this project.{hint}")
        unused = _unused_groups(flat.get("MODEL.BACKBONE.NAME"), flat.get("MODEL.ROI_HEADS.NAME"))
        groups: dict[str, dict[str, Any]] = {}
        for group, field, key, hint in _fields(cls):
            if key in flat and (group not in unused or field.metadata["ours"]):
                groups.setdefault(group, {})[field.name] = convert(flat[key], hint, f"{name}: {key}")
        parts = {field.name: field.default_factory for field in dataclasses.fields(cls) if "key" not in field.metadata}
        try:
            return cls(**groups.get("", {}), **{part: make(**groups.get(part, {})) for part, make in parts.items()})
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error

    def to_flat(self) -> dict[str, Any]:
        """Dotted keys and plain values; our keys only where they differ from their default."""
        flat = dict(FIXED)
        unused = _unused_groups(self.backbone, self.roi_heads.name)
        for group, field, key, _ in _fields(DetectorConfig):
            value = getattr(getattr(self, group) if group else self, field.name)
            if value != field.default if field.metadata["ours"] else group not in unused:
                flat[key] = plain(value)
        return flat

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal config, and Detectron2 too if none of our keys is used."""
        return yaml.safe_dump(nest(self.to_flat()), default_flow_style=None, sort_keys=True)


def _unused_groups(backbone: Any, heads: Any) -> set[str]:
    """Groups whose keys (apart from ours) an architecture does not read."""
    parts = {"fpn": backbone == FPN_BACKBONE, "box_head": heads == STANDARD_HEADS}
    return {group for group, is_used in parts.items() if not is_used}


def _c4_rules(config: DetectorConfig) -> Rules:
    lists = {
        "MODEL.RESNETS.OUT_FEATURES": config.resnet.out_features,
        "MODEL.RPN.IN_FEATURES": config.rpn.in_features,
        "MODEL.ROI_HEADS.IN_FEATURES": config.roi_heads.in_features,
    }
    return [
        (
            config.backbone == C4_BACKBONE,
            f"MODEL.BACKBONE.NAME {config.backbone} needs MODEL.ROI_HEADS.NAME {STANDARD_HEADS}, not {RES5_HEADS}",
        ),
        *(
            (names == ("res4",), f"{key} must be [res4] with MODEL.ROI_HEADS.NAME {RES5_HEADS}, not {_shown(names)}")
            for key, names in lists.items()
        ),
        (
            config.box_head.region_feature == "head",
            f"MODEL.ROI_BOX_HEAD.REGION_FEATURE {config.box_head.region_feature} needs MODEL.ROI_HEADS.NAME "
            f"{STANDARD_HEADS}",
        ),
    ]


def _r2c_rules(config: DetectorConfig) -> Rules:
    resnet = config.resnet
    return [
        (not config.has_box_head, f"MODEL.R2C.FEATURE_DIM needs MODEL.ROI_HEADS.NAME {RES5_HEADS}"),
        (
            resnet.depth >= 50 and resnet.freeze_at <= 4 and resnet.stride_in_1x1 and resnet.stem_pool == "max",
            "MODEL.R2C.FEATURE_DIM needs MODEL.RESNETS.DEPTH 50 or more, STRIDE_IN_1X1 true, STEM_POOL max and "
            "MODEL.BACKBONE.FREEZE_AT 4 or less",
        ),
        (
            resnet.num_groups == 1 and resnet.res2_out_channels == 4 * resnet.width_per_group,
            "MODEL.R2C.FEATURE_DIM needs MODEL.RESNETS.NUM_GROUPS 1 and RES2_OUT_CHANNELS 4 times WIDTH_PER_GROUP",
        ),
        (
            config.roi_heads.pooler_type != "ROIPool",
            "MODEL.R2C.FEATURE_DIM needs MODEL.ROI_BOX_HEAD.POOLER_TYPE ROIAlign",
        ),
    ]


def _box_head_rules(config: DetectorConfig) -> Rules:
    head = config.box_head
    return [
        (
            head.name == BOX_HEAD,
            f"MODEL.ROI_BOX_HEAD.NAME must be {BOX_HEAD} with MODEL.ROI_HEADS.NAME {STANDARD_HEADS}",
        ),
        (head.num_conv + head.num_fc > 0, "MODEL.ROI_BOX_HEAD.NUM_FC or NUM_CONV must be positive: a head has layers"),
        (
            config.resnet.stem_pool != "none",
            f"MODEL.RESNETS.STEM_POOL none needs MODEL.ROI_HEADS.NAME {RES5_HEADS}",
        ),
        (
            config.backbone != C4_BACKBONE or len(config.rpn.in_features) == len(config.roi_heads.in_features) == 1,
            f"MODEL.RPN.IN_FEATURES and MODEL.ROI_HEADS.IN_FEATURES must name one map each without {FPN_BACKBONE}",
        ),
        *(_mobilenet_rules(config) if config.is_mobilenet else []),
    ]


def _mobilenet_rules(config: DetectorConfig) -> Rules:
    resnet, usual = config.resnet, ResNetConfig()
    unused = ("num_groups", "width_per_group", "stem_out_channels", "res2_out_channels", "res5_dilation", "stem_pool")
    return [
        (
            resnet.norm in ("FrozenBN", "BN"),
            f"MODEL.RESNETS.NORM must be FrozenBN or BN with MODEL.BACKBONE.NAME {MOBILENET_BACKBONE}",
        ),
        (
            all(getattr(resnet, name) == getattr(usual, name) for name in unused),
            f"Only NORM and FREEZE_AT of a ResNet's settings are read with MODEL.BACKBONE.NAME {MOBILENET_BACKBONE}; "
            "leave the others out",
        ),
    ]


def _fpn_rules(config: DetectorConfig) -> Rules:
    inputs = config.fpn.in_features
    return [
        (
            len(inputs) > 0 and inputs == STAGES[-len(inputs) :],
            f"MODEL.FPN.IN_FEATURES must be consecutive stages that end with res5, not {_shown(inputs)}",
        ),
        (
            set(inputs) <= set(config.resnet.out_features),
            f"MODEL.RESNETS.OUT_FEATURES {_shown(config.resnet.out_features)} lacks maps of MODEL.FPN.IN_FEATURES "
            f"{_shown(inputs)}",
        ),
        (config.resnet.res5_dilation == 1, "MODEL.RESNETS.RES5_DILATION must be 1 with FPN"),
    ]


def _map_rules(config: DetectorConfig) -> Rules:
    maps = config.map_shapes
    pooled = config.roi_heads.in_features
    strides = [maps[name].stride for name in pooled if name in maps]
    rules = [
        (
            0 < len(set(names)) == len(names) and set(names) <= set(maps),
            f"{key} {_shown(names)} must name maps of the backbone, which are {_shown(maps)}",
        )
        for key, names in (("MODEL.RPN.IN_FEATURES", config.rpn.in_features), ("MODEL.ROI_HEADS.IN_FEATURES", pooled))
    ]
    is_pyramid = all(coarse == 2 * fine for fine, coarse in itertools.pairwise(strides))
    rules.append((is_pyramid, f"MODEL.ROI_HEADS.IN_FEATURES {_shown(pooled)} must be consecutive levels, finest first"))
    return rules


def _anchor_rules(anchors: AnchorConfig, num_maps: int) -> Rules:
    lists = {"SIZES": anchors.sizes, "ASPECT_RATIOS": anchors.aspect_ratios}
    rules = [
        (
            len(values) in (1, num_maps),
            f"MODEL.ANCHOR_GENERATOR.{key} must hold one list for all maps of MODEL.RPN.IN_FEATURES, or one per map "
            f"({num_maps}), not {len(values)}",
        )
        for key, values in lists.items()
    ]
    if not all(holds for holds, _ in rules):
        return rules
    numbers = [len(sizes) * len(ratios) for sizes, ratios in anchors.pairs(num_maps)]
    return [
        (
            len(set(numbers)) == 1,
            "MODEL.ANCHOR_GENERATOR.SIZES and ASPECT_RATIOS must give every feature map as many anchors per cell, "
            f"not {_shown(numbers)}",
        ),
        (
            len(anchors.cell_anchors) in (0, sum(numbers)),
            "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS must hold a box for each pair of SIZES and ASPECT_RATIOS of each map "
            f"({sum(numbers)}), not {len(anchors.cell_anchors)}",
        ),
    ]


def _shown(values: Iterable[Any]) -> str:
    return f"[{', '.join(map(str, values))}]"


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


# How many of a detector's boxes are kept. (A file of its own, so that settings can be checked without torch.)


LARGEST_SELECTION_RULE = 1e300  # of a number of settings


@dataclass(frozen=True)
class SelectionRule:
    """Keep scores of at least `min_score`, but never fewer than `min_regions` nor more than `max_regions` boxes.

    The defaults are VL-BERT's (section 4.1). Bottom-up attention uses 0.2 with 10 to 100; a fixed number, such as
    LXMERT's 36, is `min_regions == max_regions`.

    Raises:
        ValueError: numbers that contradict each other.
    """

    where = "Selection rule"  # the place of the numbers, for messages; no field
    min_score: float = 0.5
    min_regions: int = 10
    max_regions: int = 100

    def __post_init__(self) -> None:
        given = {"min_score": self.min_score, "min_regions": self.min_regions, "max_regions": self.max_regions}
        for name, value in given.items():
            if not isinstance(value, numbers.Real) or not abs(value) <= LARGEST_SELECTION_RULE:
                raise UserError(f"{self.where}: {name} {value!r:.50} must be a finite number.")
        if not 0 <= self.min_regions <= self.max_regions or self.max_regions < 1:
            raise UserError(
                f"{self.where}: min_regions {self.min_regions} and max_regions {self.max_regions} must satisfy "
                "0 <= min_regions <= max_regions and max_regions >= 1."
            )


# What settings and commands choose from (a file of its own, so that they can be checked without torch).


BACKENDS = ("builtin", "detectron2")  # detectors that compute their features from pixels, see `detector_class`
EXPECTED_PARTS = ("all", "no_attributes", "backbone")  # what a weights file must hold, see `EXPECT` in checkpoint.py
