"""VQA accuracy by hand, and inputs that it refuses; numbers of the official script are in tests/parity."""

from __future__ import annotations

import pytest

from e2e_vl.metrics.vqa import (
    answer_accuracy,
    normalise_answer,
    round_half_up,
    soft_scores,
    standardise_words,
    strip_punctuation,
    vqa_accuracy,
    vqa_metrics,
)


@pytest.mark.parametrize(("matches", "score"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_agreement_with_ten_people(matches, score):
    answers = ["cat"] * matches + [f"dog {number}" for number in range(10 - matches)]
    assert answer_accuracy("cat", answers) == pytest.approx(score, abs=1e-12)


def test_answers_that_all_agree_are_compared_as_they_are():
    assert answer_accuracy("Two", ["two"] * 10) == 0
    assert answer_accuracy("two \n", ["two"] * 10) == 1
    assert answer_accuracy("Two", ["two"] * 9 + ["three"]) == 1
    assert answer_accuracy("2.", ["two"] * 9 + ["three"]) == 1


def test_at_most_32_periods_are_deleted():
    assert strip_punctuation("." * 32) == ""
    assert strip_punctuation("." * 40) == "." * 8
    assert strip_punctuation("3.5") == "3.5"


def test_contractions_miss_one_apostrophe():
    assert standardise_words("dont couldnt've couldn'tve couldntve") == "don't couldn't've couldn't've couldntve"


def test_digits_articles_and_marks():
    assert normalise_answer("The T-shirt,  and\tNONE") == "t shirt and 0"
    assert normalise_answer("a") == ""


def test_soft_scores_count_raw_strings_unless_told():
    answers = ["2"] * 3 + ["Two"] + ["three"] * 6
    assert soft_scores(answers) == {"2": 0.9, "Two": 0.3, "three": 1.0}
    assert soft_scores(answers, normalised=True) == {"2": 1.0, "3": 1.0}


def test_soft_scores_are_the_accuracy_of_each_answer():
    answers = ["red"] * 5 + ["blue"] * 2 + ["dark red"] * 2 + ["no idea"]
    for answer, score in soft_scores(answers).items():
        assert score == pytest.approx(answer_accuracy(answer, answers), abs=1e-12)


def question(number: int, answer: str = "yes", kind: str = "yes/no") -> dict:
    return {"question_id": number, "answers": [answer] * 10, "answer_type": kind, "question_type": "is it"}


def test_predictions_must_be_those_of_the_annotated_questions():
    annotations = [question(1), question(2)]
    right = [{"question_id": 2, "answer": "yes"}, {"question_id": 1, "answer": "no"}]
    report = vqa_accuracy(right, annotations)
    assert report["overall"] == 50 and report["perQuestion"] == {1: 0.0, 2: 100.0}
    with pytest.raises(ValueError, match="1 are missing and 0 are not among them, question 2 lacks a prediction"):
        vqa_accuracy(right[1:], annotations)
    with pytest.raises(ValueError, match="0 are missing and 1 are not among them, question 7 is not annotated"):
        vqa_accuracy([*right, {"question_id": 7, "answer": ""}], annotations)
    with pytest.raises(ValueError, match="predictions have question 2 twice"):
        vqa_accuracy([*right, right[0]], annotations)
    with pytest.raises(ValueError, match="no annotated questions"):
        vqa_accuracy([], [])


def test_metrics_by_type_and_without_answers():
    records = [
        {**question(1), "answer": "yes"},
        {**question(2, "4", "number"), "answer": "3"},
        {**question(3), "answer": "no"},
    ]
    metrics = vqa_metrics(records)
    assert metrics["count"] == 3
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["accuracy/yes/no"] == 0.5 and metrics["accuracy/number"] == 0
    assert metrics["accuracy_by_question/is it"] == pytest.approx(1 / 3)
    assert vqa_metrics([{"question_id": 1, "answer": "yes"}]) == {"count": 1.0}


def test_ties_round_away_from_zero():
    assert round_half_up(0.125, 2) == 0.13  # Python 3's round gives 0.12
    assert round_half_up(2.675, 2) == 2.67  # in binary a little less than a tie
