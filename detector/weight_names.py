"""Convert published checkpoints to the names and conventions of this detector, which are Detectron2's.

Layouts (from Detectron2's `c2_model_loading.py` and `convert-torchvision-to-d2.py`, and the two ports of bottom-up
attention):

- Detectron2: needs no conversion. The `.pkl` files of "py-bottom-up-attention" (a Detectron2 port of bottom-up
  attention) have this layout too: dicts with these names and an attribute head.
- Caffe2 (Detectron, and Detectron2's ImageNet models): `res2_0_branch2a_w`, and with FPN `fpn_inner_res2_2_sum_w`,
  `conv_rpn_fpn2_w`, `fc6_w`. The background is class 0.
- torchvision: `layer1.0.conv1.weight`. VL-BERT's `resnet101-pt-vgbua-0000.model` also has this layout.
- VL-BERT: `image_feature_extractor.backbone.layer1.0.conv1.weight` in a `.model` file of the official VL-BERT code. It
  contains the network up to res5. The encoder and heads in the same file are ignored here.
- Detectron2 without prefixes: `stem.conv1.weight`, `res2.0.conv1.weight`, matched with the ends of the model's keys.
- Caffe bottom-up attention: the `.pth` files of "bottom-up-attention.pytorch" in its caffe mode (ResNet-101). Weights
  are converted exactly. The box arithmetic of that code is not reproduced: it clips proposals to width - 1, includes
  the last pixel in NMS (x2 - x1 + 1) and decodes final boxes from proposals that are one pixel wider. Features of given
  boxes are not affected.

Shape legend: see `detector/structures.py`; cell_anchors = sizes * ratios.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from detector.config import NORM_EPS, DetectorConfig
from detector.errors import UserError

BODY = "backbone.body."
RPN_HEAD = "proposal_generator.rpn_head."
PREDICTOR = "roi_heads.box_predictor."
WRAPPERS = ("module.", "model.")  # of DataParallel and of Lightning, where all names have it
WRAPPER_DEPTH = 2  # how often a model may be wrapped
COMPILED = "_orig_mod."  # of torch.compile, also inside a name
FOLDED_VARIANCE = 1 - NORM_EPS  # variance + epsilon is exactly 1

BLOCK = re.compile(r"layer(?P<stage>[1-4])\.(?P<block>\d+)\.(?P<rest>.+)")


def from_torchvision_detector(tensors: Mapping[str, Tensor], *, norm_eps: float = NORM_EPS) -> dict[str, Tensor]:
    """Convert a state dict of torchvision's Faster R-CNN. Unknown keys are kept.

    `norm_eps`: epsilon of the frozen batch norms in torchvision. It is 0 in `fasterrcnn_resnet50_fpn` with COCO_V1
    weights, and in models fine-tuned from it. The state dict does not contain it. See `fold_norms`.
    """
    has_several_convs = any(name.startswith("rpn.head.conv.1.") for name in tensors)
    matches = [re.match(r"roi_heads\.box_head\.(\d+)\.[wb]", name) for name in tensors]
    fcs = sorted({int(match[1]) for match in matches if match})
    box_head = "roi_heads.box_head."
    rpn_conv = rf"{RPN_HEAD}conv.conv\1." if has_several_convs else f"{RPN_HEAD}conv."
    rules: list[tuple[str, str | Callable[[re.Match], str]]] = [
        (r"rpn\.head\.conv\.(\d)\.0\.", rpn_conv),
        (r"rpn\.head\.conv\.(?=weight|bias)", f"{RPN_HEAD}conv."),
        (r"rpn\.head\.cls_logits\.", f"{RPN_HEAD}objectness_logits."),
        (r"rpn\.head\.bbox_pred\.", f"{RPN_HEAD}anchor_deltas."),
        (r"roi_heads\.box_head\.fc([67])\.", lambda match: f"{box_head}fc{int(match[1]) - 5}."),
        (r"roi_heads\.box_head\.(\d+)\.0\.", lambda match: f"{box_head}conv{int(match[1]) + 1}."),
        (r"roi_heads\.box_head\.(\d+)\.1\.", lambda match: f"{box_head}conv{int(match[1]) + 1}.norm."),
        (r"roi_heads\.box_head\.(\d+)\.(?=[wb])", lambda match: f"{box_head}fc{fcs.index(int(match[1])) + 1}."),
    ]
    if any(name.startswith(f"{BODY}layer") for name in tensors):
        kinds = {"inner": "lateral", "layer": "output"}
        parts = {None: "", "0.": "", "1.": "norm."}
        rules += [
            (r"backbone\.body\.(.+)", lambda match: f"backbone.bottom_up.{convert_backbone_name(match[1])}"),
            (
                r"backbone\.fpn\.(inner|layer)_blocks\.(\d)\.([01]\.)?",
                lambda match: f"backbone.fpn_{kinds[match[1]]}{int(match[2]) + 2}.{parts[match[3]]}",
            ),
        ]
    else:  # MobileNet has torchvision's names here too
        rules.append((r"(backbone\.fpn\.\w+_blocks\.\d\.)(?=weight|bias)", r"\g<1>0."))

    converted = {}
    for name, value in tensors.items():
        if name.startswith(f"{PREDICTOR}cls_score."):
            value = move_background_last(value)
        elif name.startswith(f"{PREDICTOR}bbox_pred."):
            value = value[4:]  # without the background
        pattern, new = next((rule for rule in rules if re.match(rule[0], name)), ("", ""))
        converted[re.sub(f"^{pattern}", new, name, count=1)] = value
    if norm_eps == NORM_EPS:
        return converted
    return fold_norms(converted, norm_eps)


def convert_backbone_name(name: str) -> str:
    """Rename a parameter of torchvision's ResNet; other names are unchanged.

    `layer1.0.bn1.weight` becomes `res2.0.conv1.norm.weight`, and `conv1.weight` becomes `stem.conv1.weight`.
    """
    block = BLOCK.fullmatch(name)
    if block:
        rest = re.sub(r"^bn(\d)\.", r"conv\1.norm.", block["rest"])
        rest = re.sub(r"^downsample\.0\.", "shortcut.", rest)
        rest = re.sub(r"^downsample\.1\.", "shortcut.norm.", rest)
        return f"res{int(block['stage']) + 1}.{block['block']}.{rest}"
    name = re.sub(r"^bn(\d)\.", r"conv\1.norm.", name)
    return f"stem.{name}" if name.startswith("conv1.") else name


def fold_norms(tensors: Mapping[str, Tensor], norm_eps: float) -> dict[str, Tensor]:
    """Convert frozen batch norms of another epsilon to epsilon 1e-5 with exactly the same output.

    The weight becomes weight / sqrt(variance + norm_eps), and the variance 1 - 1e-5. Subtracting 1e-5 from the variance
    instead would make it negative for dead channels.
    """
    folded = dict(tensors)
    for name, variance in tensors.items():
        if name.endswith(".norm.running_var"):
            weight = f"{name.removesuffix('running_var')}weight"
            folded[weight] = tensors[weight] * (variance + norm_eps).rsqrt()
            folded[name] = torch.full_like(variance, FOLDED_VARIANCE)
    return folded


def move_background_last(value: Tensor) -> Tensor:
    return torch.cat((value[1:], value[:1]))


# Prefix of the image network (`detector.r2c`) in official VisualBERT files for VCR.
REGION_NETWORK = "detector."
_R2C_NAMES = {  # prefix in these files -> torchvision's prefix, or ours for the RoI heads
    "backbone.0.": "conv1.",
    "backbone.1.": "bn1.",
    "backbone.4.": "layer1.",
    "backbone.5.": "layer2.",
    "backbone.6.": "layer3.",
    "after_roi_align.0.": "layer4.",
    "mask_upsample.": "roi_heads.mask_filter.",
    "object_embed.": "roi_heads.class_embedding.",
    "obj_downsample.1.": "roi_heads.projection.",
    "regularizing_predictor.": "roi_heads.classifier.",
}


def from_visual_bert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the image network of an official VisualBERT model to float32. Other parameters are dropped."""
    renamed = {}
    for name, value in tensors.items():
        if not name.startswith(REGION_NETWORK):
            continue
        rest = name.removeprefix(REGION_NETWORK)
        old = next((old for old in _R2C_NAMES if rest.startswith(old)), None)
        if old is not None:  # otherwise keep the name, which is then reported as unexpected
            name = convert_backbone_name(_R2C_NAMES[old] + rest.removeprefix(old))
            if not name.startswith("roi_heads."):
                name = f"roi_heads.{name}" if name.startswith("res5.") else f"backbone.{name}"
        renamed[name] = value.float() if value.is_floating_point() else value
    return renamed


