"""Both backends against arrays of an FPN detector recorded from stock Detectron2: every stage of the forward pass.

Config, sizes and names of levels are read from the set, so that another set (`--golden-root`) is tested by the same
file. Tolerances: tests/parity/tolerances.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from detector.faster_rcnn import TwoStageDetector, pad_to_multiple
from detector.images import make_image_batch, normalise_images
from detector.roi_pooler import assign_levels, to_rois
from detector.structures import ImageBatch
from tests.parity import detectron2_common as common
from tests.parity.detectron2_common import GoldenSet, assert_near, assert_same_rows, detections_of, with_area
from tests.parity.detectron2_stage_checks import *  # noqa: F403
from tests.parity.detectron2_stage_checks import targets_of
from tests.parity.tolerances import GRADIENT_FLOAT64, LOSS_FLOAT64

model = common.model
images = common.images
sizes = common.sizes
features = common.features
rpn_output = common.rpn_output
given = common.given

FEATURES = ("fc6", "fc7")  # features of every given box; a set whose box head has one layer lacks fc7


@pytest.fixture(scope="module", params=["builtin", "detectron2"])
def golden(golden_root: Path, backends: ModuleType, request: pytest.FixtureRequest) -> GoldenSet:
    return common.read_set(golden_root / "detectron2_fpn", backends.detector_class(request.param))


def test_backbone(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch, features: Any, backends: ModuleType):
    pixels = pad_to_multiple(images.pixels, model.config.size_divisibility)
    with torch.no_grad():
        maps = backends.stages(model, pixels) | features
    recorded = [key.removeprefix("backbone.") for key in golden.tensors if key.startswith("backbone.")]
    assert set(features) == set(golden.meta["level_hw"]) <= set(recorded)
    for name in recorded:
        assert_near(maps[name], golden[f"backbone.{name}"])
    for name, size in golden.meta["level_hw"].items():
        assert list(features[name].shape[2:]) == size


def test_rpn_head(golden: GoldenSet, model: TwoStageDetector, features: Any, rpn_output: Any, backends: ModuleType):
    if backends.is_builtin(model):
        assert list(rpn_output.counts) == golden["rpn.anchors_per_level"].tolist()
    with torch.no_grad():
        maps = backends.head_maps(model, features)
    recorded = [key.split(".")[2] for key in golden.tensors if re.fullmatch(r"rpn\.head\.\w+\.objectness_map", key)]
    assert recorded
    for name in recorded:
        assert_near(maps[name][0], golden[f"rpn.head.{name}.objectness_map"])
        assert_near(maps[name][1], golden[f"rpn.head.{name}.delta_map"])
    joined = backends.rpn_arrays(rpn_output)
    assert_near(joined.objectness, golden["rpn.objectness_logits"])
    assert_near(joined.deltas, golden["rpn.anchor_deltas"])


def test_levels(golden: GoldenSet, model: TwoStageDetector, given: list[Tensor]):
    levels = [int(name[1:]) for name in model.config.roi_heads.in_features]
    cases = [(golden["levels.boxes"], "levels.level"), (torch.cat(given), "given.levels")]
    cases += [(golden["large.boxes"], "large.levels"), (golden["large.proposal_boxes"], "large.proposal_levels")]
    for number in range(golden.num_images):
        cases.append((golden[f"rpn.image{number}.proposal_boxes"], f"roi.image{number}.levels"))
        cases.append((golden[f"train.image{number}.roi_boxes"], f"train.image{number}.roi_levels"))
    for boxes, name in cases:
        assert torch.equal(assign_levels(boxes, levels[0], levels[-1]), golden[name]), name


def test_given_boxes(
    golden: GoldenSet,
    model: TwoStageDetector,
    images: ImageBatch,
    features: Any,
    given: list[Tensor],
    backends: ModuleType,
):
    boxes, usable = with_area(given)
    with torch.no_grad():
        pooled = backends.pooled_maps(model, features, to_rois(given))
        described = model.describe(features, to_rois(given))
        logits, deltas = model.roi_heads.box_predictor(described.predictor)
        regions = model(images, boxes)
    assert_near(pooled[golden["given.roi_align.rows"]], golden["given.roi_align.output"])
    assert_near(described.predictor, golden["given.pooled_features"])
    assert_near(logits, golden["given.class_logits"])
    assert_near(deltas, golden["given.box_deltas"])
    assert_near(torch.cat(regions.features), golden["given.pooled_features"][usable])
    assert_near(torch.cat(regions.class_logits), golden["given.class_logits"][usable])
    assert regions.scores is None
    assert regions.losses == {}


@pytest.mark.parametrize("name", [*FEATURES, "mean"])
def test_region_features(golden: GoldenSet, features: Any, given: list[Tensor], name: str):
    """The region feature is a choice; the predictor's input and the logits do not change."""
    if name in FEATURES and f"given.{name}" not in golden.tensors:
        pytest.skip(f"the box head of this set has no {name}")
    model = golden.detector(MODEL__ROI_BOX_HEAD__REGION_FEATURE=name)
    with torch.no_grad():
        described = model.describe(features, to_rois(given))
    assert described.region.shape[1] == model.feature_dim
    assert_near(described.predictor, golden["given.pooled_features"])
    if name == "mean":
        rows = golden["given.roi_align.rows"]
        assert_near(described.region[rows], golden["given.roi_align.output"].mean(dim=(2, 3)))
    else:
        assert_near(described.region, golden[f"given.{name}"])


