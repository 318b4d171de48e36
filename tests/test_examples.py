from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.examples import ImageExample, ImageTransform

TWICE = ImageTransform(original_size=(40, 50), size=(80, 100))
MIRRORED = ImageTransform(original_size=(40, 50), size=(80, 100), flipped=True)


def test_boxes_are_scaled_and_flipped_on_the_last_pixel():
    np.testing.assert_array_equal(TWICE.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[2, 4, 22, 45]])
    np.testing.assert_array_equal(MIRRORED.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[99 - 22, 4, 99 - 2, 45]])


def test_height_and_width_have_their_own_factors():
    image_transform = ImageTransform(original_size=(10, 30), size=(20, 90))
    np.testing.assert_array_equal(image_transform.transform_boxes(np.array([[1, 1, 2, 2]])), [[3, 2, 6, 4]])


def test_clamping_goes_to_the_last_pixel_after_resize_and_flip():
    whole = np.array([[0, 0, 50, 40], [-3, -4, 10, 99]])
    np.testing.assert_array_equal(TWICE.transform_and_clamp_boxes(whole, "x"), [[0, 0, 99, 79], [0, 0, 20, 79]])
    np.testing.assert_array_equal(MIRRORED.transform_and_clamp_boxes(whole, "x"), [[0, 0, 99, 79], [79, 0, 99, 79]])
    assert TWICE.transform_and_clamp_boxes(whole, "x").dtype == np.float32


def test_a_box_on_the_last_pixel_keeps_an_area():
    same = ImageTransform(original_size=(40, 50), size=(40, 50))
    boxes = same.transform_and_clamp_boxes(np.array([[49, 39, 50, 40], [49.5, 0, 50, 40], [-5, 0, 0.25, 1]]), "x")
    np.testing.assert_array_equal(boxes, [[48, 38, 49, 39], [48, 0, 49, 39], [0, 0, 0.25, 1]])
    flipped = ImageTransform((40, 50), (40, 50), flipped=True).transform_and_clamp_boxes(
        np.array([[49.5, 0, 50, 9]]), "x"
    )
    np.testing.assert_array_equal(flipped, [[0, 0, 1, 9]])
    tiny = ImageTransform((1, 1), (1, 1)).transform_and_clamp_boxes(np.array([[0, 0, 1, 1]]), "x")
    np.testing.assert_array_equal(tiny, [[0, 0, 1, 1]])


@pytest.mark.parametrize("box", [[50, 0, 60, 10], [0, 40, 5, 60], [-9, 0, 0, 10], [0, -9, 5, 0]])
def test_a_box_outside_the_image_is_an_error(box):
    with pytest.raises(ValueError, match=r"dets\.json: image 7: box 1 .* lies outside the 50 x 40 image"):
        TWICE.transform_and_clamp_boxes(np.array([[0, 0, 5, 5], box]), "dets.json: image 7")


def test_no_boxes_stay_no_boxes():
    assert TWICE.transform_and_clamp_boxes(np.zeros((0, 4)), "x").shape == (0, 4)
    assert TWICE.transform_objects(np.zeros((0, 4))).shape == (0, 4)


def test_targets_of_the_detector_are_mirrored_on_the_border_and_clipped():
    """x' = width - x as in Detectron2, so both borders stay on the edges of the object's pixels."""
    boxes = np.array([[1, 2, 11, 22.5], [-3, -4, 60, 99]])
    np.testing.assert_array_equal(TWICE.transform_objects(boxes), [[2, 4, 22, 45], [0, 0, 100, 80]])
    np.testing.assert_array_equal(MIRRORED.transform_objects(boxes), [[78, 4, 98, 45], [0, 0, 100, 80]])
    assert MIRRORED.transform_objects(boxes).dtype == np.float32


def test_without_boxes_nothing_about_the_boxes_is_left():
    image = ImageExample(
        np.zeros((4, 6, 3), dtype=np.uint8),
        TWICE,
        "photo",
        boxes=np.ones((2, 4), dtype=np.float32),
        box_ids=(1, 2),
        box_classes=np.array([0, 1]),
        class_probs=np.ones((2, 3), dtype=np.float32),
        roi_masks=np.ones((2, 7, 7), dtype=np.float32),
        features=np.ones((2, 5), dtype=np.float32),
        image_feature=np.ones(5, dtype=np.float32),
    )
    emptied = image.without_boxes()
    shapes = [rows.shape for rows in (emptied.boxes, emptied.box_classes, emptied.class_probs, emptied.features)]
    assert shapes == [(0, 4), (0,), (0, 3), (0, 5)]
    assert emptied.roi_masks.shape == (0, 7, 7)
    assert emptied.box_ids is None and emptied.image_feature is image.image_feature
    assert len(image.boxes) == 2, "the image itself stays as it is"
    proposed = ImageExample(image.pixels, TWICE, "photo")
    assert proposed.without_boxes() is proposed