def to_visual_bert_name(name: str) -> str | None:
    """Return the official VisualBERT name of a parameter of `R2CNetwork`, or None for any other parameter."""
    rest = _torchvision_name(name)
    for old, new in _R2C_NAMES.items():
        if rest.startswith(new):
            return REGION_NETWORK + old + rest.removeprefix(new)
    return None


def _torchvision_name(name: str) -> str:
    """Invert `convert_backbone_name` for a parameter of the detector: `roi_heads.res5.0.*` -> `layer4.0.*`."""
    name = re.sub(r"^(backbone|roi_heads(?=\.res5))\.(stem\.)?", "", name)
    name = re.sub(r"^res(\d)\.", lambda stage: f"layer{int(stage[1]) - 1}.", name)
    name = name.replace("shortcut.norm.", "downsample.1.").replace("shortcut.", "downsample.0.")
    return re.sub(r"\bconv(\d)\.norm\.", r"bn\1.", name)


# Until May 2021, Detectron2 saved these as buffers, one per feature map. They duplicate config values.
CELL_ANCHORS = "proposal_generator.anchor_generator.cell_anchors."
MASK_HEAD = "roi_heads.mask_head."
# Mask heads are used with MODEL.MASK_ON only, keypoint heads are not. The last three names are Caffe2's.
OTHER_BRANCHES = (
    MASK_HEAD,
    "roi_heads.mask_pooler.",
    "roi_heads.keypoint_head.",
    "roi_heads.keypoint_pooler.",
    "_[mask]_fcn",
    "mask_fcn_logits_",
    "conv5_mask_",
)
# Keys that no detector uses: ImageNet classifiers, mask and keypoint heads, and the bias of the first convolution in
# Caffe, which precedes a norm. Detectron2 ignores them too.
UNUSED_KEYS = ("fc.", "stem.fc.", "fc1000.", "pred.", "stem.conv1.bias", *OTHER_BRANCHES)

