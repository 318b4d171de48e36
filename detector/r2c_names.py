"""Names of the network of R2C in official VisualBERT files (VCR) <-> names of `detector.r2c_network`.

| official                                  | here                                     |
| ----------------------------------------- | ---------------------------------------- |
| detector.backbone.0, .1                   | backbone.stem.conv1, .norm               |
| detector.backbone.4, .5, .6               | backbone.res2, res3, res4                |
| detector.after_roi_align.0                | roi_heads.res5                           |
| detector.mask_upsample                    | roi_heads.mask_filter                    |
| detector.object_embed                     | roi_heads.class_embedding                |
| detector.obj_downsample.1                 | roi_heads.projection                     |
| detector.regularizing_predictor           | roi_heads.classifier                     |

Blocks have torchvision's names there. Facts from the official VisualBERT code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from detector.errors import UserError
from detector.torchvision_names import trunk_name

PREFIX = "detector."
ENCODER = "bert.bert."  # of the same files
_STAGES = {
    "backbone.0.": "conv1.",
    "backbone.1.": "bn1.",
    "backbone.4.": "layer1.",
    "backbone.5.": "layer2.",
    "backbone.6.": "layer3.",
    "after_roi_align.0.": "layer4.",
}
_LAYERS = {
    "mask_upsample.": "roi_heads.mask_filter.",
    "object_embed.": "roi_heads.class_embedding.",
    "obj_downsample.1.": "roi_heads.projection.",
    "regularizing_predictor.": "roi_heads.classifier.",
}


def is_visual_bert(names: Iterable[str]) -> bool:
    """Whether a state dict is of an official VisualBERT model, with or without such a network."""
    return any(name.startswith((ENCODER, f"{PREFIX}after_roi_align.")) for name in names)


def from_visual_bert(tensors: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """The network of an official VisualBERT model, in float32; everything else is left out.

    Raises:
        ValueError: the file has no such network, or an unknown part of it.
    """
    own = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
    if not own:
        raise UserError(
            f"{source}: this VisualBERT model was made for given features and holds no network of regions; leave out "
            "detector.weights, or name a different file."
        )
    renamed = {}
    for name, value in own.items():
        new = own_name(name)
        if new is None:
            raise UserError(f"{source}: {PREFIX}{name} is not a name of the official VisualBERT code.")
        renamed[new] = value.float() if value.is_floating_point() else value
    return renamed


def own_name(name: str) -> str | None:
    """Our name of an official parameter without `detector.`; None for a name that is not of the network."""
    for old, new in _LAYERS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    for old, stage in _STAGES.items():
        if name.startswith(old):
            found = trunk_name(stage + name.removeprefix(old))
            return f"roi_heads.{found}" if found.startswith("res5.") else f"backbone.{found}"
    return None


def visual_bert_name(name: str) -> str | None:
    """The official name, with `detector.`, of a parameter of `R2CNetwork`; None: it is another network's."""
    for old, new in _LAYERS.items():
        if name.startswith(new):
            return PREFIX + old + name.removeprefix(new)
    rest = name.removeprefix("backbone.").removeprefix("roi_heads.").removeprefix("stem.")
    rest = re.sub(r"^res(\d)\.", lambda stage: f"layer{int(stage[1]) - 1}.", rest)
    rest = rest.replace("shortcut.norm.", "downsample.1.").replace("shortcut.", "downsample.0.")
    rest = re.sub(r"\bconv(\d)\.norm\.", r"bn\1.", rest)
    for old, stage in _STAGES.items():
        if rest.startswith(stage):
            return PREFIX + old + rest.removeprefix(stage)
    return None
