"""Pictures and descriptions of predictions, for reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from e2e_vl.drawing import BLUE, GREEN, RED
from e2e_vl.metrics.refcoco import CONVENTIONS
from e2e_vl.samples import Categories
from e2e_vl.tasks.base import PredictionWords, Task, phrase_marks
from e2e_vl.tasks.config import DetectionConfig, ReferringConfig, VQAConfig
from e2e_vl.tasks.detection import DetectionTask
from e2e_vl.tasks.refcoco import OTHER_COLOURS, ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask


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


def test_phrases_have_other_colours_and_the_first_is_left_out_where_it_names_the_answer(grey):
    own = {"text": "a cat", "box": [50.004, 10, 80, 50], "score": 0.9, "correct": True}
    other = {"text": "a dog", "box": [5, 60, 30, 90], "score": 0.9, "correct": False}
    picture = ReferringTask(8).draw(record(grey, grounded=[own, other]))
    assert coloured(picture, OTHER_COLOURS[0]).sum() > 100 and not coloured(picture, OTHER_COLOURS[1]).any()
    picture = ReferringTask(8).draw(record(grey, grounded=[other, own | {"score": 0.1}]))
    assert coloured(picture, OTHER_COLOURS[0]).any() and not coloured(picture, OTHER_COLOURS[1]).any()


def test_an_unsure_landmark_of_a_wrong_answer_is_dashed(grey):
    own = {"text": "a cat", "box": [50, 10, 80, 50], "score": 0.9, "correct": False}
    landmark = {"text": "a dog", "box": [5, 5, 30, 30], "score": 0.3, "correct": False}
    shown = {}
    for name, score, correct in (
        ("clear", 0.9, 0.0),
        ("unsure", 0.3, 0.0),
        ("right", 0.3, 1.0),
        ("unknown", 0.3, None),
    ):
        marks = [own, landmark | {"score": score}]
        assert len(phrase_marks({"grounded": marks, "correct": correct})[0]) == (
            2 if name in ("clear", "unsure") else 1
        )
        if correct is not None:
            drawn = ReferringTask(8).draw(record(grey, grounded=marks, correct=correct, gt_box=[82, 52, 88, 58]))
            shown[name] = coloured(drawn, OTHER_COLOURS[0])
    scale = 480 / 90
    edge = {name: one[round(5 * scale) : round(30 * scale), round(5 * scale) + 1].mean() for name, one in shown.items()}
    assert edge["clear"] > 0.9 and 0.3 < edge["unsure"] < 0.7, "the left side of the box"
    assert not shown["right"].any()
    _, labels, unsure = phrase_marks({"grounded": [own, landmark], "correct": 0.0}, 1)
    assert (labels, unsure) == (["a dog? 0.30, unsure"], [True])
    nowhere = {"text": "a star", "box": None, "score": 0.0}
    assert phrase_marks({"grounded": [own, nowhere], "correct": 0.0}) == ([own["box"]], ["a cat?"], [False])


def test_phrases_of_an_answer_in_words_are_drawn(grey):
    clear, unsure = ({"text": "a cat", "box": [5, 5, 40, 40], "score": score} for score in (0.9, 0.2))
    blank = Task.draw(None, {"file_name": grey})
    assert (Task.draw(None, {"file_name": grey, "grounded": [clear]}) != blank).any()
    for correct, is_drawn in ((0.0, True), (0.3, False), (1.0, False), (None, False)):
        own = {"file_name": grey, "grounded": [unsure | {"box": None}, unsure], "correct": correct}
        assert (Task.draw(None, own) != blank).any() == is_drawn


def test_the_truth_is_drawn_where_it_is(grey):
    picture = ReferringTask(8).draw(record(grey, box=None))
    rows, columns = np.nonzero(coloured(picture, GREEN))
    scale = picture.shape[1] / 90
    assert columns.max() == pytest.approx(40 * scale, abs=4)
    assert rows.max() == pytest.approx(40 * scale, abs=4)


def test_an_expression_is_described_with_both_boxes_and_whether_there_was_a_right_one():
    task = ReferringTask(8)
    base = {"sent": "a <b>", "score": 0.256, "gt_box": [10, 10, 40, 40.2], "box": [50, 10, 80, 50], "family": "f"}
    wrong = base | {"candidate_boxes": [base["box"], base["gt_box"]]}
    boxes = "x 50 to 80, y 10 to 50", 0.256, "x 10 to 40, y 10 to 40"
    assert task.describe(wrong) == PredictionWords("a <b>", *boxes, "a right box was among 2 candidates", "f")
    unreachable = base | {"candidate_boxes": [base["box"]]}
    assert task.describe(unreachable).note == "no right box was among 1 candidates"
    nothing = {**unreachable, "box": None, "score": 0.0, "candidate_boxes": []}
    assert (task.describe(nothing).answer, task.describe(nothing).score) == ("no box", None)


def test_mistakes_are_compared_by_class_where_both_are_known():
    task = ReferringTask(8)
    base = {"sent": "", "score": 0.2, "gt_box": [10, 10, 40, 40], "box": [50, 10, 80, 50], "candidate_boxes": []}
    for known, mistakes in (
        ({"category": "cat", "class": "dog"}, (("cat", "dog"),)),
        ({"category": "cat", "class": "cat"}, (("cat", "another cat"),)),
        ({"category": "cat", "class": None}, None),  # then by coordinates
        ({}, None),
    ):
        assert task.describe(base | known).mistakes == mistakes


def test_every_iou_convention_judges_single_predictions():
    near = [0, 0, 10, 9]
    record = {"box": near, "gt_box": [0, 0, 10, 10], "candidate_boxes": [near, [0, 0, 10, 10]], "image_size": [20, 20]}
    record |= {"ann_id": 7, "candidate_ann_ids": [6, 7]}
    right = {name: ReferringTask(8, ReferringConfig(iou_convention=name)).correct(record) for name in CONVENTIONS}
    assert right == {"mattnet": 1.0, "vlbert": 1.0, "strict": 1.0, "same_annotation": 0.0}


DETECTED = {"image_id": 3, "boxes": [[9, 9, 99, 99]], "category_ids": [1]}


def detection(tmp_path: Path, scores: list[float], *objects: dict) -> dict:
    path = tmp_path / "grey.png"
    cv2.imwrite(str(path), np.full((480, 480, 3), 128, dtype=np.uint8))
    return DETECTED | {"file_name": str(path), "scores": scores, "objects": list(objects)}


def cat(box: list[int], **changes) -> dict:
    return {"box": box, "category": "cat", "category_id": 1, "is_crowd": False, **changes}


def test_pictures_of_detections_show_sure_detections_and_missed_objects_only(tmp_path):
    task = DetectionTask(8, DetectionConfig())
    picture = task.draw(detection(tmp_path, [0.4]))
    assert (picture == 128).all()
    found = task.draw(detection(tmp_path, [0.6], cat([9, 9, 99, 99])))
    assert [coloured(found, colour).sum() > 100 for colour in (BLUE, RED, GREEN)] == [True, False, False]
    other = task.draw(detection(tmp_path, [0.6], cat([200, 200, 300, 300])))
    assert [coloured(other, colour).sum() > 100 for colour in (BLUE, RED, GREEN)] == [False, True, True]
    crowd = task.draw(detection(tmp_path, [0.4], cat([9, 9, 99, 99], is_crowd=True)))
    assert coloured(crowd, GREEN).sum() > 100


def test_detections_are_described_by_what_was_found():
    task = DetectionTask(8)
    record = DETECTED | {"scores": [0.6], "objects": [cat([9, 9, 99, 99]), cat([200, 200, 300, 300])]}
    assert task.describe(record) == PredictionWords("image 3", "objects found: 1 of 2, wrong boxes: 0", note="F1 0.67")


def test_categories_that_an_image_lacks_have_their_names_after_the_data_were_checked(tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr(
        "e2e_vl.tasks.detection.draw_boxes", lambda image, boxes, labels, colours: seen(labels) or image
    )
    seen = labels.append
    task = DetectionTask(8)
    task.draw(detection(tmp_path, [0.6]))
    facts = SimpleNamespace(truths=lambda: iter([Categories((4, 1))]), class_names=["dog", "cat"])
    task.check_data(facts, None)
    task.draw(detection(tmp_path, [0.6]))
    assert labels == [["category 1 0.60"], ["cat 0.60"]]


def test_a_question_is_described_with_what_people_said():
    task = VQATask(8, VQAConfig(answers=["red", "blue"]))
    base = {"question": "What color?", "answer": "red", "score": 0.75}
    answers = {"answers": ["blue", "red", "blue"], "multiple_choice_answer": "blue", "question_type": "what"}
    note = "people said: blue (2), red (1)"
    assert task.describe(base | answers) == PredictionWords("What color?", "red", 0.75, "blue", note, "what")
    assert task.describe(base) == PredictionWords("What color?", "red", 0.75)


def test_a_choice_is_described_with_the_right_one():
    task = VCRTask(8)
    base = {"sent": "Why ?", "choices": ["a", "b", "c", "d"], "choice": 1, "probabilities": [0.1, 0.6, 0.2, 0.1]}
    right = task.describe(base | {"label": 2, "family": "f"})
    assert right == PredictionWords("Why ?", "b", 0.6, "c", "the right choice has 0.20", "f")
    assert task.describe(base | {"label": 1}).note == ""
    assert task.describe(base | {"label": None}) == PredictionWords("Why ?", "b", 0.6)


def test_a_picture_of_a_choice_has_the_named_boxes(grey):
    task = VCRTask(8)
    plain = task.draw({"file_name": grey, "named_boxes": []})
    assert len(np.unique(plain.reshape(-1, 3), axis=0)) == 1
    assert (task.draw({"file_name": grey, "named_boxes": [["Casey", [10, 10, 40, 40]]]}) != plain).any()


def test_a_task_shows_the_image_alone_unless_it_says_otherwise(grey):
    assert Task.draw(None, {}) is None
    assert Task.draw(None, {"file_name": grey}).shape == (320, 480, 3)
    with pytest.raises(FileNotFoundError, match="gone"):
        Task.draw(None, {"file_name": "gone.jpg"})