_PARAMETER = {"w": "weight", "b": "bias"}
_NORM_PARAMETER = {
    **dict.fromkeys(("s", "gamma"), "weight"),
    **dict.fromkeys(("b", "bias", "beta"), "bias"),
    **dict.fromkeys(("rm", "running_mean"), "running_mean"),
    **dict.fromkeys(("riv", "running_var"), "running_var"),
}
_CAFFE2_BRANCHES = {"1": "shortcut", "2a": "conv1", "2b": "conv2", "2c": "conv3"}
_CAFFE2_LAYERS = {
    "conv_rpn": f"{RPN_HEAD}conv",
    "rpn_cls_logits": f"{RPN_HEAD}objectness_logits",
    "rpn_bbox_pred": f"{RPN_HEAD}anchor_deltas",
    "cls_score": "cls_score",
    "bbox_pred": "bbox_pred",
    "conv_rpn_fpn2": f"{RPN_HEAD}conv",  # named after the finest level, shared by all levels
    "rpn_cls_logits_fpn2": f"{RPN_HEAD}objectness_logits",
    "rpn_bbox_pred_fpn2": f"{RPN_HEAD}anchor_deltas",
    "fc6": "box_head.fc1",
    "fc7": "box_head.fc2",
    "conv1": "stem.conv1",
    "fc1000": "fc1000",
    "pred": "pred",
}
_CAFFE2_NORM = re.compile(rf"(?P<layer>.*)_(?:bn|gn)_(?P<parameter>{'|'.join(_NORM_PARAMETER)})")
_CAFFE2_BLOCK = re.compile(r"res(?P<stage>\d)_(?P<block>\d+)_branch(?P<branch>1|2a|2b|2c)")
_CAFFE2_FPN = re.compile(r"fpn_(?P<inner>inner_)?res(?P<stage>\d)_\d+_sum(?:_lateral)?")
_CAFFE2_HEAD_CONV = re.compile(r"head_conv(?P<number>\d+)")
VL_BERT = "image_feature_extractor."
_VL_BERT_RES5 = f"{VL_BERT}roi_head_feature_extractor."
_VL_BERT_RES5_AGAIN = f"{VL_BERT}head.0."  # the official module contains res5 twice
_CAFFE_ATTENTION_LAYERS = {
    f"{PREDICTOR}cls_embed": f"{PREDICTOR}cls_embedding",
    f"{PREDICTOR}attr_linear1": f"{PREDICTOR}fc_attr",
    f"{PREDICTOR}attr_linear2": f"{PREDICTOR}attr_score",
}


