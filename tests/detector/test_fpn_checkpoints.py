"""Published layouts of FPN checkpoints, written here from a tiny detector: loaded, they give its numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from detector.checkpoint import load_checkpoint, load_pretrained, save_pretrained
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import CELL_ANCHORS

STAGES = ["res2", "res3", "res4", "res5"]
LEVELS = ["p2", "p3", "p4", "p5", "p6"]
TREE = {
    "MODEL": {
        "BACKBONE": {"NAME": "build_resnet_fpn_backbone"},
        "RESNETS": {
            "DEPTH": 50,
            "STEM_OUT_CHANNELS": 8,
            "RES2_OUT_CHANNELS": 8,
            "WIDTH_PER_GROUP": 4,
            "OUT_FEATURES": STAGES,
        },
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
GROUP_NORMS = copy.deepcopy(TREE)
GROUP_NORMS["MODEL"]["FPN"]["NORM"] = "GN"
GROUP_NORMS["MODEL"]["ROI_BOX_HEAD"] |= {"NUM_CONV": 1, "CONV_DIM": 8, "NUM_FC": 1, "NORM": "GN"}
BLOCKS = {"res2": 3, "res3": 4, "res4": 6, "res5": 3}
TRUNK = "backbone.bottom_up."


@pytest.fixture(scope="module")
def fpn(published: ModuleType) -> FasterRCNN:
    return published.make(TREE, 1)


def old_buffers(model: FasterRCNN) -> dict[str, np.ndarray]:
    generators = model.proposal_generator.anchor_generators
    cells = {f"{CELL_ANCHORS}{number}": generator.cell_anchors.numpy() for number, generator in enumerate(generators)}
    means = {"pixel_mean": model.config.input.pixel_mean, "pixel_std": model.config.input.pixel_std}
    return cells | {name: np.array(values, np.float32).reshape(3, 1, 1) for name, values in means.items()}


def test_a_model_zoo_file_with_old_anchor_buffers(published: ModuleType, tmp_path: Path, fpn: FasterRCNN):
    arrays = published.arrays(fpn.state_dict()) | old_buffers(fpn)
    assert sum(name.startswith(CELL_ANCHORS) for name in arrays) == 5
    content = {"model": arrays, "__author__": "Detectron2 Model Zoo"}
    model = published.make(TREE, 2)
    report = load_checkpoint(model, published.write_pickle(tmp_path / "model_final_280758.pkl", content))
    assert report.is_complete and report.layout == "Detectron2"
    published.assert_same_outputs(fpn, model)

    for number in range(5):
        wrong = arrays | {f"{CELL_ANCHORS}{number}": arrays[f"{CELL_ANCHORS}{number}"] + 1}
        file = published.write_pickle(tmp_path / "wrong.pkl", {"model": wrong})
        with pytest.raises(ValueError, match=rf"cell_anchors\.{number} .* contradicts MODEL\.ANCHOR_GENERATOR"):
            load_checkpoint(published.make(TREE, 2), file)


def test_the_box_part_of_a_mask_rcnn(published: ModuleType, tmp_path: Path, fpn: FasterRCNN):
    mask = {f"roi_heads.mask_head.{name}": np.zeros(2, np.float32) for name in ("mask_fcn1.weight", "predictor.bias")}
    content = {"model": published.arrays(fpn.state_dict()) | mask, "__author__": "Detectron2 Model Zoo"}
    model = published.make(TREE, 2)
    report = load_checkpoint(model, published.write_pickle(tmp_path / "mask.pkl", content))
    assert not report.missing
    assert report.unexpected == list(mask)
    published.assert_same_outputs(fpn, model)


def caffe2_blobs(published: ModuleType, model: FasterRCNN) -> dict[str, np.ndarray]:
    """The detector in Detectron's names: laterals below the top have `_lateral` in theirs."""
    layers = {
        "proposal_generator.rpn_head.conv": "conv_rpn_fpn2",
        "proposal_generator.rpn_head.objectness_logits": "rpn_cls_logits_fpn2",
        "proposal_generator.rpn_head.anchor_deltas": "rpn_bbox_pred_fpn2",
        "roi_heads.box_head.conv1": "head_conv1",
        "roi_heads.box_head.fc1": "fc6",
        "roi_heads.box_head.fc2": "fc7",
    }
    for number, (stage, blocks) in enumerate(BLOCKS.items(), 2):
        name = f"{stage}_{blocks - 1}_sum"
        layers[f"backbone.fpn_lateral{number}"] = f"fpn_inner_{name}{'' if stage == 'res5' else '_lateral'}"
        layers[f"backbone.fpn_output{number}"] = f"fpn_{name}"
    blobs, rest = {}, {}
    for name, value in model.state_dict().items():
        layer, _, parameter = name.rpartition(".")
        conv = layer.removesuffix(".norm")
        if conv not in layers:
            rest[name.replace(TRUNK, "backbone.")] = value
        elif conv == layer:
            blobs[f"{layers[conv]}_{parameter[0]}"] = value.numpy()
        else:
            blobs[f"{layers[conv]}_gn_{'s' if parameter == 'weight' else 'b'}"] = value.numpy()
    for name, value in rest.items():
        if "cls_score" in name:
            value = torch.cat((value[-1:], value[:-1]))
        elif "bbox_pred" in name:
            value = torch.cat((torch.full_like(value[:4], 99.0), value))
        blobs[published.caffe2_name(name, published.OLD_NORMS)] = value.numpy()
    return blobs


