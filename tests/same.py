"""Comparison of what two runs of one model say."""

from __future__ import annotations

from typing import Any

import pytest

RELATIVE, ABSOLUTE = 1e-5, 1e-6  # float32 has 7 digits; sums in another order lose one or two


def assert_same(one: Any, other: Any, where: str = "value") -> None:
    """Nested lists and dicts whose floats agree up to rounding, and whose other values are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}[{key!r}]")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same(first, second, f"{where}[{number}]")
    elif isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, rel=RELATIVE, abs=ABSOLUTE, nan_ok=True), where
    else:
        assert one == other, where
