"""The certainty from which on answers are sure, by hand and against isotonic regression."""

from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.metrics.sureness import SURE, sure_threshold

RIGHT, WRONG = [1.0] * 30, [0.0] * 30


@pytest.mark.parametrize(
    ("certainties", "correctness", "threshold"),
    [
        ([0.9] * 30 + [0.4] * 30, RIGHT + WRONG, 0.9),
        ([0.9] * 30 + [0.4] * 30, RIGHT + RIGHT, 0.4),
        ([0.9] * 30 + [0.4] * 30, WRONG + RIGHT, None),
        ([0.9] * 30 + [0.4] * 30, WRONG + WRONG, None),
        ([0.7] * 60, RIGHT + WRONG, None),
        ([0.9] * 30 + [0.4] * 30, [0.6] * 30 + [0.3] * 30, 0.9),
        ([0.9] * 10 + [0.4] * 50, RIGHT[:10] + WRONG + WRONG[:20], None),
        ([0.9] * 20 + [0.4] * 40, RIGHT[:20] + WRONG + WRONG[:10], 0.9),
        ([0.99] * 300 + [0.4] * 10, [1.0] * 300 + [1.0] * 5 + [0.0] * 5, 0.99),
    ],
)
def test_thresholds_by_hand(certainties, correctness, threshold):
    assert sure_threshold(certainties, correctness) == threshold


def test_the_threshold_is_a_level_of_isotonic_regression():
    generator = np.random.default_rng(0)
    certainties = generator.random(400)
    is_right = generator.random(400) < certainties**0.05
    threshold = sure_threshold(certainties, is_right)
    order = np.argsort(certainties)
    pools: list[list[float]] = []  # [sum, count], pool adjacent violators
    for value in is_right[order]:
        pools.append([float(value), 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    fitted = np.concatenate([np.full(count, total / count) for total, count in pools])
    assert 0 < (certainties >= threshold).sum() < 400
    assert (certainties[order][fitted > SURE] >= threshold).all()
    assert (certainties[order][fitted < SURE] < threshold).all()