@pytest.mark.parametrize("tree", [TREE, GROUP_NORMS], ids=["fpn", "group_norms"])
def test_caffe2_detectron(published: ModuleType, tmp_path: Path, tree: dict):
    original, model = published.make(tree, 1), published.make(tree, 2)
    blobs = caffe2_blobs(published, original)
    assert {"fpn_inner_res5_2_sum_w", "fpn_inner_res4_5_sum_lateral_w", "fpn_res2_2_sum_w"} <= set(blobs)
    assert {"conv_rpn_fpn2_w", "rpn_cls_logits_fpn2_w", "rpn_bbox_pred_fpn2_b", "fc6_w"} <= set(blobs)
    mask = {"_[mask]_fcn1_w": np.zeros(2), "mask_fcn_logits_w": np.zeros(2), "conv5_mask_w": np.zeros(2)}
    momentum = {f"{name}_momentum": value for name, value in blobs.items()}
    path = published.write_pickle(tmp_path / "c2.pkl", {"blobs": blobs | mask | momentum})
    report = load_checkpoint(model, path)
    assert report.layout == "Caffe2"
    assert not report.missing
    assert set(report.unexpected) == set(mask)
    published.assert_same_outputs(original, model)


def trunk_content(published: ModuleType, model: FasterRCNN, style: str) -> dict:
    """ImageNet files: `R-50.pkl` has Caffe2's names, `X-101-32x8d.pkl` Detectron2's, others torchvision's."""
    trunk = {n.removeprefix(TRUNK): v for n, v in model.state_dict().items() if n.startswith(TRUNK)}
    if style == "caffe2":
        blobs = {published.caffe2_name(f"backbone.{n}", published.NEW_NORMS): v.numpy() for n, v in trunk.items()}
        return {"model": blobs | {"fc1000_w": np.zeros((2, 2))}, "__author__": "Caffe2"}
    if style == "torchvision":
        names = {published.torchvision_name(f"backbone.{n}"): v.numpy() for n, v in trunk.items()}
        return names | {"fc.weight": np.zeros((2, 2), np.float32)}
    names = {n: v.numpy() for n, v in trunk.items()} | {"stem.fc.weight": np.zeros((2, 2), np.float32)}
    return {"model": names, "__author__": "torchvision", "matching_heuristics": True}


@pytest.mark.parametrize("style", ["caffe2", "torchvision", "detectron2"])
def test_imagenet_files_fill_the_trunk_below_the_pyramid(published, tmp_path: Path, fpn: FasterRCNN, style: str):
    path = published.write_pickle(tmp_path / "R-50.pkl", trunk_content(published, fpn, style))
    model = published.make(TREE, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_checkpoint(model, path, expect="backbone")
    assert len(report.unexpected) == 1
    assert report.missing and not any(name.startswith(TRUNK) for name in report.missing)
    for name, value in model.state_dict().items():
        assert torch.equal(value, fpn.state_dict()[name] if name.startswith(TRUNK) else before[name]), name
    with pytest.raises(ValueError, match=r"R-50\.pkl does not fit"):
        load_checkpoint(model, path)


def test_the_trunk_of_a_whole_detector(published: ModuleType, tmp_path: Path, fpn: FasterRCNN):
    file = published.write_pickle(tmp_path / "a.pkl", {"model": published.arrays(fpn.state_dict())})
    model = published.make(TREE, 2)
    lateral = model.backbone.fpn_lateral2.weight.clone()
    load_checkpoint(model, file, expect="backbone")
    assert torch.equal(model.backbone.bottom_up.res5[2].conv3.weight, fpn.backbone.bottom_up.res5[2].conv3.weight)
    assert torch.equal(model.backbone.fpn_lateral2.weight, lateral)


def test_saved_and_loaded(published: ModuleType, tmp_path: Path, fpn: FasterRCNN):
    save_pretrained(fpn, tmp_path)
    loaded = load_pretrained(tmp_path)
    assert loaded.config == fpn.config
    published.assert_same_outputs(fpn, loaded)
