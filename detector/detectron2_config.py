"""Settings of the Detectron2 backend: Detectron2 YAML of a two-stage detector, C4 or with a box head (FPN).

A C4 file is read as strictly as for the built-in detector, so that both backends accept the same files. A file with
`ROI_HEADS.NAME: StandardROIHeads` may use any key of Detectron2; Detectron2 itself checks its own keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from detector.config_file import FIXED, decode
from detector.detector_config import KEYS, DetectorConfig

C4_HEADS = "Res5ROIHeads"
BOX_HEADS = "StandardROIHeads"
HEADS_KEY = "MODEL.ROI_HEADS.NAME"
CELL_ANCHORS_KEY = "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS"

# Keys that have one possible value here: the adapter calls the parts of exactly this kind of model, and images are read
# by this project's own code.
REQUIRED = (
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


@dataclasses.dataclass(frozen=True)
class Detectron2Config(DetectorConfig):
    """The settings that both backends understand, and all keys for Detectron2.

    For a model with a box head, `anchors` has its defaults: the anchors lie on several maps, and only `flat` has them.
    """

    flat: dict[str, Any] = dataclasses.field(default_factory=dict)  # the keys that were given (C4: all keys)

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
            return cls(**vars(common), flat=common.to_flat())
        for key in REQUIRED:
            if key in flat and decode(flat[key]) != FIXED[key]:
                raise ValueError(f"{name}: {key} = {flat[key]!r} is not supported; the only value is {FIXED[key]!r}.")
        if CELL_ANCHORS_KEY in flat:
            raise ValueError(f"{name}: {CELL_ANCHORS_KEY} needs {HEADS_KEY} {C4_HEADS}.")
        shared = {key: flat[key] for key in flat if key in KEYS and not key.startswith("MODEL.ANCHOR_GENERATOR.")}
        common = DetectorConfig.from_flat(shared, name)
        if common.resnet.stem_pool == "none":
            raise ValueError(f"{name}: MODEL.RESNETS.STEM_POOL = 'none' needs {HEADS_KEY} {C4_HEADS}.")
        return cls(**vars(common), flat=dict(flat))

    @property
    def is_c4(self) -> bool:
        return self.flat.get(HEADS_KEY, C4_HEADS) == C4_HEADS

    def to_flat(self) -> dict[str, Any]:
        """Dotted keys, our keys included."""
        return dict(self.flat)
