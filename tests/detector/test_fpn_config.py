"""Settings of FPN detectors: Detectron2's own files with their bases, what fits together, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from detector.config import DetectorConfig

# The facts of Detectron2's configs/Base-RCNN-FPN.yaml.
BASE = """
MODEL:
  META_ARCHITECTURE: "GeneralizedRCNN"
  BACKBONE:
    NAME: "build_resnet_fpn_backbone"
  RESNETS:
    OUT_FEATURES: ["res2", "res3", "res4", "res5"]
  FPN:
    IN_FEATURES: ["res2", "res3", "res4", "res5"]
  ANCHOR_GENERATOR:
    SIZES: [[32], [64], [128], [256], [512]]
    ASPECT_RATIOS: [[0.5, 1.0, 2.0]]
  RPN:
    IN_FEATURES: ["p2", "p3", "p4", "p5", "p6"]
    PRE_NMS_TOPK_TRAIN: 2000
    PRE_NMS_TOPK_TEST: 1000
    POST_NMS_TOPK_TRAIN: 1000
    POST_NMS_TOPK_TEST: 1000
  ROI_HEADS:
    NAME: "StandardROIHeads"
    IN_FEATURES: ["p2", "p3", "p4", "p5"]
  ROI_BOX_HEAD:
    NAME: "FastRCNNConvFCHead"
    NUM_FC: 2
    POOLER_RESOLUTION: 7
  ROI_MASK_HEAD:
    NAME: "MaskRCNNConvUpsampleHead"
    NUM_CONV: 4
    POOLER_RESOLUTION: 14
DATASETS:
  TRAIN: ("coco_2017_train",)
  TEST: ("coco_2017_val",)
SOLVER:
  IMS_PER_BATCH: 16
  BASE_LR: 0.02
  STEPS: (60000, 80000)
  MAX_ITER: 90000
INPUT:
  MIN_SIZE_TRAIN: (640, 672, 704, 736, 768, 800)
VERSION: 2
"""
X_101 = """
_BASE_: "../Base-RCNN-FPN.yaml"
MODEL:
  MASK_ON: False
  WEIGHTS: "detectron2://ImageNetPretrained/FAIR/X-101-32x8d.pkl"
  PIXEL_STD: [57.375, 57.120, 58.395]
  RESNETS:
    STRIDE_IN_1X1: False
    NUM_GROUPS: 32
    WIDTH_PER_GROUP: 8
    DEPTH: 101
SOLVER:
  STEPS: (210000, 250000)
  MAX_ITER: 270000
