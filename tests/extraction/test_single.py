"""One image is bulk extraction with a batch of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from detector.boxes import pairwise_iou
from detector.config import DetectorConfig, SelectionRule
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule, load_resized, make_image_batch, resize_boxes
from e2e_vl.data.features import open_features
from e2e_vl.data.user_inputs import list_images
from e2e_vl.extraction.bulk import ExtractionJob, extract_images
from e2e_vl.extraction.regions import SAME_PLACE, extract_image
from e2e_vl.extraction.settings import ExtractionSettings
from e2e_vl.run.launch import make_accelerator

RULE = SelectionRule(0.9, 12, 20)


def test_features_are_those_of_the_boxes(source, folder: Path):
    """Putting the boxes back on the image gives the features again, so scale and order are right."""
    found = extract_image(folder / "0.png", source, RULE)
    regions = found.regions
    assert 12 <= len(regions) <= 20 and regions.image_size == (70, 90)
    pixels, _ = load_resized(folder / "0.png", ResizeRule(64, 128), "RGB")
    assert np.array_equal(found.pixels, pixels)
    settings = source.detector.config.input
    batch = make_image_batch([pixels], [(70, 90)], ["image"], settings.pixel_mean, settings.pixel_std)
    boxes = torch.from_numpy(resize_boxes(regions.boxes, (70, 90), pixels.shape[:2]))
    with torch.inference_mode():
        again = source.detector(batch, [boxes])
    assert np.allclose(again.features[0].numpy(), regions.features, atol=1e-3)


def test_regions_are_in_different_places(source, folder: Path):
    regions = extract_image(folder / "0.png", source, RULE).regions
    overlap = pairwise_iou(regions.boxes, regions.boxes) - np.eye(len(regions))
    assert overlap.max() < SAME_PLACE + 1e-3


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("features_of", ["final", "proposal"])
def test_one_image_has_the_regions_of_bulk_extraction(source, folder: Path, tmp_path: Path, features_of):
    config = DetectorConfig.from_flat(source.detector.config.to_flat() | {"MODEL.ROI_HEADS.FEATURES_OF": features_of})
    detector = FasterRCNN(config).eval()
    detector.load_state_dict(source.detector.state_dict())
    source = dataclasses.replace(source, detector=detector)
    settings = ExtractionSettings("score", RULE, features_of)
    job = ExtractionJob(list_images(folder), tmp_path / "out", "npz", source, settings, batch_size=1, workers=0)
    extract_images(job, make_accelerator("no"))
    store = open_features(job.output)
    for record in map(store.read, store.ids):
        single = extract_image(folder / f"{record.image_id}.png", source, RULE).regions
        assert single.image_id == record.image_id
        for name, column in record.columns().items():
            assert np.array_equal(getattr(single, name), column), name


def test_the_picture_is_rgb_whatever_the_detector_reads(source, folder: Path):
    config = DetectorConfig.from_flat(source.detector.config.to_flat() | {"INPUT.FORMAT": "BGR"})
    bgr = dataclasses.replace(source, detector=FasterRCNN(config).eval())
    pictures = [extract_image(folder / "3.png", one, RULE).pixels for one in (source, bgr)]
    assert np.array_equal(*pictures)
