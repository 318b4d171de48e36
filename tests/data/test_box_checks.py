"""Normalised boxes, and corners where [x, y, width, height] are expected."""

import logging

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.data.box_checks import are_normalised, check_file_boxes, look_like_corners, reach_outside

NORMALISED = [[0.1, 0.2, 0.5, 0.6], [0, 0, 1, 1]]
SIZE = (640, 480)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        (NORMALISED, True),
        ([[0.1, 0.2, 0.6, 0.8]], True),
        ([[-0.01, 0.2, 1.02, 0.9]], True),  # predicted, not clipped
        ([[0.1, 0.2, 1.0, 1.1]], True),  # corners 0.1, 0.2, 0.9, 0.9 that were read as x, y, width, height
        ([[0, 0, 1, 1]], False),  # perhaps the first pixel
        ([[12.4, 7.5, 13.1, 8.2]], False),  # a tiny object, as in COCO
        ([*NORMALISED, [3, 4, 30, 40]], False),
        ([[np.nan, 0.2, 0.5, 0.6]], False),
        (np.zeros((3, 4)), False),  # padding
        (np.zeros((0, 4)), False),
    ],
)
def test_normalised_boxes_are_recognised(boxes, expected):
    assert are_normalised(np.array(boxes)) is expected


def test_a_file_of_normalised_boxes_is_refused():
    with pytest.raises(UserError, match=r"boxes\.json: the boxes are normalised .* pixels"):
        check_file_boxes(np.array(NORMALISED), np.array([SIZE, SIZE]), [1, 2], "boxes.json")


def corners_as_sides(boxes: list[list[float]]) -> np.ndarray:
    """What a reader of [x, y, width, height] makes of corners."""
    boxes = np.array(boxes, dtype=float)
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


GOOD = [[10, 20, 60, 70]] * 99


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        (GOOD, None),
        ([*GOOD, [600, 20, 660, 70]], None),  # one of a hundred
        ([*GOOD[1:], [600, 20, 660, 70], [600, 20, 660, 70]], "2 of 100 boxes reach outside"),
        (corners_as_sides([[10, 20, 60, 70], [500, 20, 600, 70]]), "look like corners"),
        ([*GOOD, [0.1, 0.2, 0.5, 0.6]], "all boxes of 1 images lie in their first pixels, such as those of image 99"),
        ([*GOOD, [12.4, 7.5, 13.1, 8.2]], None),
        (np.zeros((0, 4)), None),
    ],
)
def test_suspicious_boxes_of_a_file_cause_one_warning(boxes, expected, caplog, tmp_path):
    boxes = np.array(boxes, dtype=float)
    where = str(tmp_path / "boxes.json")
    with caplog.at_level(logging.WARNING):
        for _ in ("train", "val"):  # one file of two splits
            check_file_boxes(boxes, np.array([SIZE] * len(boxes)).reshape(-1, 2), range(len(boxes)), where)
    if expected is None:
        assert not caplog.records
    else:
        [record] = caplog.records
        assert expected in record.getMessage() and "boxes.json" in record.getMessage()


def test_corners_are_recognised_by_their_order_and_by_their_image():
    assert look_like_corners(corners_as_sides([[500, 20, 600, 70]]), SIZE)
    assert not look_like_corners(np.array([[500, 20, 700, 70]]), SIZE), "its width is less than its x"
    assert reach_outside(np.array([[-1, 0, 641, 481], [-2, 0, 5, 5], [0, 0, 642, 5]]), SIZE).tolist() == [0, 1, 1]
