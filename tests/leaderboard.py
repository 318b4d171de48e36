"""Reads VCR's leaderboard file by the names of its columns, apart from the code that writes it, and scores it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from e2e_vl.tasks.vcr import LeaderboardScores, VCRPrediction, joint_metrics


def read_leaderboard(path: Path) -> LeaderboardScores:
    """The questions in the order of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    answers = [[row[f"answer_{a}"] for a in range(4)] for row in rows]
    rationales = [[[row[f"rationale_conditioned_on_a{a}_{r}"] for r in range(4)] for a in range(4)] for row in rows]
    assert all(len(row) == 21 and None not in row.values() for row in rows)
    return LeaderboardScores(
        [row["annot_id"] for row in rows], np.array(answers, dtype=float), np.array(rationales, dtype=float)
    )


def score(
    submission: LeaderboardScores, answer_labels: Sequence[int], rationale_labels: Sequence[int]
) -> dict[str, float]:
    """Its `joint_metrics`: a run chose the rationales for each given answer."""
    answers, reasons = [], []
    labels = answer_labels, rationale_labels
    for annot_id, scores, given_each, answer, rationale in zip(*submission, *labels, strict=True):
        answers.append(prediction(annot_id, "answer", scores, answer))
        reasons += [
            prediction(annot_id, "rationale", row, rationale, conditioned_on=given)
            for given, row in enumerate(given_each)
        ]
    return joint_metrics(answers, reasons)


def prediction(annot_id: str, kind: str, probabilities: np.ndarray, label: int | None, **more) -> VCRPrediction:
    choice = int(np.argmax(probabilities))
    given = tuple(float(one) for one in probabilities)
    return VCRPrediction(annot_id=annot_id, kind=kind, probabilities=given, choice=choice, label=label, **more)
