"""`e2e_vl.load_detector`: the regions of any image, and the features of given boxes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import e2e_vl
from detector.checkpoint import load_pretrained, save_pretrained
from e2e_vl.api.trained_detector import TrainedDetector

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def detector(trained_run) -> TrainedDetector:
    return e2e_vl.load_detector(trained_run.path, device="cpu")


@pytest.fixture(scope="module")
def photo(trained_run) -> Path:
    return Path(json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))[0]["file_name"])


def test_regions_are_the_regions_of_the_model(detector, trained_run, photo):
    found = detector.regions(photo, min_score=0.0, min_regions=3, max_regions=5)
    same = e2e_vl.load(trained_run.path, device="cpu").regions(photo, min_score=0.0, min_regions=3, max_regions=5)
    assert 3 <= len(found) <= 5 and found.names == same.names
    np.testing.assert_array_equal(found.boxes, same.boxes)
    np.testing.assert_array_equal(found.features, same.features)


def test_given_boxes_keep_their_order_and_get_features(detector, photo):
    boxes = [[30.0, 20.0, 70.0, 61.0], [2.0, 3.0, 40.0, 50.0]]
    found = detector.regions(photo, boxes=boxes)
    np.testing.assert_allclose(found.boxes, boxes)
    assert found.features.shape == (2, detector.network.feature_dim) and len(found.names) == 2
    swapped = detector.regions(Image.open(photo), boxes=boxes[::-1])
    np.testing.assert_allclose(swapped.features[::-1], found.features, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="lies outside the"):
        detector.regions(photo, boxes=[[5000, 5000, 5010, 5010]])
    with pytest.raises(ValueError, match=r"boxes: box 0 \[-9, 2, 20, 30\] lies outside the image"):
        detector.regions(photo, boxes=[-9, 2, 20, 30])


def test_a_saved_detector_and_a_file_with_its_config(detector, photo, tmp_path, trained_run):
    save_pretrained(load_pretrained(trained_run.path / "model" / "detector"), tmp_path / "saved")
    config = tmp_path / "saved" / "config.yaml"
    expected = detector.regions(photo, boxes=[[2, 3, 40, 50]]).features
    for again in (
        e2e_vl.load_detector(tmp_path / "saved"),
        e2e_vl.load_detector(tmp_path / "saved" / "model.safetensors", config),
    ):
        assert again.class_names == detector.class_names
        assert again.regions(photo, boxes=[[2, 3, 40, 50]]).features.shape == expected.shape
    with pytest.raises(ValueError, match="give its Detectron2 YAML as config"):
        e2e_vl.load_detector(tmp_path / "saved" / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="no such weights file"):
        e2e_vl.load_detector(tmp_path / "nothing.pth")


def test_a_detector_that_learned_no_boxes_says_so(pretraining_run, photo):
    with pytest.warns(UserWarning, match="the boxes that it finds itself are random"):
        e2e_vl.load_detector(pretraining_run).regions(photo)
    with pytest.warns(UserWarning, match="the boxes that it finds itself are random") as said:
        e2e_vl.load(pretraining_run).regions(photo)
    assert said[0].filename == __file__
