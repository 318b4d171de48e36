"""Files of predictions for VQA's server and for referring expressions: strict readers of what is written."""

from __future__ import annotations

import json

import pytest

from e2e_vl.evaluation import refexp_files, vqa

EXPRESSION = {"ref_id": 1, "sent_id": 2, "box": [0.5, 1, 20, 30.25]}


def test_answers_there_and_back(tmp_path):
    records = [{"question_id": 7, "answer": "café", "score": 0.5}, {"question_id": 3, "answer": "2"}]
    vqa.write_submission(tmp_path / "deep" / "vqa.json", records)
    expected = [{"question_id": 7, "answer": "café"}, {"question_id": 3, "answer": "2"}]
    assert vqa.read_submission(tmp_path / "deep" / "vqa.json") == expected
    with pytest.raises(ValueError, match="question 7 twice"):
        vqa.write_submission(tmp_path / "double.json", records[:1] * 2)
    assert not (tmp_path / "double.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "must hold a list"),
        ('[{"question_id": "1", "answer": "a"}]', "entry 0 is"),
        ('[{"question_id": true, "answer": "a"}]', "entry 0 is"),
        ('[{"question_id": 1, "answer": 2}]', "entry 0 is"),
        ('[{"question_id": 1, "answer": "a", "score": 1}]', "entry 0 is"),
        ('[{"question_id": 1, "answer": "a"}, {"question_id": 1, "answer": "b"}]', "question 1 twice"),
    ],
)
def test_answers_that_the_server_would_not_take(tmp_path, content, message):
    (tmp_path / "vqa.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        vqa.read_submission(tmp_path / "vqa.json")


def test_boxes_there_and_back(tmp_path):
    records = [{**EXPRESSION, "score": 0.5}, {"ref_id": 1, "sent_id": 1, "box": None}]
    refexp_files.write_submission(tmp_path / "deep" / "boxes.json", records)
    assert refexp_files.read_submission(tmp_path / "deep" / "boxes.json") == [EXPRESSION, records[1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not valid JSON"),
        ("{}", "must hold a list"),
        ([1], "expected an object with"),
        ([{**EXPRESSION, "score": 1}], "expected an object with"),
        ([{**EXPRESSION, "sent_id": "2"}], "expected two whole numbers"),
        ([{**EXPRESSION, "box": [1, 2, 3]}], "expected \\[x1, y1, x2, y2\\] or null"),
        ([{**EXPRESSION, "box": [1, 2, 3, float("nan")]}], "expected \\[x1, y1, x2, y2\\] or null"),
        ([EXPRESSION, EXPRESSION], "expression 2 of ref 1 is there twice"),
    ],
)
def test_boxes_that_are_none(tmp_path, content, message):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "boxes.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        refexp_files.read_submission(tmp_path / "boxes.json")


@pytest.mark.parametrize("read", [vqa.read_submission, refexp_files.read_submission])
def test_no_file(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="check the path"):
        read(tmp_path / "none.json")
