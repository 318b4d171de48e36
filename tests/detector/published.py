"""A tiny detector, and its weights in the names and conventions of every published layout."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from detector.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    load_checkpoint,
    read_class_names,
    save_settings,
    save_weights,
)
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.images import make_image_batch

SIZES, RATIOS, CLASSES, ATTRIBUTES = 2, 3, 4, 3
ANCHORS = SIZES * RATIOS
NARROW = {"DEPTH": 50, "STEM_OUT_CHANNELS": 8, "RES2_OUT_CHANNELS": 8, "WIDTH_PER_GROUP": 4}
TREE = {
    "MODEL": {
        "RESNETS": {**NARROW, "STEM_POOL": "caffe_max", "RES5_DILATION": 2},
        "ANCHOR_GENERATOR": {"SIZES": [[32, 64]], "ASPECT_RATIOS": [[0.5, 1.0, 2.0]]},
        "RPN": {"CONV_DIMS": [12], "PRE_NMS_TOPK_TEST": 50, "POST_NMS_TOPK_TEST": 10},
        "ROI_HEADS": {"NUM_CLASSES": CLASSES, "SCORE_THRESH_TEST": 0.0},
        "ROI_BOX_HEAD": {
            "POOLER_TYPE": "ROIPool",
            "POOLER_RESOLUTION": 4,
            "ATTRIBUTES": {"NUM_CLASSES": ATTRIBUTES, "EMBEDDING_DIM": 5, "HIDDEN_DIM": 6},
        },
    }
}
WITHOUT_ATTRIBUTES = copy.deepcopy(TREE)
del WITHOUT_ATTRIBUTES["MODEL"]["ROI_BOX_HEAD"]["ATTRIBUTES"]
STAGES = ["res2", "res3", "res4", "res5"]
LEVELS = ["p2", "p3", "p4", "p5", "p6"]
FPN_TREE = {
    "MODEL": {
        "BACKBONE": {"NAME": "build_resnet_fpn_backbone"},
        "RESNETS": {**NARROW, "OUT_FEATURES": STAGES},
        "FPN": {"IN_FEATURES": STAGES, "OUT_CHANNELS": 16},
        "ANCHOR_GENERATOR": {"SIZES": [[16], [24], [32], [48], [64]]},
        "RPN": {"IN_FEATURES": LEVELS, "PRE_NMS_TOPK_TEST": 20, "POST_NMS_TOPK_TEST": 20},
        "ROI_HEADS": {
            "NAME": "StandardROIHeads",
            "IN_FEATURES": LEVELS[:4],
            "NUM_CLASSES": 4,
            "SCORE_THRESH_TEST": 0.0,
        },
        "ROI_BOX_HEAD": {"NAME": "FastRCNNConvFCHead", "NUM_FC": 2, "FC_DIM": 12, "POOLER_RESOLUTION": 3},
    }
}
RPN = "proposal_generator.rpn_head"
PREDICTOR = "roi_heads.box_predictor"
CAFFE2_LAYERS = {
    f"{RPN}.conv": "conv_rpn",
    f"{RPN}.objectness_logits": "rpn_cls_logits",
    f"{RPN}.anchor_deltas": "rpn_bbox_pred",
    f"{PREDICTOR}.cls_score": "cls_score",
    f"{PREDICTOR}.bbox_pred": "bbox_pred",
    "backbone.stem.conv1": "conv1",
    "roi_heads.box_head.conv1": "head_conv1",
    "roi_heads.box_head.fc1": "fc6",
    "roi_heads.box_head.fc2": "fc7",
}
NEW_NORMS = {"weight": "gamma", "bias": "beta", "running_mean": "running_mean", "running_var": "running_var"}
OLD_NORMS = {"weight": "s", "bias": "b", "running_mean": "rm", "running_var": "riv"}


def make(tree: dict, seed: int) -> FasterRCNN:
    """A detector whose every number is random, norms too."""
    torch.manual_seed(seed)
    model = FasterRCNN(DetectorConfig.from_yaml(tree)).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name or "bias" in name:
                value.copy_(torch.rand_like(value) + 0.5 if "running_var" in name else 0.2 * torch.randn_like(value))
            elif "box_predictor" in name or RPN in name:
                value.copy_(0.1 * torch.randn_like(value))
    return model


def save_detector(model: FasterRCNN, folder: Path) -> Path:
    """Write a detector's settings and weights into a folder."""
    save_weights(model.state_dict(), folder / WEIGHTS_NAME)
    save_settings(model, folder)
    return folder


def load_detector(folder: Path) -> FasterRCNN:
    """Read a detector as `save_detector` wrote it."""
    config = DetectorConfig.from_yaml(folder / CONFIG_NAME)
    class_names = read_class_names(folder, config.roi_heads.num_classes)
    model = FasterRCNN(config, class_names).eval()
    load_checkpoint(model, folder)
    return model


