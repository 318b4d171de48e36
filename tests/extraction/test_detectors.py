from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from detector.config import DetectorConfig, SelectionRule
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from e2e_vl.config import DataSettings, EncoderSettings, ResizeSettings, RunConfig, TaskSettings, save_config
from e2e_vl.extraction.regions import detector_of_run, extract_image, open_detector

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


def test_random_values_leave_the_global_generator_alone(config: Path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = open_detector(config, None, seed=1)
    assert torch.equal(torch.rand(2), expected)
    second = open_detector(config, None, seed=2)
    assert not torch.equal(*(one.detector.backbone.stem.conv1.weight for one in (first, second)))


def test_limit_of_proposals(config: Path, image: Path):
    source = open_detector(config, None, max_proposals=4)
    assert 0 < len(extract_image(image, source, SelectionRule(0.0, 0, 36)).regions) <= 4
    assert source.detector.config.rpn.post_nms_topk_test == 4
    with pytest.raises(ValueError, match="not 0 proposals"):
        open_detector(config, None, max_proposals=0)


def test_weights_of_another_architecture(config: Path, tmp_path: Path):
    other = FasterRCNN(DetectorConfig.from_yaml({"_BASE_": str(config), "MODEL": {"ROI_HEADS": {"NUM_CLASSES": 7}}}))
    save_file({key: value.contiguous() for key, value in other.state_dict().items()}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors does not fit"):
        open_detector(config, tmp_path / "other.safetensors")


def test_detector_of_a_run(config: Path, image: Path, tmp_path: Path):
    detector = FasterRCNN(DetectorConfig.from_yaml(config))
    folder = tmp_path / "run" / "model"
    (folder / "detector").mkdir(parents=True)
    (folder / "detector" / "config.yaml").write_text(detector.config.to_yaml())
    save_file(
        {key: value.contiguous() for key, value in detector.state_dict().items()},
        folder / "detector" / "model.safetensors",
    )
    resize = ResizeSettings(short_edge=[48, 64], long_edge=80, rounding="truncate")
    named = {"encoder": EncoderSettings(name="vl_bert"), "task": TaskSettings(name="refcoco")}
    config = RunConfig(output="run", data=DataSettings(name="refcoco", root="data", resize=resize), **named)
    save_config(config, folder / "config.yaml")
    for path in (tmp_path / "run", folder):
        source = detector_of_run(path)
        assert source.resize == ResizeRule(64, 80, "truncate")
        assert torch.equal(source.detector.backbone.stem.conv1.weight, detector.backbone.stem.conv1.weight)
    assert source.weights == folder / "detector" / "model.safetensors"
    assert extract_image(image, source, SelectionRule()).pixels.shape == (54, 79, 3)
    with pytest.raises(FileNotFoundError, match="holds no trained model"):
        detector_of_run(tmp_path)
