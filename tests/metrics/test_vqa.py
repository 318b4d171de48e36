"""VQA accuracy by hand; tests/parity has the strings and numbers of the official script."""

from __future__ import annotations

import json

import pytest

from detector.errors import UserError
from e2e_vl.metrics.vqa import VQAPrediction, answer_accuracy, soft_scores, write_submission


def test_answers_that_all_agree_are_compared_as_they_are():
    assert answer_accuracy("Two", ["two"] * 10) == 0
    assert answer_accuracy("two \n", ["two"] * 10) == 1
    assert answer_accuracy("Two", ["two"] * 9 + ["three"]) == 1
    assert answer_accuracy("2.", ["two"] * 9 + ["three"]) == 1


def test_each_answer_is_judged_by_the_others():
    """One to four people of ten: 0.3, 0.6, 0.9 and 1, because an answer is no match of itself."""
    others = list("bcdefghijk")
    scores = [answer_accuracy("yes", ["yes"] * people + others[people:]) for people in range(5)]
    assert scores == pytest.approx([0, 0.3, 0.6, 0.9, 1])


def test_soft_scores_count_raw_strings_unless_told():
    answers = ["2"] * 3 + ["Two"] + ["three"] * 6
    assert soft_scores(answers) == {"2": 0.9, "Two": 0.3, "three": 1.0}
    assert soft_scores(answers, normalised=True) == {"2": 1.0, "3": 1.0}


def prediction(number: int, answer: str, answers: list[str] | None, kind: str = "yes/no") -> VQAPrediction:
    types = {} if answers is None else {"answers": answers, "answer_type": kind, "question_type": "is it"}
    return VQAPrediction.from_record({"question_id": number, "answer": answer, "score": 1.0} | types)


def test_given_scores_count_as_they_are():
    scored = VQAPrediction(answer="cat", score=1.0, answer_scores={"cat": 0.3})
    assert scored.accuracy == 0.3 and VQAPrediction(answer="dog", score=1.0, answer_scores={}).accuracy == 0


def test_the_file_of_the_server(tmp_path):
    path = tmp_path / "deep" / "vqa.json"
    write_submission(path, [prediction(7, "café", None), prediction(3, "2", None)])
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == [{"question_id": 7, "answer": "café"}, {"question_id": 3, "answer": "2"}]
    assert len(text.splitlines()) == 4  # an entry a line, and the brackets
    with pytest.raises(UserError, match="the text 3 is listed twice"):
        write_submission(path, [prediction(3, "1", None), prediction(3, "2", None)])
