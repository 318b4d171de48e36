"""VCR's metrics and leaderboard file.

Q->A and QA->R are accuracies of the arg-max, and Q->AR is the share of questions with both right (`eval_q2ar.py` of the
official R2C code). QA->R is conditioned on the right answer.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from detector.errors import UserError
from detector.io import atomic_file
from e2e_vl.predictions import Box, Prediction, Ranked, Score

CHOICES = 4
Number = Annotated[int, Meta(ge=0, lt=CHOICES)]  # index of a choice
ANSWER_COLUMNS = tuple(f"answer_{i}" for i in range(CHOICES))
RATIONALE_COLUMNS = tuple(f"rationale_conditioned_on_a{a}_{r}" for a in range(CHOICES) for r in range(CHOICES))
COLUMNS = ("annot_id", *ANSWER_COLUMNS, *RATIONALE_COLUMNS)


class VCRPrediction(Prediction, kw_only=True):
    """The predicted choice among four answers, or four rationales."""

    probabilities: tuple[Score, Score, Score, Score]
    choice: Number  # the predicted choice
    choices: tuple[str, ...] = ()  # as text
    label: Number | None = None  # the right choice; None: unknown
    named_boxes: tuple[tuple[str, Box], ...] = ()  # the candidate objects
    kind: Literal["answer", "rationale"] = "answer"
    annot_id: str = ""
    conditioned_on: Number | None = None  # the given answer, for rationales

    @property
    def chosen_text(self) -> int:
        return self.choice

    @property
    def box_names(self) -> list[str]:
        return [name for name, _ in self.named_boxes]

    @property
    def ranked(self) -> Ranked:
        """The choices with their probabilities, best first."""
        return tuple(sorted(zip(self.choices, self.probabilities, strict=True), key=lambda pair: -pair[1]))


class Submission(NamedTuple):
    """The contents of the leaderboard file."""

    annot_ids: list[str]  # U, unique
    answers: np.ndarray  # float64 [U, 4], one score per answer
    rationales: np.ndarray  # float64 [U, 4, 4]: scores of rationales (last axis) for each given answer


def write_submission(
    path: str | Path, answers_run: Sequence[VCRPrediction], rationales_run: Sequence[VCRPrediction]
) -> None:
    """Write the leaderboard file from a Q->A run and a QA->R run, see `join_predictions`."""
    write_leaderboard(path, join_predictions(answers_run, rationales_run))


def write_leaderboard(path: str | Path, submission: Submission) -> None:
    """Write the leaderboard file: a header, and a row of 21 columns per question with scores in full precision."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for annot_id, answers, rationales in zip(*submission, strict=True):
            scores = np.concatenate([answers, rationales.reshape(-1)])
            writer.writerow([annot_id, *(repr(float(score)) for score in scores)])


def join_predictions(answers_run: Sequence[VCRPrediction], rationales_run: Sequence[VCRPrediction]) -> Submission:
    """Join the predictions of a Q->A run and of a QA->R run with condition_on=each.

    Returns:
        The submission, in the order of `answers_run`.
    """
    answers, rationales = _by_question(answers_run, "answer"), _by_question(rationales_run, "rationale")
    wanted = [(annot_id, answer) for annot_id, _ in answers for answer in range(CHOICES)]
    missing = [key for key in wanted if key not in rationales]
    if missing:
        annot_id, answer = missing[0]
        raise UserError(
            f"There is no rationale prediction for the question {annot_id} with answer {answer}, and for "
            f"{len(missing) - 1} more; predict rationales of the same split with data.config.condition_on=each."
        )
    return Submission(
        [annot_id for annot_id, _ in answers],
        np.array([one.probabilities for one in answers.values()], dtype=np.float64).reshape(-1, CHOICES),
        np.array([rationales[key].probabilities for key in wanted], dtype=np.float64).reshape(-1, CHOICES, CHOICES),
    )


def joint_metrics(answers_run: Sequence[VCRPrediction], rationales_run: Sequence[VCRPrediction]) -> dict[str, float]:
    """Accuracies "Q->A", "QA->R" and "Q->AR" of a Q->A run and a QA->R run on the same split, as fractions.

    Rationales for a wrong answer are not counted.
    """
    answers, rationales = _by_question(answers_run, "answer"), _by_question(rationales_run, "rationale")
    pairs = [(one, rationales[one.annot_id, one.label]) for one in answers.values()]
    answer, rationale = np.array([[one.choice == one.label for one in pair] for pair in pairs]).T
    found = {"Q->A": answer, "QA->R": rationale, "Q->AR": answer & rationale}
    return {name: float(right.mean()) for name, right in found.items()}


def _by_question(predictions: Sequence[VCRPrediction], kind: str) -> dict[tuple[str, int | None], VCRPrediction]:
    """(annot_id, conditioned_on) -> prediction."""
    for one in predictions:
        if one.kind != kind:
            raise UserError(
                f"The prediction for {one.annot_id} is for the {one.kind}, expected the {kind}: give the "
                "predictions of the Q->A run first, then the predictions of the QA->R run."
            )
    return {(one.annot_id, one.conditioned_on): one for one in predictions}
