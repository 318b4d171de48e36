"""VCR's accuracies, its leaderboard file and R2C's choice of boxes are those of the official code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.data.vcr import VCRQuestion, find_relevant_objects, read_metadata, read_questions
from e2e_vl.tasks.vcr import LeaderboardScores, write_leaderboard
from tests.leaderboard import read_leaderboard, score
from tests.parity.evaluation_common import folder_of


@pytest.fixture(scope="module")
def root(golden_root: Path) -> Path:
    return folder_of(golden_root, "vcr")


@pytest.fixture(scope="module")
def expected(root: Path) -> dict:
    return json.loads((root / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def questions(root: Path) -> Sequence[VCRQuestion]:
    [path] = root.glob("*.jsonl")
    return read_questions(path)


@pytest.fixture(scope="module")
def labels(questions: Sequence[VCRQuestion]) -> tuple[list[int], list[int]]:
    every = [questions[index] for index in range(len(questions))]
    return [one.answer_label for one in every], [one.rationale_label for one in every]


def test_vcr_accuracies_of_predictions(root, expected, questions, labels):
    predictions = json.loads((root / "predictions.json").read_text("utf-8"))
    annot_ids = [one.annot_id for one in questions]
    assert predictions["annot_id"] == annot_ids
    given_right = np.array(predictions["rationale_probs"])  # [U, 4]
    found = annot_ids, np.array(predictions["answer_probs"]), given_right[:, None].repeat(4, axis=1)
    assert score(LeaderboardScores(*found), *labels) == {key: expected[key] for key in ("Q->A", "QA->R", "Q->AR")}
    for row, hits in enumerate(expected["hits"]):
        alone = score(
            LeaderboardScores(*(one[row : row + 1] for one in found)), *(one[row : row + 1] for one in labels)
        )
        assert [found[0][row], *(alone[key] == 1 for key in ("Q->A", "QA->R", "Q->AR"))] == hits


def test_vcr_accuracies_of_the_leaderboard_file(root, expected, questions, labels):
    annot_ids = [one.annot_id for one in questions]
    submission = read_leaderboard(root / "submission.csv")
    assert sorted(submission.annot_ids) == sorted(annot_ids)
    rows = [submission.annot_ids.index(annot_id) for annot_id in annot_ids]
    ours = LeaderboardScores(annot_ids, submission.answers[rows], submission.rationales[rows])
    assert score(ours, *labels) == expected["from_submission_csv_re_derived"]


def test_vcr_leaderboard_file_comes_back_equal(root, tmp_path):
    submission = read_leaderboard(root / "submission.csv")
    write_leaderboard(tmp_path / "again.csv", submission)
    recorded = (root / "submission.csv").read_text("utf-8").replace("\r\n", "\n")
    assert (tmp_path / "again.csv").read_text("utf-8") == recorded


def test_vcr_boxes_that_r2c_keeps(expected, questions):
    for index in range(len(questions)):
        one = questions[index]
        recorded = expected["r2c_detections"]["items"][one.annot_id]
        right = one.answer_choices[one.answer_label]
        sentences = {
            "answer": [one.question, *one.answer_choices],
            "rationale": [one.question + right, *one.rationale_choices],
        }
        for kind, said in sentences.items():
            used = list(find_relevant_objects(one.objects, said))
            assert used == recorded[kind]["used"]
            tags = [used.index(number) + 1 if number in used else -1 for number in range(len(one.objects))]
            assert tags == recorded[kind]["old_to_new"]


def test_vcr_metadata_of_every_image(root, questions):
    for index in range(len(questions)):
        one = questions[index]
        _, objects = read_metadata(root / "vcr1images" / one.metadata_fn, one)
        assert objects.boxes.shape == (len(one.objects), 4)
        assert len(objects.outlines) == len(one.objects)
