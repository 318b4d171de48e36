from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from detector.images import ResizeRule
from e2e_vl.data.images import Placement, read_image

TWICE = Placement(original_size=(40, 50), size=(80, 100))
MIRRORED = Placement(original_size=(40, 50), size=(80, 100), flipped=True)


def test_boxes_are_scaled_and_flipped_on_the_last_pixel():
    np.testing.assert_array_equal(TWICE.move_boxes(np.array([[1, 2, 11, 22.5]])), [[2, 4, 22, 45]])
    np.testing.assert_array_equal(MIRRORED.move_boxes(np.array([[1, 2, 11, 22.5]])), [[99 - 22, 4, 99 - 2, 45]])


def test_height_and_width_have_their_own_factors():
    placement = Placement(original_size=(10, 30), size=(20, 90))
    np.testing.assert_array_equal(placement.move_boxes(np.array([[1, 1, 2, 2]])), [[3, 2, 6, 4]])


def test_clamping_goes_to_the_last_pixel_after_resize_and_flip():
    whole = np.array([[0, 0, 50, 40], [-3, -4, 10, 99]])
    np.testing.assert_array_equal(TWICE.move_and_clamp_boxes(whole, "x"), [[0, 0, 99, 79], [0, 0, 20, 79]])
    np.testing.assert_array_equal(MIRRORED.move_and_clamp_boxes(whole, "x"), [[0, 0, 99, 79], [79, 0, 99, 79]])
    assert TWICE.move_and_clamp_boxes(whole, "x").dtype == np.float32


def test_a_box_on_the_last_pixel_keeps_an_area():
    same = Placement(original_size=(40, 50), size=(40, 50))
    boxes = same.move_and_clamp_boxes(np.array([[49, 39, 50, 40], [49.5, 0, 50, 40], [-5, 0, 0.25, 1]]), "x")
    np.testing.assert_array_equal(boxes, [[48, 38, 49, 39], [48, 0, 49, 39], [0, 0, 0.25, 1]])
    flipped = Placement((40, 50), (40, 50), flipped=True).move_and_clamp_boxes(np.array([[49.5, 0, 50, 9]]), "x")
    np.testing.assert_array_equal(flipped, [[0, 0, 1, 9]])
    tiny = Placement((1, 1), (1, 1)).move_and_clamp_boxes(np.array([[0, 0, 1, 1]]), "x")
    np.testing.assert_array_equal(tiny, [[0, 0, 1, 1]])


@pytest.mark.parametrize("box", [[50, 0, 60, 10], [0, 40, 5, 60], [-9, 0, 0, 10], [0, -9, 5, 0]])
def test_a_box_outside_the_image_is_an_error(box):
    with pytest.raises(ValueError, match=r"dets\.json: image 7: box 1 .* lies outside the 50 x 40 image"):
        TWICE.move_and_clamp_boxes(np.array([[0, 0, 5, 5], box]), "dets.json: image 7")


def test_no_boxes_stay_no_boxes():
    assert TWICE.move_and_clamp_boxes(np.zeros((0, 4)), "x").shape == (0, 4)


def test_pixels_are_resized_flipped_and_ordered(tmp_path):
    pixels = np.zeros((4, 8, 3), dtype=np.uint8)
    pixels[:, :4] = (250, 100, 10)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    rule = ResizeRule(short_edge=8, long_edge=100)
    image, placement = read_image(tmp_path / "a.png", (4, 8), rule)
    assert image.shape == (8, 16, 3)
    assert placement == Placement((4, 8), (8, 16), False)
    np.testing.assert_array_equal(image[0, 0], [10, 100, 250])
    mirrored, placement = read_image(tmp_path / "a.png", (4, 8), rule, flip=True, channel_order="RGB")
    assert placement.flipped
    np.testing.assert_array_equal(mirrored[:, ::-1, ::-1], image)


def test_missing_file_and_other_size_are_named(tmp_path):
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match=r"b\.png: the file of image 5 is missing"):
        read_image(tmp_path / "b.png", (4, 8), ResizeRule(), name="image 5")
    with pytest.raises(ValueError, match=r"a\.png: image 5 is 8 x 4 pixels, but its annotation file says 4 x 8"):
        read_image(tmp_path / "a.png", (8, 4), ResizeRule(), name="image 5")