@torch.no_grad()
def outputs(model: FasterRCNN) -> dict[str, Tensor]:
    """All outputs of the detector for an image: of given boxes, and of predicted ones."""
    pixels = np.random.default_rng(0).integers(0, 256, (80, 112, 3), dtype=np.uint8)
    batch = make_image_batch([pixels], [(80, 112)], ["image"])
    boxes = torch.tensor([[3.0, 5, 60, 70], [40, 10, 110, 50]])
    given, found = model(batch, [boxes]), model(batch)
    results = {"features": given.features[0], "logits": given.class_logits[0], "boxes": found.boxes[0]}
    results |= {"scores": found.scores[0], "classes": found.classes[0]}
    if given.attribute_logits is not None:
        results["attributes"] = given.attribute_logits[0]
    return results


def assert_same_outputs(one: FasterRCNN, other: FasterRCNN) -> None:
    expected, actual = outputs(one), outputs(other)
    assert len(expected["boxes"]) > 5
    assert expected.keys() == actual.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


def write_pickle(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def without_prefix(name: str) -> str:
    return name.removeprefix("backbone.").removeprefix("roi_heads.")


def caffe2_name(name: str, norms: dict[str, str]) -> str:
    """The name in Detectron's and the model zoo's Caffe2 files; `norms` spells the parameters of batch norms."""
    is_fpn = name.startswith("backbone.bottom_up.")
    name = name.replace("backbone.bottom_up.", "backbone.")
    layer, _, parameter = name.rpartition(".")
    conv = layer.removesuffix(".norm")
    if conv in CAFFE2_LAYERS:
        blob = CAFFE2_LAYERS[conv]
    elif match := re.fullmatch(r"backbone\.fpn_(lateral|output)(\d)", conv):
        stage = int(match[2])
        blob = f"res{stage}_{(3, 4, 6, 3)[stage - 2] - 1}_sum"  # the stage's last block
        inner = f"fpn_inner_{blob}{'' if stage == 5 else '_lateral'}"
        blob = inner if match[1] == "lateral" else f"fpn_{blob}"
    else:
        stage, block, branch = without_prefix(conv).split(".")
        blob = f"{stage}_{block}_branch" + {"shortcut": "1", "conv1": "2a", "conv2": "2b", "conv3": "2c"}[branch]
    if layer == conv:
        return f"{blob}_{parameter[0]}"
    if "branch" not in blob and blob != "conv1":
        return f"{blob}_gn_{'s' if parameter == 'weight' else 'b'}"
    return f"{'res_conv1' if blob == 'conv1' and not is_fpn else blob}_bn_{norms[parameter]}"


def caffe2_blobs(model: FasterRCNN, norms: dict[str, str]) -> dict[str, np.ndarray]:
    blobs = {}
    for name, value in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        if "cls_score" in name:
            value = torch.cat((value[-1:], value[:-1]))
        elif "bbox_pred" in name:
            value = torch.cat((torch.full_like(value[:4], 99.0), value))
        name = caffe2_name(name, norms)
        if model.config.backbone_spec.reads_fpn:  # its RPN is named after the finest level
            name = re.sub(r"^(conv_rpn|rpn_\w+)_([wb])$", r"\1_fpn2_\2", name)
        blobs[name] = value
    return arrays(blobs)


def caffe_attention_state(model: FasterRCNN) -> dict[str, Tensor]:
    """The detector in the conventions of bottom-up attention's Caffe code, row by row."""
    state = dict(model.state_dict())
    background = torch.randn(ANCHORS, *state[f"{RPN}.objectness_logits.weight"].shape[1:])
    for parameter in ("weight", "bias"):
        objectness, deltas = (state[f"{RPN}.{name}.{parameter}"] for name in ("objectness_logits", "anchor_deltas"))
        zero = background if parameter == "weight" else torch.randn(ANCHORS)
        new_objectness, new_deltas = torch.empty(2 * ANCHORS, *objectness.shape[1:]), torch.empty_like(deltas)
        for s in range(SIZES):
            for r in range(RATIOS):
                ours, caffe = s * RATIOS + r, r * SIZES + s
                new_objectness[caffe] = zero[caffe]
                new_objectness[ANCHORS + caffe] = zero[caffe] + objectness[ours]
                new_deltas[4 * caffe : 4 * caffe + 4] = deltas[4 * ours : 4 * ours + 4]
        state[f"{RPN}.objectness_logits.{parameter}"] = new_objectness
        state[f"{RPN}.anchor_deltas.{parameter}"] = new_deltas
        boxes = state[f"{PREDICTOR}.bbox_pred.{parameter}"].clone()
        for row in range(len(boxes)):
            boxes[row] /= (10, 10, 5, 5)[row % 4]
        state[f"{PREDICTOR}.bbox_pred.{parameter}"] = torch.cat((torch.full_like(boxes[:4], 99.0), boxes))
        renamed = {"cls_score": "cls_score", "cls_embedding": "cls_embed", "attr_score": "attr_linear2"}
        for old, new in renamed.items():
            value = state.pop(f"{PREDICTOR}.{old}.{parameter}", None)
            if value is not None:
                state[f"{PREDICTOR}.{new}.{parameter}"] = torch.cat((value[-1:], value[:-1]))
        state[f"{PREDICTOR}.attr_linear1.{parameter}"] = state.pop(f"{PREDICTOR}.fc_attr.{parameter}")
    return state
