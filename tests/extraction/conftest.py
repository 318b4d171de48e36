"""A few images and a small detector at random, for all tests of extraction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detector.images import load_resized, make_image_batch
from detector.structures import ImageBatch
from e2e_vl.extraction.regions import InputImage, LoadedDetector, open_detector

SIZES = [(70, 90), (70, 90), (90, 70), (40, 120), (70, 90)]
YAML = """
MODEL:
  RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8}
  ANCHOR_GENERATOR: {SIZES: [[16, 32, 64]]}
  RPN: {PRE_NMS_TOPK_TEST: 200, POST_NMS_TOPK_TEST: 50}
  ROI_HEADS: {NUM_CLASSES: 5}
  ROI_BOX_HEAD: {POOLER_RESOLUTION: 4, ATTRIBUTES: {NUM_CLASSES: 3, EMBEDDING_DIM: 4, HIDDEN_DIM: 8}}
INPUT: {FORMAT: RGB, MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 128}
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.png .. 4.png with the sizes `SIZES`."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture(scope="session")
def source(config_file: Path) -> LoadedDetector:
    """A random detector whose class scores differ enough to choose by."""
    made = open_detector(config_file, None)
    torch.manual_seed(0)
    for layer in (made.detector.roi_heads.box_predictor.cls_score, made.detector.roi_heads.box_predictor.bbox_pred):
        torch.nn.init.normal_(layer.weight, std=1.0)
    return made


@pytest.fixture(scope="session")
def input_of(folder: Path, source: LoadedDetector):
    """`input_of("0")`: the image 0.png as the chain takes it."""

    def load(image_id: str) -> InputImage:
        path, channel_order = folder / f"{image_id}.png", source.detector.config.input.format
        return InputImage(image_id, str(path), *load_resized(path, source.resize, channel_order))

    return load


def network_input(source: LoadedDetector, image: InputImage) -> ImageBatch:
    settings = source.detector.config.input
    return make_image_batch([image.pixels], [image.original_size], ["x"], settings.pixel_mean, settings.pixel_std)
