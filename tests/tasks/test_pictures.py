"""Pictures and captions of predictions, for reports."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from e2e_vl.drawing import BLUE, GREEN, RED
from e2e_vl.tasks.detection import DetectionConfig, DetectionTask
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask


@pytest.fixture
def grey(tmp_path: Path) -> str:
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    return str(tmp_path / "grey.png")


def record(grey: str, **changes) -> dict:
    base = {"file_name": grey, "sent": "x", "score": 0.5, "correct": 1.0}
    return {**base, "gt_box": [10, 10, 40, 40], "box": [50, 10, 80, 50], **changes}


def coloured(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return np.abs(picture.astype(int) - colour).max(axis=2) < 12


@pytest.mark.parametrize(
    ("changes", "seen", "unseen"),
    [
        ({}, (GREEN, BLUE), (RED,)),
        ({"correct": 0.0}, (GREEN, RED), (BLUE,)),
        ({"box": None}, (GREEN,), (BLUE, RED)),
    ],
)
def test_truth_is_green_right_is_blue_and_wrong_is_red(grey, changes, seen, unseen):
    picture = ReferringTask(8).draw(record(grey, **changes))
    assert all(coloured(picture, colour).sum() > 100 for colour in seen)
    assert not any(coloured(picture, colour).any() for colour in unseen)


def test_the_truth_is_drawn_where_it_is(grey):
    picture = ReferringTask(8).draw(record(grey, box=None))
    rows, columns = np.nonzero(coloured(picture, GREEN))
    scale = picture.shape[1] / 90
    assert columns.max() == pytest.approx(40 * scale, abs=4)
    assert rows.max() == pytest.approx(40 * scale, abs=4)


def test_a_caption_is_the_expression_with_its_score(grey):
    assert ReferringTask(8).caption(record(grey, sent="a <b>", score=0.256)) == "a <b> (0.26)"


def test_pictures_of_detections_show_truth_and_sure_detections_only(tmp_path):
    path = tmp_path / "grey.png"
    cv2.imwrite(str(path), np.full((480, 480, 3), 128, dtype=np.uint8))
    task = DetectionTask(8, DetectionConfig())
    record = {"file_name": str(path), "objects": [], "boxes": [[9, 9, 99, 99]], "category_ids": [1], "correct": 0.0}
    assert (task.draw(record | {"scores": [0.4]}) == 128).all()
    assert (task.draw(record | {"scores": [0.6]}) != 128).any()
    truth = {"box": [200, 200, 300, 300], "category": "cat", "category_id": 1, "is_crowd": False}
    assert (task.draw(record | {"scores": [0.4], "objects": [truth]})[195:305, 195:305] != 128).any()


def test_a_task_without_boxes_in_its_answers_has_no_picture():
    assert VCRTask(8).draw({}) is None and VCRTask(8).caption({}) == ""
