"""Files of predictions for VQA's server and for referring expressions: what is written, and what is refused."""

from __future__ import annotations

import json

import pytest

from e2e_vl.metrics import refcoco as refexp
from e2e_vl.metrics import vqa

EXPRESSION = {"ref_id": 1, "sent_id": 2, "box": [0.5, 1, 20, 30.25]}


def test_answers_are_a_list_of_two_keys(tmp_path):
    path = tmp_path / "deep" / "vqa.json"
    records = [{"question_id": 7, "answer": "café", "score": 0.5}, {"question_id": 3, "answer": "2"}]
    vqa.write_submission(path, records)
    expected = [{"question_id": 7, "answer": "café"}, {"question_id": 3, "answer": "2"}]
    assert json.loads(path.read_text(encoding="utf-8")) == expected
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4  # an entry a line, and the brackets
    with pytest.raises(ValueError, match="question 7 twice"):
        vqa.write_submission(tmp_path / "double.json", records[:1] * 2)
    assert not (tmp_path / "double.json").exists()


def test_boxes_are_a_list_of_three_keys(tmp_path):
    path = tmp_path / "deep" / "boxes.json"
    records = [{**EXPRESSION, "score": 0.5}, {"ref_id": 1, "sent_id": 1, "box": None}]
    refexp.write_submission(path, records)
    assert json.loads(path.read_text(encoding="utf-8")) == [EXPRESSION, records[1]]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{**EXPRESSION, "sent_id": "2"}], "expected two whole numbers"),
        ([{**EXPRESSION, "box": [1, 2, 3]}], "expected \\[x1, y1, x2, y2\\] or null"),
        ([{**EXPRESSION, "box": [1, 2, 3, float("nan")]}], "expected \\[x1, y1, x2, y2\\] or null"),
        ([EXPRESSION, EXPRESSION], "expression 2 of ref 1 is there twice"),
    ],
)
def test_boxes_that_cannot_be_written(tmp_path, records, message):
    path = tmp_path / "boxes.json"
    with pytest.raises(ValueError, match=message):
        refexp.write_submission(path, records)
    assert not path.exists()
