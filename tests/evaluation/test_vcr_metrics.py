from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.metrics.vcr import (
    COLUMNS,
    Submission,
    join_predictions,
    joint_metrics,
    write_submission,
)
from tests.leaderboard import read_leaderboard, score

BEST = np.eye(4)


def submission(number: int = 3) -> Submission:
    rng = np.random.default_rng(0)
    return Submission([f"q-{i}" for i in range(number)], rng.random((number, 4)), rng.random((number, 4, 4)))


def test_columns_are_those_of_the_leaderboard():
    assert len(COLUMNS) == 21
    assert COLUMNS[:2] == ("annot_id", "answer_0")
    assert COLUMNS[5] == "rationale_conditioned_on_a0_0"
    assert COLUMNS[-1] == "rationale_conditioned_on_a3_3"


def test_both_must_be_right_for_the_joint_score():
    given_each = BEST[[0, 1, 0, 0]][:, None].repeat(4, axis=1)
    scores = score(Submission(list("abcd"), BEST, given_each), [0, 1, 2, 0], [0, 2, 0, 1])
    assert scores == {"Q->A": 0.75, "QA->R": 0.5, "Q->AR": 0.5}


def test_rationales_are_those_given_the_right_answer():
    rationales = np.zeros((1, 4, 4))
    rationales[0, :, 0] = 1
    rationales[0, 2] = BEST[3]  # only given answer 2 is rationale 3 the best
    for label, right in ((2, True), (1, False)):
        assert score(Submission(["a"], BEST[[0]], rationales), [label], [3])["QA->R"] == right


def test_the_first_of_equal_scores_wins():
    equal = Submission(["a"], np.ones((1, 4)), np.ones((1, 4, 4)))
    assert [score(equal, [label], [0])["Q->A"] for label in (0, 1)] == [1, 0]


def test_nothing_to_score():
    for answers, rationales in ((BEST[:1] * np.nan, BEST[None]), (BEST[:1], BEST[None] * np.nan)):
        with pytest.raises(ValueError, match="not a number"):
            score(Submission(["a"], answers, rationales), [0], [0])
    with pytest.raises(ValueError, match="no question to score"):
        joint_metrics([], [])


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 4}, "question a has the label 4 and 4 probabilities; it needs a label from 0 to 3"),
        ({"label": -1}, "has the label -1"),
        ({"probabilities": [0.2, 0.5, 0.3]}, "label 1 and 3 probabilities; .*and 4 probabilities"),
    ],
)
def test_scores_that_do_not_fit(part, change, message):
    records = [answer("a", 1, 1)], [rationale("a", 1, 1, 1)]
    records[part][0].update(change)
    with pytest.raises(ValueError, match=message):
        joint_metrics(*records)


def test_submission_has_every_score_under_its_column(tmp_path):
    path, ours = tmp_path / "new" / "test.csv", submission()
    write_submission(path, ours)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    again = read_leaderboard(path)
    assert again.annot_ids == ours.annot_ids
    np.testing.assert_array_equal(again.answers, ours.answers)
    np.testing.assert_array_equal(again.rationales, ours.rationales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": np.zeros((3, 3))}, "need scores"),
        ({"annot_ids": ["a", "b", "a"]}, "there twice"),
        ({"rationales": np.full((3, 4, 4), np.inf)}, "not a finite number"),
    ],
)
def test_scores_that_cannot_be_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        write_submission(tmp_path / "test.csv", submission()._replace(**change))


def answer(annot_id: str, choice: int, label: int | None = 0) -> dict:
    shares = BEST[choice].tolist()
    return {"annot_id": annot_id, "kind": "answer", "conditioned_on": None, "probabilities": shares, "label": label}


def rationale(annot_id: str, given: int, choice: int, label: int | None = None) -> dict:
    return answer(annot_id, choice, label) | {"kind": "rationale", "conditioned_on": given}


def test_predictions_of_two_runs_make_a_submission():
    answers = [answer("b", 1), answer("a", 2)]
    rationales = [rationale(name, given, 3 - given) for name in "ab" for given in range(4)]
    joined = join_predictions(answers, rationales)
    assert joined.annot_ids == ["b", "a"]
    np.testing.assert_array_equal(joined.answers, BEST[[1, 2]])
    np.testing.assert_array_equal(joined.rationales, np.stack([BEST[::-1]] * 2))


def test_predictions_that_do_not_go_together():
    answers = [answer("a", 2)]
    rationales = [rationale("a", given, 0) for given in range(4)]
    with pytest.raises(ValueError, match=r"the question a, given answer 3, .*condition_on=each"):
        join_predictions(answers, rationales[:3])
    with pytest.raises(ValueError, match="question b has rationale predictions but no answer"):
        join_predictions(answers, [*rationales, rationale("b", 0, 0)])
    with pytest.raises(ValueError, match="two rationale predictions for the question a"):
        join_predictions(answers, [*rationales, rationales[0]])
    with pytest.raises(ValueError, match="about the rationale, expected the answer"):
        join_predictions(rationales, answers)


@pytest.mark.parametrize("conditioned", ["right", "each"])
def test_joint_metrics_of_two_runs(conditioned):
    answers = [answer("a", 2, 2), answer("b", 1, 0), answer("c", 3, 3)]
    rationales = [rationale("a", 2, 1, 1), rationale("b", 0, 2, 2), rationale("c", 3, 0, 1)]
    if conditioned == "each":
        labels = {"a": 2, "b": 0, "c": 3}
        rationales += [rationale(n, given, 0) for n in "abc" for given in range(4) if given != labels[n]]
    scores = joint_metrics(answers, rationales)
    assert scores == pytest.approx({"Q->A": 2 / 3, "QA->R": 2 / 3, "Q->AR": 1 / 3})


def test_joint_metrics_of_different_questions():
    with pytest.raises(ValueError, match="no rationale prediction for the question a"):
        joint_metrics([answer("a", 2, 2)], [rationale("a", 1, 1, 1)])
    with pytest.raises(ValueError, match="no answer prediction for the question b"):
        joint_metrics([answer("a", 2, 2)], [rationale("a", 2, 1, 1), rationale("b", 2, 1, 1)])
    with pytest.raises(ValueError, match="a has no label"):
        joint_metrics([answer("a", 2, None)], [])
