"""The built-in detector's settings, read from Detectron2 YAML files.

Every field (see `detector.config_groups`) states its Detectron2 key and has Detectron2's default. Keys fall into four
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

import dataclasses
import difflib
import itertools
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from detector.config_file import (
    FIXED,
    IGNORED,
    PORT_KEYS,
    SUPPORTED,
    UnreadTag,
    convert,
    decode,
    flatten,
    load_tree,
    merge_bases,
    nest,
    plain,
)
from detector.config_groups import (
    BOX_HEAD,
    C4_BACKBONE,
    FPN_BACKBONE,
    MOBILENET_BACKBONE,
    RES5_HEADS,
    STAGES,
    STANDARD_HEADS,
    AnchorConfig,
    AttributeConfig,
    BoxHeadConfig,
    FPNConfig,
    InputConfig,
    MapShape,
    R2CConfig,
    ResNetConfig,
    ROIHeadsConfig,
    RPNConfig,
    Rules,
    SettingsGroup,
    setting,
)
from detector.errors import UserError


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
        for key, value in flat.items():  # last: the zoo's RetinaNet files have such values, and are refused above
            if isinstance(value, UnreadTag):
                raise UserError(f"{name}: {key} has the tag {value.tag}, which is not read; write a plain value.")
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
