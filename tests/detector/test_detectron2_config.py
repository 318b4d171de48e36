from __future__ import annotations

import copy

import pytest
import yaml

from detector.detector_config import DetectorConfig
from detector.detectron2_config import Detectron2Config

FPN = {
    "MODEL": {
        "BACKBONE": {"NAME": "build_resnet_fpn_backbone"},
        "RESNETS": {"DEPTH": 50, "OUT_FEATURES": ["res2", "res3", "res4", "res5"], "RES2_OUT_CHANNELS": 16},
        "ANCHOR_GENERATOR": {"SIZES": [[32], [64], [128], [256], [512]]},
        "ROI_HEADS": {"NAME": "StandardROIHeads", "NUM_CLASSES": 7},
        "ROI_BOX_HEAD": {"NAME": "FastRCNNConvFCHead", "NUM_FC": 2, "ATTRIBUTES": {"NUM_CLASSES": 3}},
    },
    "INPUT": {"FORMAT": "RGB"},
}


def changed(**keys: object) -> dict:
    tree = copy.deepcopy(FPN)
    for key, value in keys.items():
        node = tree
        *parents, leaf = key.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def test_c4_is_read_as_by_the_builtin_detector(tmp_path):
    path = tmp_path / "c4.yaml"
    path.write_text("MODEL: {RESNETS: {DEPTH: 101, RES5_DILATION: 2}, ROI_HEADS: {NUM_CLASSES: 1600}}")
    config = Detectron2Config.from_yaml(path)
    assert config.is_c4
    builtin = DetectorConfig.from_yaml(path)
    assert vars(config) == {**vars(builtin), "flat": builtin.to_flat()}
    assert config.to_flat() == builtin.to_flat()
    with pytest.raises(ValueError, match=r"RESNETS\.DEPHT is neither .* Did you mean MODEL\.RESNETS\.DEPTH"):
        Detectron2Config.from_yaml({"MODEL": {"RESNETS": {"DEPHT": 50}}})


def test_a_model_with_a_box_head():
    config = Detectron2Config.from_yaml(FPN)
    assert not config.is_c4
    assert config.input.format == "RGB"
    assert (config.resnet.depth, config.roi_heads.num_classes, config.attributes.num_classes) == (50, 7, 3)
    assert config.to_flat()["MODEL.ANCHOR_GENERATOR.SIZES"] == [[32], [64], [128], [256], [512]]
    assert Detectron2Config.from_yaml(yaml.safe_load(config.to_yaml())) == config
    assert DetectorConfig.to_flat(config)["MODEL.PIXEL_STD"] == [1.0, 1.0, 1.0], "with the defaults"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MODEL__ROI_HEADS__NAME": "CascadeROIHeads"}, "MODEL.ROI_HEADS.NAME = 'CascadeROIHeads' is not supported"),
        ({"MODEL__META_ARCHITECTURE": "RetinaNet"}, "MODEL.META_ARCHITECTURE = 'RetinaNet' is not supported"),
        ({"MODEL__MASK_ON": True}, "MODEL.MASK_ON = True is not supported"),
        ({"MODEL__RESNETS__STEM_POOL": "none"}, "MODEL.RESNETS.STEM_POOL = 'none' needs"),
        ({"MODEL__ANCHOR_GENERATOR__CELL_ANCHORS": [[0, 0, 4, 4]]}, "MODEL.ANCHOR_GENERATOR.CELL_ANCHORS needs"),
        ({"MODEL__ANCHOR_GENERATOR__NAME": "RotatedAnchorGenerator"}, "ANCHOR_GENERATOR.NAME = 'Rot.* is not supp"),
        ({"INPUT__CROP": {"ENABLED": True}}, "INPUT.CROP.ENABLED = True is not supported"),
        ({"TEST": {"AUG": {"ENABLED": True}}}, "TEST.AUG.ENABLED = True is not supported"),
        ({"INPUT__FORMAT": "L"}, "INPUT.FORMAT must be one of BGR, RGB, not L"),
    ],
)
def test_what_is_not_built_is_named(keys, message):
    with pytest.raises(ValueError, match=message):
        Detectron2Config.from_yaml(changed(**keys))
