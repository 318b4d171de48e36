"""Boxes of many records at once."""

from __future__ import annotations

from typing import Any

import pytest

from e2e_vl.data.storage.files import is_box, plain_boxes


def test_rows_of_numbers_are_boxes():
    boxes = plain_boxes([[1, 2.5, 3, 4], [0, -1, 2**60, 1e300]])
    assert boxes.dtype == "float64" and boxes.tolist() == [[1, 2.5, 3, 4], [0, -1, 2**60, 1e300]]
    assert plain_boxes([]).shape == (0, 4)


@pytest.mark.parametrize(
    "row",
    [
        *([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, True], [1, 2, 3, "4"], [1, 2, 3, None], [1, 2, 3, [4]]),
        *([1, 2, 3, float("nan")], [float("inf"), 2, 3, 4], "1234", {1: 0, 2: 0, 3: 0, 4: 0}, (1, 2, 3, 4), 5, None),
    ],
)
def test_one_row_that_is_no_box_is_found(row: Any):
    assert not is_box(row)
    assert plain_boxes([[1, 2, 3, 4], row]) is None and plain_boxes([row]) is None


def test_numbers_beyond_floats_are_left_to_who_looks_at_each():
    assert plain_boxes([[1, 2, 3, 10**400]]) is None
