"""Settings of the Detectron2 backend: Detectron2 YAML of a two-stage detector, C4 or with a box head (FPN).

A C4 file is read as strictly as for the built-in detector, so that both backends accept the same files. A file with
`ROI_HEADS.NAME: StandardROIHeads` may use any key of Detectron2; Detectron2 itself checks its own keys.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from detector.config_file import FIXED, decode, flatten, load_tree, merge_bases, nest
from detector.detector_config import (
    OUR_KEYS,
    AnchorConfig,
    AttributeConfig,
    DetectorConfig,
    InputConfig,
    ResNetConfig,
    ROIHeadsConfig,
    RPNConfig,
)

C4_HEADS = "Res5ROIHeads"
BOX_HEADS = "StandardROIHeads"
HEADS_KEY = "MODEL.ROI_HEADS.NAME"
CELL_ANCHORS_KEY = "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS"

# Keys that have one possible value here: the adapter calls the parts of exactly this kind of model, and images are read
# by this project's own code.
REQUIRED: dict[str, Any] = {
    key: FIXED[key]
    for key in (
        "VERSION",
        "INPUT.CROP.ENABLED",
        "TEST.AUG.ENABLED",
        "MODEL.META_ARCHITECTURE",
        "MODEL.LOAD_PROPOSALS",
        "MODEL.MASK_ON",
        "MODEL.KEYPOINT_ON",
        "MODEL.PROPOSAL_GENERATOR.NAME",
        "MODEL.ANCHOR_GENERATOR.NAME",
        "MODEL.ROI_BOX_HEAD.USE_FED_LOSS",
        "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE",
    )
}


@dataclasses.dataclass(frozen=True)
class Detectron2Config:
    """Dotted keys for Detectron2, and the groups of settings that both backends understand."""

    flat: dict[str, Any]  # every key that was given (C4: every key that exists), our keys included
    common: DetectorConfig  # for models with a box head: without their anchors, which lie on several maps

    @classmethod
    def from_yaml(cls, source: str | Path | dict[str, Any]) -> Detectron2Config:
        """Read a Detectron2 YAML file, or a nested dict of the same keys; see `DetectorConfig.from_yaml`."""
        if isinstance(source, dict):
            return cls.from_flat(flatten(merge_bases(source, Path())))
        return cls.from_flat(flatten(load_tree(Path(source))), str(source))

    @classmethod
    def from_flat(cls, flat: dict[str, Any], name: str = "detector config") -> Detectron2Config:
        """Build from dotted keys; `name` is used in error messages.

        Raises:
            ValueError: a value that is not supported, or (C4 only) an unknown key.
        """
        heads = flat.get(HEADS_KEY, C4_HEADS)
        if heads not in (C4_HEADS, BOX_HEADS):
            raise ValueError(f"{name}: {HEADS_KEY} = {heads!r} is not supported; use {C4_HEADS} or {BOX_HEADS}.")
        if heads == C4_HEADS:
            common = DetectorConfig.from_flat(flat, name)
            return cls(common.to_flat(), common)
        for key, value in REQUIRED.items():
            if key in flat and decode(flat[key]) != value:
                raise ValueError(f"{name}: {key} = {flat[key]!r} is not supported; the only value is {value!r}.")
        if CELL_ANCHORS_KEY in flat:
            raise ValueError(f"{name}: {CELL_ANCHORS_KEY} needs {HEADS_KEY} {C4_HEADS}.")
        known = (set(DetectorConfig().to_flat()) - set(FIXED)) | set(OUR_KEYS)
        shared = {key: flat[key] for key in flat if key in known and not key.startswith("MODEL.ANCHOR_GENERATOR.")}
        common = DetectorConfig.from_flat(shared, name)
        if common.resnet.stem_pool == "none":
            raise ValueError(f"{name}: MODEL.RESNETS.STEM_POOL = 'none' needs {HEADS_KEY} {C4_HEADS}.")
        return cls(dict(flat), common)

    @property
    def is_c4(self) -> bool:
        return self.flat.get(HEADS_KEY, C4_HEADS) == C4_HEADS

    @property
    def input(self) -> InputConfig:
        return self.common.input

    @property
    def anchors(self) -> AnchorConfig:
        return self.common.anchors

    @property
    def resnet(self) -> ResNetConfig:
        return self.common.resnet

    @property
    def rpn(self) -> RPNConfig:
        return self.common.rpn

    @property
    def roi_heads(self) -> ROIHeadsConfig:
        return self.common.roi_heads

    @property
    def attributes(self) -> AttributeConfig:
        return self.common.attributes

    def to_flat(self) -> dict[str, Any]:
        """Dotted keys, our keys included."""
        return dict(self.flat)

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal config."""
        return yaml.safe_dump(nest(self.flat), default_flow_style=None, sort_keys=True)


AnyDetectorConfig = DetectorConfig | Detectron2Config
