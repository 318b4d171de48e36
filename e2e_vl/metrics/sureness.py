"""From which certainty on is an answer sure? The threshold comes from the answers of a validation split.

The threshold separates the answers so that right ones prevail above it, also just above it, and not below: it is the
level `SURE` of the isotonic regression of "right" on the certainty, which is the upper set of answers with the largest
sum of (right - `SURE`). In words: an unmarked wrong answer weighs as much as 19 unmarked right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SURE = 0.95  # share of answers of a certainty that must be right
RIGHT = 0.5  # correctness from which an answer counts as right; VQA's is a share
MIN_ANSWERS = 50  # fewer answers justify no threshold
MIN_SURE = 20  # fewer right answers show no share of 0.95


def sure_threshold(certainties: Sequence[float], correctness: Sequence[float]) -> float | None:
    """Return the lowest certainty of a sure answer; None: at no certainty are enough answers right, at least 20.

    Args:
        certainties: [n], 0 to 1, of at least one answer.
        correctness: [n], 0 to 1, of the same answers.
    """
    order = np.argsort(-np.asarray(certainties, dtype=np.float64), kind="stable")
    falling = np.asarray(certainties, dtype=np.float64)[order]
    is_right = np.asarray(correctness, dtype=np.float64)[order] >= RIGHT
    gains = np.cumsum(is_right - SURE)
    may_be_last = np.append(falling[:-1] != falling[1:], True)  # equal certainties are on one side
    may_be_last[: MIN_SURE - 1] = False
    best = int(np.where(may_be_last, gains, -np.inf).argmax())
    return float(falling[best]) if gains[best] > 0 else None
