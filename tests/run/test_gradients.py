"""What a step may use: finite numbers, or with fp16 what its scaler will leave out."""

from __future__ import annotations

import math

import pytest
import torch

from e2e_vl.run.failed_step import not_finite
from e2e_vl.run.optim import NORM, OVERFLOWS, SKIPPED, NumberCheck, averages


def test_every_number_must_be_finite():
    check = NumberCheck(scaled=False)
    assert check.bad({"loss": 1.0, NORM: 2.0}) == []
    assert check.bad({"loss": 1.0, NORM: math.inf}) == [NORM]
    assert check.bad({"loss": math.nan, "other": 1.0, NORM: math.nan}) == ["loss", NORM]


def test_the_scaler_of_fp16_may_skip_some_steps_but_not_all():
    check = NumberCheck(scaled=True)
    values = {"loss": 1.0, NORM: math.inf}
    assert check.bad(values) == [] and values == {"loss": 1.0, NORM: 0.0, SKIPPED: 1.0}
    values = {"loss": 1.0, NORM: 3.0}
    assert check.bad(values) == [] and values == {"loss": 1.0, NORM: 3.0, SKIPPED: 0.0}
    assert check.bad({"loss": math.nan, NORM: math.nan}) == ["loss", NORM], "a loss is not scaled"
    found = [check.bad({"loss": 1.0, NORM: math.nan}) for _ in range(OVERFLOWS)]
    assert found == [[]] * (OVERFLOWS - 1) + [[NORM]]


def test_skipped_steps_have_no_part_in_the_mean_norm():
    assert averages({"loss": 8.0, NORM: 6.0, SKIPPED: 1.0}, 4) == pytest.approx({"loss": 2.0, NORM: 2.0, SKIPPED: 0.25})
    assert averages({"loss": 8.0, NORM: 0.0, SKIPPED: 4.0}, 4) == {"loss": 2.0, SKIPPED: 1.0}
    assert averages({"loss": 8.0, NORM: 6.0}, 4) == {"loss": 2.0, NORM: 1.5}


def test_tensors_that_are_not_finite_are_named():
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan]), "c": torch.tensor([3]), "d": torch.empty(0)}
    assert not_finite(tensors) == ["b"] and not_finite({}) == []