def strip_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes that modules around a model (`WRAPPERS`) and `torch.compile` give to its names."""
    tensors = {name.replace(COMPILED, ""): value for name, value in tensors.items()}
    for _ in range(WRAPPER_DEPTH):
        for prefix in WRAPPERS:
            if all(name.startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def to_detector_names(
    tensors: dict[str, Tensor],
    model_names: Iterable[str],
    config: DetectorConfig,
    source: str | Path,
    *,
    matching_heuristics: bool = False,
    norm_eps: float = NORM_EPS,
) -> tuple[dict[str, Tensor], str]:
    """Detect the layout of a checkpoint and convert it to this detector's names and conventions.

    Args:
        model_names: keys of the detector's state dict, see `match_ends`.
        config: anchors and box weights for the conversion of Caffe's bottom-up attention.
        matching_heuristics, norm_eps: see `WeightsFile` in `detector.checkpoint`.

    Returns:
        the converted tensors, and the name of the layout for messages.
    """

    def has(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in tensors)

    tensors = strip_wrappers(tensors)
    if has(VL_BERT):
        return from_vl_bert(tensors), "VL-BERT"
    if has("bert.bert.", f"{REGION_NETWORK}after_roi_align."):
        return from_visual_bert(tensors), "VisualBERT"
    if has(BODY):  # only torchvision has these names
        return from_torchvision_detector(tensors, norm_eps=norm_eps), "torchvision"
    if has("backbone.", "proposal_generator.", "roi_heads."):
        logits = tensors.get(f"{RPN_HEAD}objectness_logits.bias")
        deltas = tensors.get(f"{RPN_HEAD}anchor_deltas.bias")
        if logits is not None and deltas is not None and 2 * len(logits) == len(deltas):  # two logits per anchor
            return from_caffe_attention(tensors, config), "bottom-up attention, Caffe conventions"
        if matching_heuristics:
            tensors = match_ends(tensors, model_names)
        return tensors, "Detectron2"
    if any(_CAFFE2_BLOCK.match(name) for name in tensors):
        converted = from_caffe2(tensors)
        layout = "Caffe2"
    elif any(BLOCK.match(name) for name in tensors):
        converted = {convert_backbone_name(name): value for name, value in tensors.items()}
        layout = "torchvision"
    elif has("features.0."):  # torchvision's MobileNet
        converted = {re.sub(r"^features\.", BODY, name): value for name, value in tensors.items()}
        layout = "torchvision"
    elif has("stem.", "res2."):
        converted = tensors
        layout = "Detectron2 without prefixes"
    else:
        raise UserError(
            f"{source}: unknown layout of keys ({', '.join(list(tensors)[:3])}, ...); use a file from Detectron2, "
            "Caffe2, torchvision or VL-BERT."
        )
    return match_ends(converted, model_names), layout


def match_ends(tensors: dict[str, Tensor], model_names: Iterable[str]) -> dict[str, Tensor]:
    """Rename keys with Detectron2's matching heuristics.

    A key matches a key of the model if it is equal to it or to its end after a dot. For each key of the model, the
    longest match is used. Keys without a match are kept.
    """
    full: dict[str, str] = {}
    for model_name in model_names:
        parts = model_name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        name = next((end for end in ends if end in tensors), None)
        if name is not None:
            full[name] = model_name
    return {full.get(name, name): value for name, value in tensors.items()}


def from_caffe2(blobs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Caffe2's blobs to names for `match_ends`, with the background as the last class.

    Detectron's batch norms consist of a scale and a bias. They get mean 0 and variance 1.
    """
    tensors: dict[str, Tensor] = {}
    for blob, value in blobs.items():
        name = _caffe2_name(blob)
        if name.startswith("cls_score."):
            value = move_background_last(value)
        elif name.startswith("bbox_pred."):
            value = value[4:]  # without the background
        tensors[name] = value
        if blob.endswith("_bn_s") and not any(f"{blob[:-1]}{end}" in blobs for end in ("rm", "running_mean")):
            base = name.removesuffix("weight")
            tensors[f"{base}running_mean"] = torch.zeros(len(value))
            tensors[f"{base}running_var"] = torch.full((len(value),), FOLDED_VARIANCE)
    return tensors