"""
R_50_MASK = '_BASE_: "../Base-RCNN-FPN.yaml"\nMODEL:\n  MASK_ON: True\n  RESNETS:\n    DEPTH: 50\n'
CONFIGS = Path(__file__).parents[2] / "configs" / "detector"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    (tmp_path / "COCO-Detection").mkdir()
    (tmp_path / "Base-RCNN-FPN.yaml").write_text(BASE)
    (tmp_path / "COCO-Detection" / "x_101.yaml").write_text(X_101)
    (tmp_path / "COCO-Detection" / "mask.yaml").write_text(R_50_MASK)
    return tmp_path / "COCO-Detection"


def changed(**keys: Any) -> dict[str, Any]:
    tree = copy.deepcopy(yaml.safe_load(BASE))
    for key, value in keys.items():
        node = tree["MODEL"]
        *parents, leaf = key.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def test_a_file_of_the_model_zoo_with_its_base(zoo: Path):
    config = DetectorConfig.from_yaml(zoo / "x_101.yaml")
    assert config.is_fpn and config.has_box_head
    assert (config.resnet.depth, config.resnet.num_groups, config.resnet.stride_in_1x1) == (101, 32, False)
    assert config.map_shapes == {"p2": (256, 4), "p3": (256, 8), "p4": (256, 16), "p5": (256, 32), "p6": (256, 64)}
    assert (config.size_divisibility, config.map_size, config.feature_dim) == (32, 7, 1024)
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


def test_shipped_configs_have_the_values_of_the_zoo(zoo: Path):
    base = DetectorConfig.from_yaml(zoo.parent / "Base-RCNN-FPN.yaml").to_flat()
    shipped = DetectorConfig.from_yaml(CONFIGS / "R_50_FPN.yaml").to_flat()
    assert {key for key in base if base[key] != shipped[key]} == {"MODEL.WEIGHTS"}
    pythia = DetectorConfig.from_yaml(CONFIGS / "X_152_FPN.yaml")
    assert (pythia.feature_dim, pythia.box_head.region_feature) == (2048, "fc6")


def test_the_box_part_of_a_mask_rcnn_is_read_if_asked(zoo: Path):
    with pytest.raises(ValueError, match=r"MODEL\.MASK_ON = True is not supported; only the box branch .* False reads"):
        DetectorConfig.from_yaml(zoo / "mask.yaml")
    config = DetectorConfig.from_yaml({"_BASE_": str(zoo / "mask.yaml"), "MODEL": {"MASK_ON": False}})
    assert config == DetectorConfig.from_yaml(zoo.parent / "Base-RCNN-FPN.yaml")


def test_the_zoos_own_retinanet_is_refused_in_one_sentence(zoo: Path, tmp_path: Path):
    """Its sizes are Python code, which is not run, and not what the message is about."""
    sizes = '    SIZES: !!python/object/apply:eval ["[[1]]"]'
    text = f"MODEL:\n  META_ARCHITECTURE: RetinaNet\n  ANCHOR_GENERATOR:\n{sizes}\n"
    (tmp_path / "retinanet.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"META_ARCHITECTURE = 'RetinaNet' is not supported; two-stage detectors"):
        DetectorConfig.from_yaml(tmp_path / "retinanet.yaml")
    (tmp_path / "sizes.yaml").write_text(text.replace("RetinaNet", "GeneralizedRCNN"))
    with pytest.raises(
        ValueError, match=r"SIZES has the tag tag:yaml.org,2002:python/object/apply:eval, which is not read"
    ):
        DetectorConfig.from_yaml(tmp_path / "sizes.yaml")


@pytest.mark.parametrize(("base", "shown"), [("", "None"), ("3", "3"), ("[a.yaml, 4]", "'a.yaml', 4")])
def test_a_base_that_is_no_path(tmp_path: Path, base: str, shown: str):
    (tmp_path / "config.yaml").write_text(f"_BASE_: {base}\n")
    with pytest.raises(ValueError, match=f"_BASE_ is .*{shown}.*; it must be the path of a YAML file"):
        DetectorConfig.from_yaml(tmp_path / "config.yaml")


def test_a_config_that_is_not_text(tmp_path: Path):
    (tmp_path / "config.yaml").write_bytes(b"MODEL: \xff\xfe")
    with pytest.raises(ValueError, match=r"config\.yaml is not valid YAML: byte 7 is not utf-8 text"):
        DetectorConfig.from_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("feature", "dim"), [("head", 1024), ("fc6", 1024), ("fc7", 1024), ("mean", 256)], ids=lambda value: str(value)
)
def test_the_width_of_a_region_feature(feature: str, dim: int):
    config = DetectorConfig.from_yaml(changed(ROI_BOX_HEAD__REGION_FEATURE=feature))
    assert config.feature_dim == dim
    assert ("MODEL.ROI_BOX_HEAD.REGION_FEATURE" in config.to_flat()) == (feature != "head")
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"META_ARCHITECTURE": "RetinaNet"}, r"META_ARCHITECTURE = 'RetinaNet' .*; two-stage detectors of boxes are"),
        ({"META_ARCHITECTURE": "PanopticFPN"}, "META_ARCHITECTURE = 'PanopticFPN' is not supported"),
        ({"KEYPOINT_ON": True}, "MODEL.KEYPOINT_ON = True is not supported; only the box branch"),
        ({"ROI_HEADS__NAME": "CascadeROIHeads"}, "NAME must be one of Res5ROIHeads, StandardROIHeads, not Cascade"),
        ({"BACKBONE__NAME": "build_retinanet_resnet_fpn_backbone"}, "MODEL.BACKBONE.NAME must be one of build_resnet"),
        ({"ROI_HEADS__NAME": "Res5ROIHeads"}, "build_resnet_fpn_backbone needs MODEL.ROI_HEADS.NAME StandardROIHeads"),
        ({"RESNETS__OUT_FEATURES": ["res4"]}, r"OUT_FEATURES \[res4\] lacks maps of MODEL.FPN.IN_FEATURES"),
        ({"RESNETS__OUT_FEATURES": ["res4", "res3"]}, "OUT_FEATURES must name stages from res2 to res5, in order"),
        ({"RESNETS__RES5_DILATION": 2}, "MODEL.RESNETS.RES5_DILATION must be 1 with FPN"),
        ({"RESNETS__STEM_POOL": "none"}, "STEM_POOL none needs MODEL.ROI_HEADS.NAME Res5ROIHeads"),
        ({"FPN__IN_FEATURES": []}, "MODEL.FPN.IN_FEATURES must be consecutive stages that end with res5"),
        ({"FPN__IN_FEATURES": ["res2", "res5"]}, "MODEL.FPN.IN_FEATURES must be consecutive stages"),
        (
            {"FPN__IN_FEATURES": ["res3", "res4", "res5"]},
            r"MODEL.RPN.IN_FEATURES \[p2.* must name maps of the backbone",
        ),
        ({"FPN__NORM": "LN"}, 'MODEL.FPN.NORM must be one of "", FrozenBN, BN, SyncBN, GN, not LN'),
        ({"FPN__FUSE_TYPE": "max"}, "MODEL.FPN.FUSE_TYPE must be one of sum, avg"),
        ({"FPN__OUT_CHANELS": 16}, "MODEL.FPN.OUT_CHANELS .* Did you mean MODEL.FPN.OUT_CHANNELS"),
        (
            {"RPN__IN_FEATURES": ["res4"]},
            r"MODEL.RPN.IN_FEATURES \[res4\] must name maps of the backbone, which are \[p",
        ),
        ({"ROI_HEADS__IN_FEATURES": ["p2", "p4"]}, "MODEL.ROI_HEADS.IN_FEATURES .* must be consecutive levels"),
        ({"ROI_HEADS__IN_FEATURES": []}, "MODEL.ROI_HEADS.IN_FEATURES .* must name maps"),
        ({"ANCHOR_GENERATOR__SIZES": [[32], [64]]}, r"SIZES must hold one list for all maps .* \(5\), not 2"),
        ({"ANCHOR_GENERATOR__SIZES": [[1], [2], [3], [4], [5, 6]]}, "as many anchors per cell, not"),
        ({"ANCHOR_GENERATOR__CELL_ANCHORS": [[0, 0, 4, 4]]}, r"CELL_ANCHORS must hold .* \(15\), not 1"),
        ({"ROI_BOX_HEAD__NAME": ""}, "MODEL.ROI_BOX_HEAD.NAME must be FastRCNNConvFCHead"),
        ({"ROI_BOX_HEAD__NUM_FC": 0}, "MODEL.ROI_BOX_HEAD.NUM_FC or NUM_CONV must be positive"),
        ({"ROI_BOX_HEAD__NUM_FC": 1, "ROI_BOX_HEAD__REGION_FEATURE": "fc7"}, "fc7 needs at least 2 fully connected"),
        ({"ROI_BOX_HEAD__REGION_FEATURE": "fc8"}, "REGION_FEATURE must be one of head, fc6, fc7, mean, not fc8"),
    ],
)
def test_what_does_not_fit_is_named(keys: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        DetectorConfig.from_yaml(changed(**keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"RPN": {"IN_FEATURES": ["p4"]}}, r"MODEL.RPN.IN_FEATURES must be \[res4\] with .* Res5ROIHeads, not \[p4\]"),
        ({"ROI_BOX_HEAD": {"REGION_FEATURE": "mean"}}, "REGION_FEATURE mean needs MODEL.ROI_HEADS.NAME StandardROI"),
    ],
)
def test_what_c4_does_not_have(tree: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DetectorConfig.from_yaml({"MODEL": tree})
