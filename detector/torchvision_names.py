"""Names and conventions of torchvision's Faster R-CNNs with an FPN, turned into Detectron2's.

`fasterrcnn_resnet50_fpn` and `fasterrcnn_resnet50_fpn_v2`, others that torchvision's classes build on a ResNet, and
`fasterrcnn_mobilenet_v3_large_fpn` and `_320_fpn`, whose trunk is torchvision's here too and keeps its names. Their
settings are in detector/published/torchvision_*.yaml, together with the arithmetic that differs.

| torchvision                                        | Detectron2                                               |
| -------------------------------------------------- | -------------------------------------------------------- |
| backbone.body.conv1, .bn1                          | backbone.bottom_up.stem.conv1, .norm                     |
| backbone.body.layer1.0.conv1, .bn1                 | backbone.bottom_up.res2.0.conv1, .norm                   |
| backbone.body.layer1.0.downsample.0, .1            | backbone.bottom_up.res2.0.shortcut, .norm                |
| backbone.fpn.inner_blocks.0.0, .1                  | backbone.fpn_lateral2, .norm                             |
| backbone.fpn.layer_blocks.0.0, .1                  | backbone.fpn_output2, .norm                              |
| rpn.head.conv.0.0 (the only one)                   | proposal_generator.rpn_head.conv                         |
| rpn.head.conv.0.0, conv.1.0 (v2)                   | proposal_generator.rpn_head.conv.conv0, .conv1           |
| rpn.head.cls_logits, bbox_pred                     | proposal_generator.rpn_head.objectness_logits, anchor_deltas |
| roi_heads.box_head.fc6, fc7                        | roi_heads.box_head.fc1, fc2                              |
| roi_heads.box_head.0.0, .1 (v2, four of them)      | roi_heads.box_head.conv1, .norm                          |
| roi_heads.box_head.5 (v2)                          | roi_heads.box_head.fc1                                   |
| roi_heads.box_predictor.cls_score, class 0 first   | the same, background last                                |
| roi_heads.box_predictor.bbox_pred, 4 rows per class | the same, without the four rows of the background       |

Files from before torchvision 0.13, `fasterrcnn_resnet50_fpn_coco-258fb6c6.pth` among them, lack one index:
`backbone.fpn.inner_blocks.0`, `backbone.fpn.layer_blocks.0`, `rpn.head.conv`.

With one anchor size per map the order of the anchors is the same: ratios 0.5, 1, 2.

Facts from torchvision's source (`models/detection/faster_rcnn.py`, `rpn.py`, `ops/feature_pyramid_network.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from detector.config_groups import NORM_EPS
from detector.errors import UserError

BODY = "backbone.body."
RPN_HEAD = "proposal_generator.rpn_head."
PREDICTOR = "roi_heads.box_predictor."
FOLDED_VARIANCE = 1 - NORM_EPS  # with the epsilon: exactly 1

BLOCK = re.compile(r"layer(?P<stage>[1-4])\.(?P<block>\d+)\.(?P<rest>.+)")
_FPN = re.compile(r"backbone\.fpn\.(?P<kind>inner|layer)_blocks\.(?P<map>\d)\.((?P<part>\d)\.)?(?P<parameter>\w+)")
_FPN_KINDS = {"inner": "fpn_lateral", "layer": "fpn_output"}
_RPN_CONV = re.compile(r"rpn\.head\.conv\.((?P<index>\d+)\.0\.)?(?P<parameter>weight|bias)")
_BOX_CONV = re.compile(r"roi_heads\.box_head\.(?P<index>\d+)\.(?P<part>[01])\.(?P<parameter>\w+)")
_BOX_FC = re.compile(r"roi_heads\.box_head\.(?P<index>\d+)\.(?P<parameter>weight|bias)")
_PARTS = {None: "", "0": "", "1": "norm."}  # of a convolution with its batch norm
_LAYERS = {
    "rpn.head.cls_logits.": f"{RPN_HEAD}objectness_logits.",
    "rpn.head.bbox_pred.": f"{RPN_HEAD}anchor_deltas.",
    "roi_heads.box_head.fc6.": "roi_heads.box_head.fc1.",
    "roi_heads.box_head.fc7.": "roi_heads.box_head.fc2.",
}


def is_torchvision_detector(names: Iterable[str]) -> bool:
    """Whether a state dict is of one of torchvision's detectors; no other software has `backbone.body.`."""
    return any(name.startswith(BODY) for name in names)