def _caffe2_name(blob: str) -> str:
    """Convert `res2_0_branch2a_bn_s` to `res2.0.conv1.norm.weight`; names of unknown blobs are unchanged."""
    norm = _CAFFE2_NORM.fullmatch(blob)
    if norm:
        layer = {"res_conv1": "conv1"}.get(norm["layer"], norm["layer"])
        parameter = f"norm.{_NORM_PARAMETER[norm['parameter']]}"
    else:
        layer, _, kind = blob.rpartition("_")
        if kind not in _PARAMETER:
            return blob
        parameter = _PARAMETER[kind]
    block = _CAFFE2_BLOCK.fullmatch(layer)
    if block:
        return f"res{block['stage']}.{block['block']}.{_CAFFE2_BRANCHES[block['branch']]}.{parameter}"
    level = _CAFFE2_FPN.fullmatch(layer)
    if level:
        kind = "lateral" if level["inner"] else "output"
        return f"fpn_{kind}{level['stage']}.{parameter}"
    conv = _CAFFE2_HEAD_CONV.fullmatch(layer)
    if conv:
        return f"box_head.conv{conv['number']}.{parameter}"
    return f"{_CAFFE2_LAYERS[layer]}.{parameter}" if layer in _CAFFE2_LAYERS else blob


def from_vl_bert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the network up to res5 of an official VL-BERT model (without the prefix `module.`) to float32.

    `image_feature_extractor.backbone.layer2.0.bn1.weight` -> `backbone.res3.0.conv1.norm.weight`,
    `image_feature_extractor.roi_head_feature_extractor.0.*` -> `roi_heads.res5.0.*`. Other parameters are dropped;
    `image_feature_extractor.obj_downsample` belongs to this project's encoder.
    """
    renamed = {}
    trunk = f"{VL_BERT}backbone."
    for name, value in tensors.items():
        value = value.float() if value.is_floating_point() else value
        if name.startswith(_VL_BERT_RES5):
            renamed[f"roi_heads.{convert_backbone_name(f'layer4.{name.removeprefix(_VL_BERT_RES5)}')}"] = value
        elif name.startswith(trunk):
            renamed[f"backbone.{convert_backbone_name(name.removeprefix(trunk))}"] = value
    return renamed


def to_vl_bert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `from_vl_bert`, with both copies of res5 and with `num_batches_tracked` for batch norms."""
    official = {}
    for name, value in tensors.items():
        if not name.startswith(("backbone.", "roi_heads.res5.")):
            continue
        rest = _torchvision_name(name)
        is_res5 = rest.startswith("layer4.")
        rest = rest.removeprefix("layer4.")
        prefixes = (_VL_BERT_RES5, _VL_BERT_RES5_AGAIN) if is_res5 else (f"{VL_BERT}backbone.",)
        for prefix in prefixes:
            official[prefix + rest] = value
            if rest.endswith("running_var"):  # frozen norms do not have this counter
                counter = f"{prefix}{rest.removesuffix('running_var')}num_batches_tracked"
                official.setdefault(counter, torch.zeros((), dtype=torch.int64))
    return official


def from_caffe_attention(tensors: dict[str, Tensor], config: DetectorConfig) -> dict[str, Tensor]:
    """Convert bottom-up attention from Caffe's conventions to Detectron2's. Only the objectness is rounded.

    - Objectness [2 * cell_anchors]: background logits, then foreground logits -> their difference [cell_anchors], whose
      sigmoid equals the softmax.
    - Anchors: ratios in the outer loop -> sizes in the outer loop; corners that include the last pixel -> continuous
      corners.
    - Classes, class embedding and attributes: the background or "no attribute" moves from the first row to the last.
    - Box deltas: the background rows are dropped, and the other rows are multiplied by BBOX_REG_WEIGHTS.
    """
    sizes = len(config.anchors.sizes[0])
    ratios = len(config.anchors.aspect_ratios[0])
    number = sizes * ratios

    def sizes_outer(value: Tensor) -> Tensor:
        return value.reshape(ratios, sizes, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)

    converted = {}
    for name, value in tensors.items():
        layer, _, parameter = name.rpartition(".")
        if layer in _CAFFE_ATTENTION_LAYERS:
            name = f"{_CAFFE_ATTENTION_LAYERS[layer]}.{parameter}"
        if layer == f"{RPN_HEAD}objectness_logits":
            value = sizes_outer(value[number:].float() - value[:number].float())
        elif layer == f"{RPN_HEAD}anchor_deltas":
            value = sizes_outer(value)
        elif layer == CELL_ANCHORS.removesuffix("."):
            value = sizes_outer(value) + value.new_tensor([0, 0, 1, 1])
        elif layer == f"{PREDICTOR}bbox_pred":
            scale = value.new_tensor(config.roi_heads.box_weights).repeat(len(value) // 4 - 1)
            value = value[4:] * scale.reshape(-1, *[1] * (value.ndim - 1))
        elif layer in (f"{PREDICTOR}cls_score", f"{PREDICTOR}cls_embed", f"{PREDICTOR}attr_linear2"):
            value = move_background_last(value)
        converted[name] = value
    return converted
