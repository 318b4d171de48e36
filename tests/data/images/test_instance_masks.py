from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.data.image_loader import instance_mask


def picture(mask: np.ndarray) -> list[str]:
    return ["".join("#" if value else "." for value in row) for row in mask]


def test_grid_points_on_the_outline_count():
    """A box of 13 x 13 pixels has a grid point per pixel: coordinates are multiplied by 14 / (13 + 1)."""
    square = np.array([[2, 1], [5, 1], [5, 3], [2, 3]])
    mask = instance_mask([square], np.array([0, 0, 13, 13]))
    assert mask.shape == (14, 14)
    assert mask.dtype == np.float32
    assert (np.argwhere(mask).min(0).tolist(), np.argwhere(mask).max(0).tolist()) == ([1, 2], [3, 5])
    assert mask.sum() == 3 * 4


def test_a_slanted_outline():
    """As `skimage.draw.polygon` draws it."""
    triangle = np.array([[0, 0], [5.5, 0.2], [0.3, 5]])
    mask = instance_mask([triangle], np.array([0, 0, 5, 5]), side=6)
    assert picture(mask) == ["#.....", ".####.", ".###..", ".##...", ".#....", "......"]


def test_points_outside_of_the_box_are_moved_onto_its_edge():
    outline = np.array([[-50, -50], [50, -50], [50, 50], [-50, 50]])
    assert instance_mask([outline], np.array([10, 10, 20, 20])).all()


def test_several_outlines_are_joined_and_none_is_empty():
    left, right = ([[x, 0], [x + 1, 0], [x + 1, 13], [x, 13]] for x in (0, 9))
    mask = instance_mask([np.array(left), np.array(right)], np.array([0, 0, 13, 13]))
    assert picture(mask)[0] == "##.......##..."
    assert not instance_mask([], np.array([0, 0, 13, 13])).any()


def test_the_hole_of_a_crossing_outline():
    """Where an outline runs around a point twice, the point is outside: the even-odd rule."""
    twice = np.array([[1, 1], [11, 1], [11, 11], [1, 11], [1, 1], [4, 4], [8, 4], [8, 8], [4, 8], [4, 4]])
    mask = instance_mask([twice], np.array([0, 0, 13, 13]))
    assert mask[2, 2] and not mask[6, 6]


@pytest.mark.parametrize("points", [[[3, 3]], [[3, 3], [6, 3]]])
def test_outlines_without_area(points):
    mask = instance_mask([np.array(points)], np.array([0, 0, 13, 13]))
    assert np.argwhere(mask)[:, ::-1].min(0).tolist() == [3, 3]
    assert np.argwhere(mask)[:, ::-1].max(0).tolist() == points[-1]


def test_centres_of_cells():
    """A triangle over half of its box, boxes, and an outline that runs round twice."""
    triangle = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    mask = instance_mask([triangle], np.array([0, 0, 4, 4]), side=4, at="centres")
    inside = np.add.outer(np.arange(4), np.arange(4)) < 3  # the centres of the diagonal lie on the outline
    np.testing.assert_array_equal(mask.astype(bool)[inside], True)
    np.testing.assert_array_equal(mask[np.add.outer(np.arange(4), np.arange(4)) > 3], 0)
    whole = np.array([[10.0, 20.0], [18.0, 20.0], [18.0, 24.0], [10.0, 24.0]])
    assert instance_mask([whole], np.array([10, 20, 18, 24]), at="centres").all()
    left = instance_mask([whole - [4, 0]], np.array([10, 20, 18, 24]), side=4, at="centres")
    np.testing.assert_array_equal(left, [[1, 1, 0, 0]] * 4)
    twice = np.concatenate([whole, whole])
    assert not instance_mask([twice], np.array([10, 20, 18, 24]), at="centres").any()  # even-odd
    assert not instance_mask([], np.array([0, 0, 4, 4]), at="centres").any()
