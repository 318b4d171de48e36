from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from detector.boxes import pairwise_iou
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule, load_image, make_image_batch, resize_boxes, resize_image
from detector.selection import SelectionRule
from e2e_vl.config import DataSettings, ResizeSettings, RunConfig, save_config
from e2e_vl.engine.extract import SAME_PLACE, build_extractor, extractor_of_run

RULE = SelectionRule(0.9, 12, 20)
YAML = """
MODEL:
  RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8}
  ANCHOR_GENERATOR: {SIZES: [[16, 32, 64]]}
  RPN: {PRE_NMS_TOPK_TEST: 200, POST_NMS_TOPK_TEST: 50}
  ROI_HEADS: {NUM_CLASSES: 5}
  ROI_BOX_HEAD: {POOLER_RESOLUTION: 4}
INPUT: {FORMAT: RGB, MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 160}
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (75, 110, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(YAML)
    return tmp_path / "tiny.yaml"


def test_features_are_those_of_the_boxes(config: Path, image: Path):
    """Putting the boxes back on the image gives the features again, so scale and order are right."""
    extractor = build_extractor(config, None, RULE)
    found = extractor(image)
    assert 12 <= len(found) <= 20
    pixels = resize_image(load_image(image, "RGB"), ResizeRule(96, 160).target_size(75, 110))
    assert np.array_equal(found.image, pixels) and found.original_size == (75, 110)
    settings = extractor.detector.config.input
    batch = make_image_batch([pixels], [(75, 110)], ["image"], settings.pixel_mean, settings.pixel_std)
    boxes = torch.from_numpy(resize_boxes(found.boxes, (75, 110), pixels.shape[:2]))
    with torch.inference_mode():
        again = extractor.detector(batch, [boxes])
    assert np.allclose(again.features[0].numpy(), found.features, atol=1e-3)


def test_regions_are_in_different_places(config: Path, image: Path):
    found = build_extractor(config, None, RULE)(image)
    overlap = pairwise_iou(found.boxes, found.boxes) - np.eye(len(found))
    assert overlap.max() < SAME_PLACE + 1e-3


def test_random_values_leave_the_global_generator_alone(config: Path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = build_extractor(config, None, RULE, seed=1)
    assert torch.equal(torch.rand(2), expected)
    second = build_extractor(config, None, RULE, seed=2)
    assert not torch.equal(*(one.detector.backbone.stem.conv1.weight for one in (first, second)))


def test_limit_of_proposals(config: Path, image: Path):
    assert len(build_extractor(config, None, SelectionRule(0.0, 0, 36), max_proposals=4)(image)) > 0
    extractor = build_extractor(config, None, RULE, max_proposals=4)
    assert extractor.detector.config.rpn.post_nms_topk_test == 4
    with pytest.raises(ValueError, match="not 0 proposals"):
        build_extractor(config, None, RULE, max_proposals=0)


def test_weights_of_another_architecture(config: Path, tmp_path: Path):
    other = FasterRCNN(DetectorConfig.from_yaml({"_BASE_": str(config), "MODEL": {"ROI_HEADS": {"NUM_CLASSES": 7}}}))
    save_file({key: value.contiguous() for key, value in other.state_dict().items()}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors does not fit"):
        build_extractor(config, tmp_path / "other.safetensors", RULE)


def test_detector_of_a_run(config: Path, image: Path, tmp_path: Path):
    detector = FasterRCNN(DetectorConfig.from_yaml(config))
    folder = tmp_path / "run" / "model"
    (folder / "detector").mkdir(parents=True)
    (folder / "detector" / "config.yaml").write_text(detector.config.to_yaml())
    save_file(
        {key: value.contiguous() for key, value in detector.state_dict().items()},
        folder / "detector" / "model.safetensors",
    )
    data = DataSettings(root="data", resize=ResizeSettings(short_edge=[48, 64], long_edge=80, rounding="vl_bert"))
    save_config(RunConfig(output="run", data=data), folder / "config.yaml")
    for path in (tmp_path / "run", folder):
        extractor = extractor_of_run(path, RULE)
        assert extractor.resize == ResizeRule(64, 80, "vl_bert")
        assert torch.equal(extractor.detector.backbone.stem.conv1.weight, detector.backbone.stem.conv1.weight)
    assert extractor(image).image.shape == (54, 79, 3)
    with pytest.raises(FileNotFoundError, match="holds no trained model"):
        extractor_of_run(tmp_path, RULE)
