"""VQA accuracy by hand; tests/parity has the strings and numbers of the official script."""

from __future__ import annotations

import json

import pytest

from e2e_vl.metrics.vqa import (
    VQAPrediction,
    answer_accuracy,
    soft_scores,
    vqa_metrics,
    write_submission,
)


@pytest.mark.parametrize(("matches", "score"), [(0, 0), (1, 0.3), (3, 0.9), (4, 1)])
def test_agreement_with_ten_people(matches, score):
    answers = ["cat"] * matches + [f"dog {number}" for number in range(10 - matches)]
    assert answer_accuracy("cat", answers) == pytest.approx(score, abs=1e-12)


def test_answers_that_all_agree_are_compared_as_they_are():
    assert answer_accuracy("Two", ["two"] * 10) == 0
    assert answer_accuracy("two \n", ["two"] * 10) == 1
    assert answer_accuracy("Two", ["two"] * 9 + ["three"]) == 1
    assert answer_accuracy("2.", ["two"] * 9 + ["three"]) == 1


def test_soft_scores_count_raw_strings_unless_told():
    answers = ["2"] * 3 + ["Two"] + ["three"] * 6
    assert soft_scores(answers) == {"2": 0.9, "Two": 0.3, "three": 1.0}
    assert soft_scores(answers, normalised=True) == {"2": 1.0, "3": 1.0}


def prediction(number: int, answer: str, answers: list[str] | None, kind: str = "yes/no") -> VQAPrediction:
    types = {} if answers is None else {"answers": answers, "answer_type": kind, "question_type": "is it"}
    return VQAPrediction.of({"question_id": number, "answer": answer, "score": 1.0} | types)


def test_metrics_by_type_and_without_answers():
    yes = ["yes"] * 10
    number = prediction(2, "3", ["4"] * 10, "number")
    metrics = vqa_metrics([prediction(1, "yes", yes), number, prediction(3, "no", yes)])
    assert metrics["count"] == 3
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["accuracy/yes/no"] == 0.5 and metrics["accuracy/number"] == 0
    assert metrics["accuracy_by_question/is it"] == pytest.approx(1 / 3)
    assert vqa_metrics([prediction(1, "yes", None)]) == {"count": 1.0}


def test_given_scores_count_as_they_are():
    scored = VQAPrediction(answer="cat", score=1.0, answer_scores={"cat": 0.3})
    assert scored.accuracy == 0.3 and VQAPrediction(answer="dog", score=1.0, answer_scores={}).accuracy == 0


def test_the_file_of_the_server(tmp_path):
    path = tmp_path / "deep" / "vqa.json"
    write_submission(path, [prediction(7, "café", None), prediction(3, "2", None)])
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == [{"question_id": 7, "answer": "café"}, {"question_id": 3, "answer": "2"}]
    assert len(text.splitlines()) == 4  # an entry a line, and the brackets