def test_large_image(golden: GoldenSet, backends: ModuleType):
    """Boxes on all levels, on an image that is larger than the others."""
    pixels = golden["resize.case0.output_bgr_u8"].numpy()
    height, width = pixels.shape[:2]
    given, rows = with_area([golden["large.boxes"]])
    features = {name: f"large.{name}" for name in FEATURES if f"large.{name}" in golden.tensors}
    for feature, key in (features | {"head": "large.pooled_features"}).items():
        model = golden.detector(MODEL__ROI_BOX_HEAD__REGION_FEATURE=feature)
        batch = normalise_images(make_image_batch([pixels], [(height, width)], ["large"]), model.config.input)
        with torch.no_grad():
            regions, found = model(batch, given), model(batch)
            maps = model.features(batch)
            boxes, objectness = backends.proposals(model, model.run_rpn(maps), [(height, width)])
            _, deltas = model.roi_heads.box_predictor(model.describe(maps, to_rois([golden["large.boxes"]])).predictor)
        assert_near(regions.features[0], golden[key][rows])
        assert_near(regions.class_logits[0], golden["large.class_logits"][rows])
        assert_near(deltas, golden["large.box_deltas"])
        assert_same_rows((boxes[0], objectness[0]), golden.rows("large.", "proposal_boxes", "proposal_logits"))
        assert_same_rows(detections_of(found, 0), golden.rows("large.det.", "boxes", "scores", "classes"))


def test_gradients_in_float64(golden: GoldenSet, images: ImageBatch, backends: ModuleType):
    """Without the rounding errors that flip ReLUs, gradients agree as closely as features do."""
    model = golden.detector().double().train()
    backends.round_anchors(model)
    batch = ImageBatch(images.pixels.double(), images.sizes, images.original_sizes, images.names)
    losses = {name: loss.mean for name, loss in model(batch, None, targets_of(golden)).losses.items()}
    for name, value in losses.items():
        assert value.item() == pytest.approx(golden[f"train.loss64.{name}"].item(), rel=LOSS_FLOAT64), name
    sum(losses.values()).backward()
    names = [key.removeprefix("grad64.") for key in golden.tensors if key.startswith("grad64.")]
    assert names
    for name in names:
        expected = golden[f"grad64.{name}"].double()
        distance = (model.get_parameter(name).grad - expected).norm()
        assert distance <= GRADIENT_FLOAT64 * expected.norm(), name
    for name, norm in golden.meta["train_mode"]["grad64_norms_of_all_parameters"].items():
        assert model.get_parameter(name).grad.norm().item() == pytest.approx(norm, rel=GRADIENT_FLOAT64), name
