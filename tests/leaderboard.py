"""Reads VCR's leaderboard file by the names of its columns, apart from the code that writes it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from e2e_vl.evaluation.vcr import Submission


def read_leaderboard(path: Path) -> Submission:
    """The questions in the order of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    answers = [[row[f"answer_{a}"] for a in range(4)] for row in rows]
    rationales = [[[row[f"rationale_conditioned_on_a{a}_{r}"] for r in range(4)] for a in range(4)] for row in rows]
    assert all(len(row) == 21 and None not in row.values() for row in rows)
    return Submission(
        [row["annot_id"] for row in rows], np.array(answers, dtype=float), np.array(rationales, dtype=float)
    )
