"""Which expression a record is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.samples import ReferredBoxes
from e2e_vl.scoring.answers import Answer, AnswerFile
from e2e_vl.scoring.matching import image_key, match, read_questions
from e2e_vl.scoring.truths import TrueText

LEFT = (0.0, 0.0, 10.0, 10.0)
RIGHT = (50.0, 0.0, 60.0, 10.0)


def text(sent_id: int, words: str, box=LEFT, ann_id: int = 1, image: int = 0) -> TrueText:
    name = f"COCO_train2014_{image + 7:012d}.jpg"
    return TrueText(
        words, ReferredBoxes((box,), (ann_id,)), {"sent_id": sent_id}, image, str(image + 7), name, (80, 90)
    )


TEXTS = [text(1, "Left  man"), text(2, "man"), text(3, "man", RIGHT, 2), text(4, "man"), text(5, "dog", RIGHT, 3, 1)]


def numbers_of(*keys: dict, questions: list[dict] | None = None) -> list[int | None]:
    """The number of the record that answers each text."""
    answers = [Answer(f"record {number}", key, [[number, 0, 9, 9]]) for number, key in enumerate(keys)]
    matches = match(AnswerFile(Path("f.json"), "", answers), TEXTS, questions)
    return [None if answer is None else answer.boxes[0][0] for answer in matches.answers]


def test_by_sentence_annotation_and_words():
    assert numbers_of({"sent_id": 5}, {"sent_id": "1"}) == [1, None, None, None, 0]
    assert numbers_of({"ann_id": "2", "words": "man"}) == [None, None, 0, None, None]
    assert numbers_of({"image": "a/COCO_train2014_000000000007_12.jpg", "words": "left man"})[0] == 0


def test_two_equal_expressions_about_one_object_have_two_records():
    assert numbers_of({"ann_id": 1, "words": "man"}, {"ann_id": 1, "words": "man"}) == [None, 0, None, 1, None]
    with pytest.raises(UserError, match="two different predictions"):
        numbers_of(*[{"ann_id": 1, "words": "man"}] * 3)


def test_equal_expressions_about_two_objects_need_more_than_the_image():
    keys = {"image": 7, "words": "man"}
    with pytest.raises(UserError, match="is said of 3 objects"):
        numbers_of(keys)
    for box in ([50, 0, 60, 10], [50.4, 0, 10, 10]):  # xyxy or xywh
        question = {"id": None, "image": 7, "words": "man", "ann_id": None, "box": box}
        assert numbers_of({}, questions=[question]) == [None, None, 0, None, None]


def test_ids_alone_are_of_sentences_unless_questions_say_otherwise():
    assert numbers_of({"id": 4}) == [None, None, None, 0, None]
    questions = [{"id": 4, "image": 8, "words": "dog", "ann_id": None, "box": None}]
    assert numbers_of({"id": 4}, questions=questions) == [None, None, None, None, 0]


def test_questions_by_place_must_be_as_many_and_about_the_same():
    question = {"id": None, "image": 8, "words": "dog", "ann_id": None, "box": None}
    with pytest.raises(UserError, match="2 records cannot be those of 1 questions"):
        numbers_of({}, {}, questions=[question])
    with pytest.raises(UserError, match="'cat', but the question at its place is about 'dog'"):
        numbers_of({"words": "cat"}, questions=[question])


def test_questions_of_mdetr_and_of_vision_language_models(tmp_path):
    image = {"id": 3, "file_name": "x.jpg", "caption": "dog", "original_id": 8}
    annotation = {"image_id": 3, "original_id": 99, "bbox": [1, 2, 3, 4], "id": 0}
    (tmp_path / "coco.json").write_text(json.dumps({"images": [image], "annotations": [annotation]}))
    expected = {"id": 3, "image": "x.jpg", "words": "dog", "ann_id": 99, "box": [1, 2, 3, 4]}
    assert read_questions(tmp_path / "coco.json") == [expected]
    (tmp_path / "rows.jsonl").write_text('{"image": "x.jpg", "sent": "dog", "bbox": [1, 2, 3, 4], "hw": 1}\n')
    [question] = read_questions(tmp_path / "rows.jsonl")
    assert {key: question[key] for key in expected} == expected | {"id": None, "ann_id": None}


def test_names_of_images():
    names = ("a/COCO_train2014_000000581857_16.jpg", "000000581857.jpg", 581857, "581857")
    assert {image_key(name) for name in names} == {"581857"} and image_key("b/seven.png") == "seven"
