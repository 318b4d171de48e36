"""Names of the network of R2C in official VisualBERT files, there and back."""

from __future__ import annotations

import pytest
import torch

from detector.config import DetectorConfig
from detector.r2c import R2CNetwork
from detector.weight_names import PREFIX, from_visual_bert, is_visual_bert, own_name, visual_bert_name


def test_every_parameter_has_an_official_name_and_back():
    with torch.device("meta"):
        names = list(R2CNetwork(DetectorConfig.from_flat({"MODEL.R2C.FEATURE_DIM": 8})).state_dict())
    official = {name: visual_bert_name(name) for name in names}
    assert None not in official.values() and len(set(official.values())) == len(names)
    assert all(own_name(theirs.removeprefix(PREFIX)) == ours for ours, theirs in official.items())
    assert official["backbone.res3.0.shortcut.norm.weight"] == "detector.backbone.5.0.downsample.1.weight"
    assert official["roi_heads.res5.2.conv3.weight"] == "detector.after_roi_align.0.2.conv3.weight"
    assert official["backbone.stem.conv1.norm.running_var"] == "detector.backbone.1.running_var"


def test_names_of_other_networks():
    assert visual_bert_name("proposal_generator.rpn_head.conv.weight") is None
    assert visual_bert_name("roi_heads.box_predictor.cls_score.weight") is None


def test_files_are_recognised():
    assert is_visual_bert(["bert.bert.pooler.dense.weight"])
    assert is_visual_bert(["detector.after_roi_align.0.0.conv1.weight"])
    assert not is_visual_bert(["backbone.res2.0.conv1.weight", "model.detector.x"])


def test_other_files_are_refused():
    with pytest.raises(ValueError, match=r"x.th: this VisualBERT model was made for given features"):
        from_visual_bert({"bert.bert.pooler.dense.weight": torch.zeros(1)}, "x.th")
    with pytest.raises(ValueError, match=r"x.th: detector.layer9.weight is not a name"):
        from_visual_bert({"detector.layer9.weight": torch.zeros(1)}, "x.th")
