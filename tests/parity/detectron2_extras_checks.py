"""Extras of a recorded C4 set: the features and attributes of bottom-up attention."""

from __future__ import annotations

import re
from types import ModuleType

import torch
import yaml
from torch import Tensor

from detector.config import DetectorConfig
from detector.roi_pooler import to_rois
from detector.structures import ImageBatch
from tests.parity import detectron2_common as common
from tests.parity.detectron2_common import GoldenSet, assert_near, with_area

images = common.images
given = common.given


def test_bottom_up_attention_features(golden: GoldenSet, images: ImageBatch, given: list[Tensor], backends: ModuleType):
    stride_in_1x1 = re.search(r"STRIDE_IN_1X1=(\w+)", golden.description("butd.res4"))[1] == "True"
    model = golden.detector(
        MODEL__RESNETS__STEM_POOL="caffe_max",
        MODEL__RESNETS__STRIDE_IN_1X1=stride_in_1x1,
        MODEL__RESNETS__RES5_DILATION=2,
        MODEL__ROI_BOX_HEAD__POOLER_TYPE="ROIPool",
        MODEL__ROI_BOX_HEAD__POOLER_RESOLUTION=golden["butd.roipool.output"].shape[-1],
    )
    with torch.no_grad():
        features = model.features(images)
        pooled, maps = backends.roi_maps(model, features, to_rois(given))
        described = model.describe(features, to_rois(given))
    assert_near(features["res4"], golden["butd.res4"])
    assert_near(pooled[golden["butd.roipool.rows"]], golden["butd.roipool.output"])
    assert list(maps.shape) == golden["butd.res5.output_shape"].tolist()
    assert_near(described.predictor, golden["butd.given_pooled_features"])


def test_bottom_up_attention_attributes(golden: GoldenSet, images: ImageBatch, given: list[Tensor]):
    prefix = "butd.attr.param."
    parameters = {key.removeprefix(prefix): golden[key] for key in golden.tensors if key.startswith(prefix)}
    attributes = {
        "NUM_CLASSES": len(parameters["attr_score.weight"]) - 1,
        "EMBEDDING_DIM": parameters["cls_embedding.weight"].shape[1],
        "HIDDEN_DIM": len(parameters["fc_attr.weight"]),
    }
    tree = yaml.safe_load(yaml.safe_dump(golden.config))
    tree["MODEL"].setdefault("ROI_BOX_HEAD", {})["ATTRIBUTES"] = attributes
    model = golden.detector_class(DetectorConfig.from_yaml(tree)).eval()
    extra = {f"roi_heads.box_predictor.{name}": value for name, value in parameters.items()}
    model.load_state_dict(golden.weights | extra, strict=True)

    boxes, rows = with_area(given)
    features, class_logits = golden["given.pooled_features"], golden["given.class_logits"]
    assert torch.equal(class_logits.argmax(dim=1), golden["butd.attr.class_argmax"])
    with torch.no_grad():
        logits = model.roi_heads.box_predictor.attributes(features, class_logits.argmax(dim=1))
        regions = model(images, boxes)
    assert_near(logits, golden["butd.attr.logits"])
    joined = torch.cat(regions.attribute_logits)  # "no attribute" is dropped before the softmax
    assert_near(joined, golden["butd.attr.logits"][rows, :-1])
    best = joined.softmax(dim=1).max(dim=1)
    assert_near(best.values, golden["butd.attr.prob"][rows])
    assert torch.equal(best.indices, golden["butd.attr.label"][rows])