def from_torchvision_detector(
    tensors: Mapping[str, Tensor], source: str | Path, *, norm_eps: float = NORM_EPS
) -> dict[str, Tensor]:
    """A state dict in Detectron2's names and conventions. Names that no part of a Faster R-CNN has are kept.

    Args:
        norm_eps: epsilon of the frozen batch norms that the numbers are meant for. Torchvision sets it to 0 in models
            that start from its COCO_V1 weights of `fasterrcnn_resnet50_fpn`, and in what they become; no number shows
            it. If it is not 1e-5, every norm is written for variance 1 (`fold_norms`).

    Raises:
        ValueError: the box predictor's two layers do not fit together.
    """
    logits, deltas = (tensors.get(f"{PREDICTOR}{layer}.bias") for layer in ("cls_score", "bbox_pred"))
    if logits is not None and deltas is not None and len(deltas) != 4 * len(logits):
        raise UserError(
            f"{source}: {PREDICTOR}bbox_pred has {len(deltas)} rows for {len(logits)} classes; torchvision's files "
            "have 4 per class, background included."
        )
    names = detector_names(tensors)
    converted = {}
    for name, value in tensors.items():
        if name.startswith(f"{PREDICTOR}cls_score."):
            value = background_last(value)
        elif name.startswith(f"{PREDICTOR}bbox_pred."):
            value = value[4:]
        converted[names[name]] = value
    return converted if norm_eps == NORM_EPS else fold_norms(converted, norm_eps)


def detector_names(names: Iterable[str]) -> dict[str, str]:
    """Torchvision's names -> Detectron2's. What no part of a Faster R-CNN has keeps its name."""
    names = list(names)
    rpn_convs = {match["index"] for name in names if (match := _RPN_CONV.fullmatch(name))}
    box_fcs = sorted({int(match["index"]) for name in names if (match := _BOX_FC.fullmatch(name))})
    is_resnet = any(name.startswith(f"{BODY}layer") for name in names)

    def detector_name(name: str) -> str:
        if is_resnet and name.startswith(BODY):
            return f"backbone.bottom_up.{trunk_name(name.removeprefix(BODY))}"
        if match := _FPN.fullmatch(name):
            kind, level, part = match["kind"], int(match["map"]), match["part"]
            if is_resnet:
                return f"backbone.{_FPN_KINDS[kind]}{level + 2}.{_PARTS[part]}{match['parameter']}"
            return f"backbone.fpn.{kind}_blocks.{level}.{part or 0}.{match['parameter']}"
        if match := _RPN_CONV.fullmatch(name):
            layer = f"conv.conv{match['index']}" if len(rpn_convs) > 1 else "conv"
            return f"{RPN_HEAD}{layer}.{match['parameter']}"
        if match := _BOX_CONV.fullmatch(name):
            return f"roi_heads.box_head.conv{int(match['index']) + 1}.{_PARTS[match['part']]}{match['parameter']}"
        if match := _BOX_FC.fullmatch(name):
            return f"roi_heads.box_head.fc{box_fcs.index(int(match['index'])) + 1}.{match['parameter']}"
        return next((layer + name.removeprefix(old) for old, layer in _LAYERS.items() if name.startswith(old)), name)

    return {name: detector_name(name) for name in names}


def trunk_name(name: str) -> str:
    """`layer1.0.bn1.weight` -> `res2.0.conv1.norm.weight`, `conv1.weight` -> `stem.conv1.weight`; others are kept."""
    block = BLOCK.fullmatch(name)
    rest = re.sub(r"^bn(\d)\.", r"conv\1.norm.", block["rest"] if block else name)
    if block:
        rest = re.sub(r"^downsample\.1\.", "shortcut.norm.", re.sub(r"^downsample\.0\.", "shortcut.", rest))
        return f"res{int(block['stage']) + 1}.{block['block']}.{rest}"
    return f"stem.{rest}" if rest.startswith("conv1.") else rest


def fold_norms(tensors: Mapping[str, Tensor], norm_eps: float) -> dict[str, Tensor]:
    """Frozen batch norms of another epsilon, with exactly the same values under epsilon 1e-5.

    The scale weight / sqrt(variance + epsilon) becomes the weight, for variance 1. (Variances minus 1e-5 would do for
    most channels, but a dead channel with a variance near 0 would have none left.)
    """
    folded = dict(tensors)
    for name, variance in tensors.items():
        if name.endswith(".norm.running_var"):
            weight = f"{name.removesuffix('running_var')}weight"
            folded[weight] = tensors[weight] * (variance + norm_eps).rsqrt()
            folded[name] = torch.full_like(variance, FOLDED_VARIANCE)
    return folded


def background_last(value: Tensor) -> Tensor:
    """Move row 0 of [K + 1, ...] to the end."""
    return torch.cat((value[1:], value[:1]))
