"""VCR's accuracies and its leaderboard file, by hand."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.tasks.vcr import COLUMNS, LeaderboardScores, VCRPrediction, joint_metrics, write_submission
from tests.leaderboard import prediction, read_leaderboard, score

BEST = np.eye(4)


def test_the_first_of_equal_scores_wins():
    equal = LeaderboardScores(["a"], np.ones((1, 4)), np.ones((1, 4, 4)))
    assert [score(equal, [label], [0])["Q->A"] for label in (0, 1)] == [1, 0]


@pytest.mark.parametrize("change", [{"label": 4}, {"probabilities": [0.2, 0.5, 0.3]}])
def test_scores_and_labels_that_cannot_be(change):
    with pytest.raises(ValueError, match="VCRPrediction of text 3"):
        VCRPrediction.from_record({"text_index": 3, "choice": 1, "probabilities": [0.1, 0.7, 0.1, 0.1]} | change)


def answer(annot_id: str, choice: int, label: int | None = 0, kind: str = "answer", **more) -> VCRPrediction:
    return prediction(annot_id, kind, BEST[choice], label, **more)


def rationale(annot_id: str, given: int, choice: int, label: int | None = None) -> VCRPrediction:
    return answer(annot_id, choice, label, "rationale", conditioned_on=given)


def test_predictions_of_two_runs_make_a_file(tmp_path):
    path = tmp_path / "new" / "test.csv"
    answers = [prediction("b", "answer", np.array([0.1, 0.2, 0.3, 1 / 3]), 0), answer("a", 2)]
    write_submission(path, answers, [rationale(name, given, 3 - given) for name in "ab" for given in range(4)])
    columns = path.read_text().splitlines()[0].split(",")
    assert columns == list(COLUMNS) and len(columns) == 21
    assert columns[:5] == ["annot_id", "answer_0", "answer_1", "answer_2", "answer_3"]
    assert columns[5::5] == [f"rationale_conditioned_on_a{number}_{number}" for number in range(4)]
    again = read_leaderboard(path)
    assert again.annot_ids == ["b", "a"]
    np.testing.assert_array_equal(again.answers, [[0.1, 0.2, 0.3, 1 / 3], BEST[2]])
    np.testing.assert_array_equal(again.rationales, np.stack([BEST[::-1]] * 2))


def test_predictions_that_do_not_go_together(tmp_path):
    write = functools.partial(write_submission, tmp_path / "test.csv")
    answers = [answer("a", 2)]
    rationales = [rationale("a", given, 0) for given in range(4)]
    with pytest.raises(UserError, match=r"question a .*condition_on=each"):
        write(answers, rationales[:3])
    with pytest.raises(UserError, match="rationale, expected the answer"):
        write(rationales, answers)


def test_joint_metrics_of_two_runs():
    answers = [answer("a", 2, 2), answer("b", 1, 0), answer("c", 3, 3)]
    rationales = [rationale("a", 2, 1, 1), rationale("b", 0, 2, 2), rationale("c", 3, 0, 1)]
    others = {"a": 2, "b": 0, "c": 3}  # rationales for other answers do not count
    others = [rationale(name, given, 0) for name, label in others.items() for given in range(4) if given != label]
    assert joint_metrics(answers, rationales) == joint_metrics(answers, rationales + others)
    assert joint_metrics(answers, rationales) == pytest.approx({"Q->A": 2 / 3, "QA->R": 2 / 3, "Q->AR": 1 / 3})
