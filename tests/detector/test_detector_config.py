from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from detector.config import OUR_KEYS, AttributeConfig, DetectorConfig, ResNetConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "detector").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_read_and_written_back(path: Path):
    config = DetectorConfig.from_yaml(path)
    assert DetectorConfig.from_yaml(yaml.safe_load(config.to_yaml())) == config


def test_stock_and_vl_bert_values():
    folder = CONFIGS[0].parent
    stock = DetectorConfig.from_yaml(folder / "R_101_C4.yaml")
    assert stock.resnet == ResNetConfig(depth=101)
    assert stock.input.min_size_train == (640, 672, 704, 736, 768, 800)
    vl_bert = DetectorConfig.from_yaml(folder / "vl_bert_R_101.yaml")
    assert vl_bert.resnet == ResNetConfig(depth=101, res5_dilation=2)
    assert (vl_bert.roi_heads.pooler_type, vl_bert.roi_heads.pooler_sampling_ratio) == ("ROIAlign", 1)


def test_bases_are_merged_below_and_relative_to_their_file(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("MODEL: {RESNETS: {DEPTH: 101, NORM: GN}}\nTEST: {DETECTIONS_PER_IMAGE: 7}\n")
    (tmp_path / "sub" / "top.yaml").write_text("_BASE_: ../base.yaml\nMODEL: {RESNETS: {DEPTH: 18}}\n")
    config = DetectorConfig.from_yaml(tmp_path / "sub" / "top.yaml")
    assert (config.resnet.depth, config.resnet.norm, config.roi_heads.detections_per_image) == (18, "GN", 7)
    same = DetectorConfig.from_yaml({"_BASE_": str(tmp_path / "base.yaml"), "MODEL": {"RESNETS": {"DEPTH": 18}}})
    assert same == config


def test_values_may_be_python_literals_in_strings():
    config = DetectorConfig.from_yaml({"INPUT": {"MIN_SIZE_TRAIN": "(640, 672)"}, "MODEL": {"RPN": {"NMS_THRESH": 1}}})
    assert config.input.min_size_train == (640, 672)
    assert config.rpn.nms_thresh == 1.0


def test_keys_of_training_runs_are_ignored():
    tree = {
        "VERSION": 2,
        "SOLVER": {"BASE_LR": 0.1, "STEPS": "(1, 2)"},
        "DATASETS": {"TRAIN": "('coco',)"},
        "OUTPUT_DIR": "x",
        "MODEL": {"DEVICE": "cpu", "FPN": {"OUT_CHANNELS": 3}, "ROI_BOX_HEAD": {"NUM_FC": 2}},
    }
    assert DetectorConfig.from_yaml(tree) == DetectorConfig()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"MODEL": {"RESNETS": {"DEPHT": 50}}}, "MODEL.RESNETS.DEPHT .* Did you mean MODEL.RESNETS.DEPTH"),
        ({"MODEL": {"CAFFE_MAXPOOL": True}}, "MODEL.CAFFE_MAXPOOL .* here it is MODEL.RESNETS.STEM_POOL: caffe_max"),
        ({"MODEL": {"ANCHOR_GENERATOR": {"CELL_ANCHORS": [[0, 0, 4, 4]]}}}, "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS must"),
        ({"MODEL": {"MASK_ON": True}}, "MODEL.MASK_ON = True is not supported"),
        ({"MODEL": {"ROI_HEADS": {"NAME": "StandardROIHeads"}}}, "MODEL.ROI_HEADS.NAME"),
        ({"MODEL": {"RESNETS": {"DEFORM_ON_PER_STAGE": [False, True, False, False]}}}, "DEFORM_ON_PER_STAGE"),
        ({"MODEL": {"RESNETS": {"DEPTH": "deep"}}}, "MODEL.RESNETS.DEPTH = 'deep' has the wrong type"),
        ({"MODEL": {"RESNETS": {"DEPTH": 42}}}, "MODEL.RESNETS.DEPTH must be"),
        ({"MODEL": {"RESNETS": {"NORM": "LN"}}}, "MODEL.RESNETS.NORM must be"),
        ({"MODEL": {"ANCHOR_GENERATOR": {"SIZES": [[32], [64]]}}}, "MODEL.ANCHOR_GENERATOR.SIZES"),
        ({"MODEL": {"RPN": {"IOU_LABELS": [0, 1]}}}, "MODEL.RPN.IOU_LABELS"),
        ({"MODEL": {"ROI_BOX_HEAD": {"POOLER_TYPE": "ROIAlignRotated"}}}, "POOLER_TYPE"),
        ({"VERSION": 1}, "VERSION = 1"),
        ({"MODEL": {"RPN": {"BATCH_SIZE_PER_IMAGE": 0}}}, "MODEL.RPN.BATCH_SIZE_PER_IMAGE is 0; it must be positive"),
        ({"MODEL": {"RPN": {"POST_NMS_TOPK_TEST": -1}}}, "MODEL.RPN.POST_NMS_TOPK_TEST is -1"),
        ({"MODEL": {"RPN": {"CONV_DIMS": [64, 0]}}}, "MODEL.RPN.CONV_DIMS must hold positive"),
        ({"MODEL": {"RPN": {"POSITIVE_FRACTION": 1.5}}}, "MODEL.RPN.POSITIVE_FRACTION must be at most 1"),
        ({"MODEL": {"RPN": {"BBOX_REG_WEIGHTS": [1, 1, 0, 1]}}}, "MODEL.RPN.BBOX_REG_WEIGHTS is"),
        ({"MODEL": {"RPN": {"SMOOTH_L1_BETA": -0.1}}}, "MODEL.RPN.SMOOTH_L1_BETA is -0.1; it must be 0 or more"),
        ({"MODEL": {"ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": -2}}}, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE is -2"),
        ({"MODEL": {"ROI_HEADS": {"NMS_THRESH_TEST": 1.1}}}, "ROI_HEADS.NMS_THRESH_TEST is 1.1; it must be at most 1"),
        (
            {"MODEL": {"ROI_HEADS": {"NMS_THRESH_TEST": -0.1}}},
            "NMS_THRESH_TEST is -0.1; it must be 0 or more",
        ),
        ({"MODEL": {"RPN": {"NMS_THRESH": 70}}}, "MODEL.RPN.NMS_THRESH is 70.0; it must be at most 1"),
        ({"MODEL": {"RPN": {"SCORE_THRESH": 5}}}, "MODEL.RPN.SCORE_THRESH is 5.0; it must be at most 1"),
        ({"MODEL": {"ROI_HEADS": {"NMS_THRESH_TEST": float("nan")}}}, "MODEL.ROI_HEADS.NMS_THRESH_TEST is nan"),
        ({"MODEL": {"ROI_BOX_HEAD": {"POOLER_RESOLUTION": 0}}}, "POOLER_RESOLUTION is 0"),
        ({"MODEL": {"ROI_BOX_HEAD": {"POOLER_RESOLUTION": 999}}}, "POOLER_RESOLUTION is 999; it must be at most 256"),
        (
            {"MODEL": {"RESNETS": {"WIDTH_PER_GROUP": 10**8}}},
            "WIDTH_PER_GROUP is 100000000; it must be at most",
        ),
        ({"MODEL": {"ROI_HEADS": {"NUM_CLASSES": 10**8}}}, "NUM_CLASSES is 100000000; it must be at most 16777216"),
        ({"INPUT": {"MIN_SIZE_TEST": 10**7}}, "INPUT.MIN_SIZE_TEST is 10000000; it must be at most 32768"),
        ({"MODEL": {"ANCHOR_GENERATOR": {"SIZES": [[9] * 5000]}}}, "SIZES has 5000 values; it must have at most 1000"),
        ({"MODEL": {"ROI_BOX_HEAD": {"ATTRIBUTES": {"NUM_CLASSES": -1}}}}, "ATTRIBUTES.NUM_CLASSES is -1"),
        ({"MODEL": {"ANCHOR_GENERATOR": {"SIZES": [[32, 0]]}}}, "MODEL.ANCHOR_GENERATOR.SIZES is"),
        ({"MODEL": {"ANCHOR_GENERATOR": {"ASPECT_RATIOS": [[]]}}}, "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS is"),
        ({"MODEL": {"RESNETS": {"WIDTH_PER_GROUP": 0}}}, "MODEL.RESNETS.WIDTH_PER_GROUP is 0"),
        ({"MODEL": {"PIXEL_STD": [1, 1, 0]}}, "MODEL.PIXEL_STD is"),
        ({"INPUT": {"MIN_SIZE_TRAIN": [600, 0]}}, "INPUT.MIN_SIZE_TRAIN is"),
        ({"INPUT": {"MIN_SIZE_TEST": 0}}, "INPUT.MIN_SIZE_TEST is 0"),
        ({"TEST": {"DETECTIONS_PER_IMAGE": -1}}, "TEST.DETECTIONS_PER_IMAGE is -1"),
        ({"INPUT": {"RANDOM_FLIP": "vertical"}}, "INPUT.RANDOM_FLIP = 'vertical' is not supported.*data.flip"),
        ({"MODEL": {"ROI_HEADS": {"SCORE_THRESH_TEST": float("nan")}}}, "SCORE_THRESH_TEST is nan; it must be finite"),
    ],
)
def test_bad_keys_and_values_are_named(tree: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DetectorConfig.from_yaml(tree)


def test_bad_files(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml: no such config file"):
        DetectorConfig.from_yaml(tmp_path / "none.yaml")
    loop = tmp_path / "loop.yaml"
    loop.write_text("_BASE_: loop.yaml\n")
    with pytest.raises(ValueError, match="leads back"):
        DetectorConfig.from_yaml(loop)
    code = tmp_path / "code.yaml"
    code.write_text("SEED: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match=r"code\.yaml is not valid YAML: .*os\.getcwd"):
        DetectorConfig.from_yaml(code)


def test_keys_of_ours_are_written_only_where_they_are_used():
    assert not set(OUR_KEYS) & set(DetectorConfig().to_flat())
    config = dataclasses.replace(
        DetectorConfig(), resnet=ResNetConfig(stem_pool="none"), attributes=AttributeConfig(num_classes=5)
    )
    written = set(OUR_KEYS) & set(config.to_flat())
    assert written == {"MODEL.RESNETS.STEM_POOL", "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES"}
    assert config.map_shapes == {"res4": (1024, 8)}
