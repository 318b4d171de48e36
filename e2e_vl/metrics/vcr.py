"""VCR's metrics and its leaderboard file.

Q->A and QA->R are accuracies of the arg-max; Q->AR is the share of questions with both right (the official R2C code,
`eval_q2ar.py`). QA->R is conditioned on the right answer.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detector.errors import UserError
from detector.io import atomic_file

CHOICES = 4
ANSWER_COLUMNS = tuple(f"answer_{i}" for i in range(CHOICES))
RATIONALE_COLUMNS = tuple(f"rationale_conditioned_on_a{a}_{r}" for a in range(CHOICES) for r in range(CHOICES))
COLUMNS = ("annot_id", *ANSWER_COLUMNS, *RATIONALE_COLUMNS)


class Submission(NamedTuple):
    """What the leaderboard file holds."""

    annot_ids: list[str]  # U, all different
    answers: np.ndarray  # float64 [U, 4], one score per answer
    rationales: np.ndarray  # float64 [U, 4, 4]: rationales (last axis), given each of the answers


def write_submission(path: str | Path, submission: Submission) -> None:
    """Write the leaderboard file: a header and a row of 21 columns per question. Scores are written in full.

    Raises:
        ValueError: arrays that do not fit together, a question twice, or a score that is not finite.
    """
    number = len(submission.annot_ids)
    shapes = [np.shape(submission.answers), np.shape(submission.rationales)]
    if shapes != [(number, CHOICES), (number, CHOICES, CHOICES)]:
        raise UserError(f"{path}: {number} questions need scores [U, 4] and [U, 4, 4]; these have the shapes {shapes}.")
    if len(set(submission.annot_ids)) != number:
        raise UserError(f"{path}: a question is there twice; every annot_id needs one row.")
    if not (np.isfinite(submission.answers).all() and np.isfinite(submission.rationales).all()):
        raise UserError(f"{path}: a score is not a finite number; look for a diverged model.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for annot_id, answers, rationales in zip(*submission, strict=True):
            scores = np.concatenate([answers, rationales.reshape(-1)])
            writer.writerow([annot_id, *(repr(float(score)) for score in scores)])


def join_predictions(
    answer_records: Sequence[Mapping[str, Any]], rationale_records: Sequence[Mapping[str, Any]]
) -> Submission:
    """Join the predictions of a Q->A run and of a QA->R run that was conditioned on each of the four answers.

    Args:
        answer_records: one per question, with `kind`, `annot_id` and `probabilities` [4].
        rationale_records: four per question, with `kind`, `annot_id`, `conditioned_on` (0 to 3), `probabilities` [4].

    Returns:
        The submission, in the order of `answer_records`.

    Raises:
        ValueError: a record of the other kind, or a question that one of the two misses or has twice; the question
            is named.
    """
    answers = _by_question(answer_records, "answer")
    rationales = _by_question(rationale_records, "rationale")
    wanted = [(annot_id, answer) for annot_id, _ in answers for answer in range(CHOICES)]
    missing = [key for key in wanted if key not in rationales]
    if missing:
        annot_id, answer = missing[0]
        raise UserError(
            f"There is no rationale prediction for the question {annot_id}, given answer {answer}, and for "
            f"{len(missing) - 1} more; predict rationales of the same split with data.config.condition_on=each."
        )
    if len(rationales) > len(wanted):
        annot_id, answer = next(key for key in rationales if (key[0], None) not in answers)
        raise UserError(f"The question {annot_id} has rationale predictions but no answer prediction; predict both.")
    annot_ids = [annot_id for annot_id, _ in answers]
    return Submission(
        annot_ids,
        np.array(list(answers.values()), dtype=np.float64).reshape(-1, CHOICES),
        np.array([rationales[key] for key in wanted], dtype=np.float64).reshape(-1, CHOICES, CHOICES),
    )


def joint_metrics(
    answer_records: Sequence[Mapping[str, Any]], rationale_records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Accuracies "Q->A", "QA->R" and "Q->AR" of a Q->A run and a QA->R run on the same split, as fractions.

    The first of equal scores wins.

    Args:
        answer_records: one per question, with `kind`, `annot_id`, `probabilities` [4] and `label` (0 to 3).
        rationale_records: the same of rationales, with `conditioned_on`; those given a wrong answer are not counted.

    Raises:
        ValueError: no question, questions without a label, or that one of the two misses or has twice, a
            label that is not 0 to 3, or probabilities that are not 4 numbers.
    """
    answers = _by_question(answer_records, "answer")
    truth = {record["annot_id"]: record["label"] for record in answer_records}
    kept = [record for record in rationale_records if record["conditioned_on"] == truth.get(record["annot_id"])]
    for record in (*answer_records, *kept):
        if record["label"] is None:
            raise UserError(f"The question {record['annot_id']} has no label, as in the test split; nothing to score.")
        number = len(record["probabilities"])
        if record["label"] not in range(CHOICES) or number != CHOICES:
            raise UserError(
                f"The question {record['annot_id']} has the label {record['label']} and {number} probabilities; it "
                "needs a label from 0 to 3 and 4 probabilities, so predict again."
            )
    rationales = _by_question(kept, "rationale")
    missing = [annot_id for annot_id, label in truth.items() if (annot_id, label) not in rationales]
    extra = {record["annot_id"] for record in rationale_records} - set(truth)
    if missing or extra:
        kind, annot_id = ("rationale", missing[0]) if missing else ("answer", sorted(extra)[0])
        raise UserError(f"There is no {kind} prediction for the question {annot_id}; predict both on the same split.")
    if not truth:
        raise UserError("There is no question to score.")
    rationale_truth = {record["annot_id"]: record["label"] for record in kept}
    answer = _hits(answers.values(), truth.values())
    rationale = _hits((rationales[key] for key in truth.items()), (rationale_truth[annot_id] for annot_id in truth))
    found = {"Q->A": answer, "QA->R": rationale, "Q->AR": answer & rationale}
    return {name: float(right.mean()) for name, right in found.items()}


def _hits(probabilities: Iterable[Sequence[float]], labels: Iterable[int]) -> np.ndarray:
    """bool [U]: the label is the best choice."""
    scores = np.array(list(probabilities), dtype=np.float64)
    if np.isnan(scores).any():
        raise UserError("A score is not a number (NaN), so there is no best choice; look for a diverged model.")
    return scores.argmax(axis=1) == list(labels)


def _by_question(records: Sequence[Mapping[str, Any]], kind: str) -> dict[tuple[str, int | None], list[float]]:
    """(annot_id, conditioned_on) -> probabilities."""
    found: dict[tuple[str, int | None], list[float]] = {}
    for record in records:
        if record.get("kind") != kind:
            raise UserError(
                f"The prediction for {record.get('annot_id')} is about the {record.get('kind')}, expected the {kind}: "
                "give the predictions of the Q->A run first, then the predictions of the QA->R run."
            )
        key = (record["annot_id"], record["conditioned_on"])
        if key in found:
            raise UserError(f"There are two {kind} predictions for the question {record['annot_id']}; remove one.")
        found[key] = record["probabilities"]
    return found
