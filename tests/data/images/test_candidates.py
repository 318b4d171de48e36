"""Files of boxes by image id: MAttNet's detections and region features."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detector.config import SelectionRule
from detector.errors import UserError
from e2e_vl.data.features import RegionFeatures, open_features, save_npz
from e2e_vl.data.image_loader import DetectedBoxes, StoredBoxes, open_boxes, read_detections
from tests.data.tiny_refcoco import DETECTIONS_7, detection

RULE = SelectionRule(min_score=0.5, min_regions=1, max_regions=100)
BOXES = np.array([[0, 0, 9, 9], [10, 10, 40, 40], [5, 5, 60, 60]], dtype=np.float32)
SCORES = np.array([0.2, 0.9, 0.6], dtype=np.float32)


@pytest.fixture
def store(tmp_path):
    def write(*ids: str, **columns):
        columns = {"scores": SCORES} | columns
        for image_id in ids:
            path = tmp_path / "features" / f"{image_id}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_npz(path, RegionFeatures(image_id, (60, 100), BOXES, np.eye(3, dtype=np.float32), **columns))
        return tmp_path / "features"

    return write


def test_detections_come_by_falling_score_as_the_rule_keeps_them(tiny):
    found = DetectedBoxes([tiny.detections_file], SelectionRule(min_score=0.0)).read("7")
    np.testing.assert_array_equal(found.boxes, DETECTIONS_7[::-1])
    assert found.origin == f"{tiny.detections_file}: image 7"
    assert found.features is found.class_probs is found.image_size is None
    kept = open_boxes([tiny.detections_file], RULE, with_features=False).read("7")
    np.testing.assert_array_equal(kept.boxes, [DETECTIONS_7[1]])


def test_several_files_of_detections_each_know_other_images(tiny, tmp_path):
    more = tmp_path / "more.json"
    more.write_text(json.dumps([detection(0, 12, [0, 0, 5, 5], 0.9), detection(1, 7, [0, 0, 6, 6], 0.9)]))
    reader = open_boxes([tiny.detections_file, more], RULE, with_features=False)
    np.testing.assert_array_equal(reader.read("12").boxes, [[0, 0, 5, 5]])
    np.testing.assert_array_equal(reader.read("7").boxes, [DETECTIONS_7[1]], "the first file that has it")
    reader.require_images(["3", "7", "9", "12"], "val")
    with pytest.raises(ValueError, match=r"dets\.json, .*more\.json: no detections for image 13 of the split val"):
        reader.require_images(["12", "13"], "val")


def test_images_without_detections_are_named_and_counted(tiny):
    reader = DetectedBoxes([tiny.detections_file], RULE)
    reader.require_images(["3", "7", "9"], "train")
    with pytest.raises(ValueError, match=r"dets\.json: no detections for image 12 \(and 1 more images\) of the split"):
        reader.require_images(["3", "12", "13"], "train")
    with pytest.raises(ValueError, match=r"dets\.json: no detections for image 12 "):
        reader.read("12")


def test_features_that_were_detected_come_by_falling_score(store):
    reader = open_boxes([store("7")], RULE, with_features=False)
    found = reader.read("7")
    np.testing.assert_array_equal(found.boxes, BOXES[[1, 2]])
    assert found.features is None and found.image_size == (60, 100)
    whole = open_boxes([store("7")], RULE, with_features=True).read("7")
    np.testing.assert_array_equal(whole.boxes, BOXES[[1, 2, 0]])
    np.testing.assert_array_equal(whole.features, np.eye(3)[[1, 2, 0]])
    assert whole.image_feature is None


@pytest.mark.parametrize("columns", [{"scores": None}, {"box_ids": np.array([5, 6, 7])}])
def test_features_of_given_boxes_keep_their_order(store, columns):
    path = store("7", image_feature=np.ones(3, dtype=np.float32), **columns)
    np.testing.assert_array_equal(open_boxes([path], RULE, with_features=False).read("7").boxes, BOXES)
    whole = open_boxes([path], RULE, with_features=True).read("7")
    np.testing.assert_array_equal(whole.boxes, BOXES)
    np.testing.assert_array_equal(whole.features, np.eye(3))
    np.testing.assert_array_equal(whole.image_feature, [1, 1, 1])


def test_images_without_features_are_named_and_counted(store):
    reader = StoredBoxes([open_features(store("7", "8"))], RULE, with_features=False)
    reader.require_images(["8", "7"], "train")
    with pytest.raises(ValueError, match="features: has no features of image 9 and 1 more of the split train"):
        reader.require_images(["7", "9", "10"], "train")
    with pytest.raises(ValueError, match="features: has no features of image 9"):
        reader.read("9")


def test_boxes_without_features_cannot_replace_the_detector(tiny):
    with pytest.raises(ValueError, match=r"dets\.json: boxes in MAttNet's format have no features"):
        open_boxes([tiny.detections_file], RULE, with_features=True)


def test_a_file_of_detections_is_grouped_by_image_in_file_order(tiny):
    found = read_detections(tiny.detections_file)
    assert set(found) == {"3", "7", "9"}
    boxes, scores = found["7"]
    np.testing.assert_array_equal(boxes, [[61, 11, 89, 39], [11, 21, 29, 39]])
    np.testing.assert_allclose(scores, [0.4, 0.8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": [1, 1, 0, 5]}, r"detection 1: .*empty or inverted"),
        ({"box": [1, 1, -3, 5]}, r"detection 1: .*empty or inverted"),
        ({"box": {"x": 1, "y": 1, "w": 3, "h": 5}}, r".*\[1\]\.box"),
        ({"score": "x"}, r".*\[1\]\.score"),
        ({"score": 7}, r".*\[1\]\.score"),
    ],
)
def test_a_bad_detection_is_named(tiny, change, message):
    tiny.detections[1].update(change)
    tiny.detections_file.write_text(json.dumps(tiny.detections))
    with pytest.raises(UserError, match=rf"dets\.json: {message}"):
        read_detections(tiny.detections_file)
