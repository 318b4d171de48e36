"""Settings of detectors: Detectron2's files with their bases, and values and combinations that are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from detector.config import KEYS, OUR_KEYS, AttributeConfig, DetectorConfig, InputConfig, ResNetConfig
from detector.errors import UserError
from detector.yaml_tree import flatten, load_tree

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "detector").glob("*.yaml"))
ON_HUB = ("swin_T_FPN",)  # reading it needs the hub, see test_auto_backbone.py


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem not in ON_HUB], ids=lambda path: path.stem)
def test_shipped_configs_are_read_and_written_back(path: Path):
    config = DetectorConfig.from_yaml(path)
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


def test_the_config_of_vl_bert():
    config = DetectorConfig.from_yaml(CONFIGS[0].parent / "vl_bert_R_101.yaml")
    assert config.resnet == ResNetConfig(depth=101, res5_dilation=2)
    assert (config.roi_heads.pooler_type, config.roi_heads.pooler_sampling_ratio) == ("ROIAlign", 1)


def test_bases_are_merged_below_and_relative_to_their_file(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("MODEL: {RESNETS: {DEPTH: 101, NORM: GN}}\nTEST: {DETECTIONS_PER_IMAGE: 7}\n")
    (tmp_path / "sub" / "top.yaml").write_text("_BASE_: ../base.yaml\nMODEL: {RESNETS: {DEPTH: 18}}\n")
    config = DetectorConfig.from_yaml(tmp_path / "sub" / "top.yaml")
    assert (config.resnet.depth, config.resnet.norm, config.roi_heads.detections_per_image) == (18, "GN", 7)
    same = DetectorConfig.from_yaml({"_BASE_": str(tmp_path / "base.yaml"), "MODEL": {"RESNETS": {"DEPTH": 18}}})
    assert same == config


def test_keys_of_training_runs_are_ignored_and_texts_may_be_python_literals():
    tree = {
        "VERSION": 2,
        "SOLVER": {"BASE_LR": 0.1, "STEPS": "(1, 2)"},
        "DATASETS": {"TRAIN": "('coco',)"},
        "INPUT": {"MIN_SIZE_TRAIN": "(640, 672)"},
        "OUTPUT_DIR": "x",
        "MODEL": {"DEVICE": "cpu", "FPN": {"OUT_CHANNELS": 3}, "ROI_BOX_HEAD": {"NUM_FC": 2}},
    }
    assert DetectorConfig.from_yaml(tree) == DetectorConfig(input=InputConfig(min_size_train=(640, 672)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.RESNETS.DEPTH", "deep"),
        ("MODEL.RESNETS.DEPTH", 42),
        ("MODEL.RESNETS.STRIDE_IN_1X1", 1),
        ("MODEL.RESNETS.DEFORM_ON_PER_STAGE", [False, True, False, False]),
        ("MODEL.MASK_ON", 2),
        ("MODEL.KEYPOINT_ON", True),
        ("MODEL.ANCHOR_GENERATOR.CELL_ANCHORS", [[0, 0, 4]]),
        ("MODEL.ANCHOR_GENERATOR.SIZES", [[32, 0]]),
        ("MODEL.ANCHOR_GENERATOR.OFFSET", 1.0),
        ("MODEL.RPN.IN_FEATURES", ["p4"]),
        ("MODEL.RPN.CONV_DIMS", []),
        ("MODEL.RPN.POSITIVE_FRACTION", 1.5),
        ("MODEL.ROI_HEADS.NAME", "CascadeROIHeads"),
        ("MODEL.ROI_HEADS.NMS_THRESH_TEST", float("nan")),
        ("MODEL.ROI_BOX_HEAD.REGION_FEATURE", "mean"),  # of a C4
        ("MODEL.PIXEL_STD", [1, 1, 0]),
        ("TEST.DETECTIONS_PER_IMAGE", -1),
        ("MODEL.RESNETS.DEPHT.*MODEL.RESNETS.DEPTH", 1),  # with a hint
        ("MODEL.RESNETS.NORM.*'FrozenBN', 'BN', 'SyncBN', 'GN'", "LN"),
    ],
)
def test_bad_values_name_file_and_key(key: str, value: Any):
    with pytest.raises(UserError, match=rf"^a\.yaml: .*{key.removeprefix('MODEL.')}"):
        DetectorConfig.from_flat({key.partition(".*")[0]: value}, "a.yaml")


def test_a_file_without_keys(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("- 3\n")
    with pytest.raises(UserError, match=r"a\.yaml"):
        DetectorConfig.from_yaml(tmp_path / "a.yaml")


def test_keys_of_ours_are_written_only_where_they_are_used():
    assert set(OUR_KEYS) <= set(KEYS) and not set(OUR_KEYS) & set(DetectorConfig().to_flat())
    config = DetectorConfig(resnet=ResNetConfig(stem_pool="none"), attributes=AttributeConfig(num_classes=5))
    written = set(OUR_KEYS) & set(config.to_flat())
    assert written == {"MODEL.RESNETS.STEM_POOL", "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES"}
    assert config.map_shapes == {"res4": (1024, 8)}


def changed(**keys: Any) -> DetectorConfig:
    """An FPN with other values of MODEL; "__" stands for a dot."""
    flat = flatten(load_tree(CONFIGS[0].parent / "R_50_FPN.yaml"))
    return DetectorConfig.from_flat(flat | {f"MODEL.{key.replace('__', '.')}": value for key, value in keys.items()})


def test_a_detector_of_the_model_zoo():
    keys = {"NUM_GROUPS": 32, "WIDTH_PER_GROUP": 8, "DEPTH": 101, "STRIDE_IN_1X1": False}
    config = changed(MASK_ON=False, **{f"RESNETS__{key}": value for key, value in keys.items()})
    assert config.backbone_spec.reads_fpn and config.has_box_head
    assert (config.resnet.depth, config.resnet.num_groups, config.resnet.stride_in_1x1) == (101, 32, False)
    assert config.map_shapes == {"p2": (256, 4), "p3": (256, 8), "p4": (256, 16), "p5": (256, 32), "p6": (256, 64)}
    assert (config.size_divisibility, config.map_size, config.feature_dim) == (32, 7, 1024)
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"META_ARCHITECTURE": "RetinaNet"}, "META_ARCHITECTURE"),
        ({"BACKBONE__NAME": "build_retinanet_resnet_fpn_backbone"}, "MODEL.BACKBONE.NAME"),
        ({"ROI_HEADS__NAME": "Res5ROIHeads"}, "Res5ROIHeads needs MODEL.BACKBONE.NAME"),
        ({"FPN__IN_FEATURES": ["res3", "res4", "res5"]}, "MODEL.RPN.IN_FEATURES"),
        ({"FPN__NORM": "IN"}, "MODEL.FPN.NORM"),
        ({"ROI_HEADS__IN_FEATURES": ["p2", "p4"]}, "MODEL.ROI_HEADS.IN_FEATURES"),
        ({"ROI_HEADS__IN_FEATURES": ["p3", "p2"]}, "MODEL.ROI_HEADS.IN_FEATURES"),
        ({"ROI_BOX_HEAD__NUM_FC": 1, "ROI_BOX_HEAD__REGION_FEATURE": "fc7"}, "REGION_FEATURE fc7"),
        ({"R2C__FEATURE_DIM": 8}, "MODEL.R2C.FEATURE_DIM"),
    ],
)
def test_keys_that_contradict_each_other_are_named(keys: dict[str, Any], named: str):
    with pytest.raises(UserError, match=named):
        changed(**keys)


def test_maps_that_the_backbone_does_not_have_are_answered_with_those_that_it_has():
    with pytest.raises(UserError, match=r"must be maps of the backbone: res3, res4\.$"):
        DetectorConfig.from_flat(
            {
                "MODEL.RESNETS.OUT_FEATURES": ["res3", "res4"],
                "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
                "MODEL.RPN.IN_FEATURES": ["res5"],
            }
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"BACKBONE.NAME": "build_swin"},
            "MODEL.BACKBONE.NAME: invalid enum value 'build_swin'; choose from 'build_re",
        ),
        ({"RESNETS.NORM": "GN", "BACKBONE.NAME": "build_mobilenet_v3_large_fpn_backbone"}, "NORM GN is not supported"),
        ({"BACKBONE.NAME": "build_r2c_backbone"}, "MODEL.R2C.FEATURE_DIM needs"),
    ],
)
def test_what_a_backbone_cannot_follow_is_refused(keys: dict[str, Any], message: str):
    flat = {f"MODEL.{key}": value for key, value in keys.items()}
    if "mobilenet" in flat["MODEL.BACKBONE.NAME"]:
        maps = {"RPN.IN_FEATURES": ["0"], "ROI_HEADS.IN_FEATURES": ["0"], "ROI_HEADS.NAME": "StandardROIHeads"}
        flat |= {f"MODEL.{key}": value for key, value in maps.items()}
    with pytest.raises(UserError, match=message):
        DetectorConfig.from_flat(flat)


def test_the_name_of_the_backbone_of_r2c_may_be_left_out():
    config = DetectorConfig.from_flat({"MODEL.R2C.FEATURE_DIM": 8})
    assert config.backbone == "build_r2c_backbone"
    assert DetectorConfig.from_flat(config.to_flat()) == config
