"""Both backends against arrays of a C4 detector recorded from stock Detectron2: every stage of the forward pass.

Configs, sizes and options are read from the set, so that another set (`--golden-root`) is tested by the same file.
Floats agree as tests/parity/tolerances.py says, discrete results exactly. Trained batch norms multiply tolerances by
ten: the statistics of the batch pass every rounding error on to all pixels.
The Detectron2 backend is skipped where Detectron2 is not installed.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from detector.boxes import decode_deltas
from detector.faster_rcnn import TwoStageDetector
from detector.roi_pooler import to_rois
from detector.structures import ImageBatch
from tests.parity import detectron2_common as common
from tests.parity.detectron2_common import GoldenSet, assert_near, with_area
from tests.parity.detectron2_extras_checks import *  # noqa: F403
from tests.parity.detectron2_stage_checks import *  # noqa: F403

model = common.model
images = common.images
sizes = common.sizes
features = common.features
rpn_output = common.rpn_output
given = common.given


@pytest.fixture(scope="module", params=["builtin", "detectron2"])
def golden(golden_root: Path, backends: ModuleType, request: pytest.FixtureRequest) -> GoldenSet:
    return common.read_set(golden_root / "detectron2", backends.detector_class(request.param))


def test_backbone(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch, backends: ModuleType):
    with torch.no_grad():
        stages = backends.stages(model, images.pixels)
    for name in ("stem", "res2", "res3", "res4"):
        assert_near(stages[name], golden[f"backbone.{name}"])


def test_rpn_head(golden: GoldenSet, model: TwoStageDetector, features: Any, rpn_output: Any, backends: ModuleType):
    rpn_output = backends.rpn_arrays(rpn_output)
    with torch.no_grad():
        objectness, deltas = backends.head_maps(model, features)["res4"]
    assert_near(objectness, golden["rpn.head.objectness_map"])
    assert_near(deltas, golden["rpn.head.delta_map"])
    assert_near(rpn_output.objectness, golden["rpn.objectness_logits"])
    assert_near(rpn_output.deltas, golden["rpn.anchor_deltas"])
    decoded = decode_deltas(rpn_output.deltas, rpn_output.anchors, model.config.rpn.box_weights)
    assert_near(decoded, golden["rpn.decoded_boxes"])


def test_given_boxes(
    golden: GoldenSet,
    model: TwoStageDetector,
    images: ImageBatch,
    features: Any,
    given: list[Tensor],
    backends: ModuleType,
):
    boxes, usable = with_area(given)
    rows = golden["given.roi_align.rows"]
    with torch.no_grad():
        pooled, maps = backends.roi_maps(model, features, to_rois(given))
        described = model.describe(features, to_rois(given)).predictor
        logits, deltas = model.roi_heads.box_predictor(described)
        regions = model(images, boxes)
    assert_near(pooled[rows], golden["given.roi_align.output"])
    assert_near(maps[rows], golden["given.res5.output"])
    assert_near(described, golden["given.pooled_features"])
    assert_near(logits, golden["given.class_logits"])
    assert_near(deltas, golden["given.box_deltas"])
    assert_near(torch.cat(regions.features), golden["given.pooled_features"][usable])
    assert_near(torch.cat(regions.class_logits), golden["given.class_logits"][usable])
    assert regions.scores is None
    assert regions.losses == {}
