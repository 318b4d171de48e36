from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from e2e_vl.transforms import ImageTransform, LoadedImage

TWICE = ImageTransform(original_size=(40, 50), size=(80, 100))
SAME = ImageTransform(original_size=(40, 50), size=(40, 50))
MIRRORED = ImageTransform(original_size=(40, 50), size=(80, 100), flipped=True)
STRETCHED = ImageTransform(original_size=(40, 50), size=(80, 150))


def test_boxes_are_scaled_and_flipped_on_the_last_pixel():
    np.testing.assert_array_equal(TWICE.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[2, 4, 22, 45]])
    np.testing.assert_array_equal(MIRRORED.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[99 - 22, 4, 99 - 2, 45]])


def test_width_and_height_have_scales_of_their_own():
    boxes = np.array([[1, 2, 11, 22.5]])
    np.testing.assert_array_equal(STRETCHED.transform_boxes(boxes), [[3, 4, 33, 45]])
    np.testing.assert_array_equal(STRETCHED.transform_objects(boxes), [[3, 4, 33, 45]])


@pytest.mark.parametrize(
    ("transform", "boxes", "expected"),
    [
        (MIRRORED, [[0, 0, 50, 40], [-3, -4, 10, 99]], [[0, 0, 99, 79], [79, 0, 99, 79]]),
        (SAME, [[49, 39, 50, 40], [49.5, 0, 50, 40]], [[48, 38, 49, 39], [48, 0, 49, 39]]),
        (SAME, [[-5, 0, 0.25, 1]], [[0, 0, 0.25, 1]]),
        (dataclasses.replace(SAME, flipped=True), [[49.5, 0, 50, 9]], [[0, 0, 1, 9]]),
        (ImageTransform((1, 1), (1, 1)), [[0, 0, 1, 1]], [[0, 0, 1, 1]]),
    ],
)
def test_boxes_are_clamped_to_the_last_pixel_and_keep_an_area(transform, boxes, expected):
    found = transform.transform_and_clamp_boxes(np.array(boxes), "x")
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32


def test_referred_boxes_are_clamped_as_they_are():
    """As in VL-BERT's official data set of RefCOCO+: a box at the last pixel may be empty."""
    boxes = np.array([[-3, 2, 50, 22.5], [49.5, 0, 50, 40]])
    found = TWICE.transform_referred_boxes(boxes)
    np.testing.assert_array_equal(found, np.array([[0, 4, 99, 45], [99, 0, 99, 79]], np.float32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(MIRRORED.transform_referred_boxes(boxes)[0], [0, 4, 99, 45])


@pytest.mark.parametrize("box", [[50, 0, 60, 10], [0, 40, 5, 60], [-9, 0, 0, 10], [0, -9, 5, 0]])
def test_a_box_outside_the_image_is_an_error(box):
    with pytest.raises(ValueError, match=r"dets\.json: image 7: box 1 "):
        TWICE.transform_and_clamp_boxes(np.array([[0, 0, 5, 5], box]), "dets.json: image 7")


def test_targets_of_the_detector_are_mirrored_on_the_border_and_clipped():
    """x' = width - x as in Detectron2, so both borders stay on the edges of the object's pixels."""
    boxes = np.array([[1, 2, 11, 22.5], [-3, -4, 60, 99]])
    np.testing.assert_array_equal(TWICE.transform_objects(boxes), [[2, 4, 22, 45], [0, 0, 100, 80]])
    np.testing.assert_array_equal(MIRRORED.transform_objects(boxes), [[78, 4, 98, 45], [0, 0, 100, 80]])
    assert MIRRORED.transform_objects(boxes).dtype == np.float32


def test_without_boxes_nothing_about_the_boxes_is_left():
    rows = {"boxes": (2, 4), "class_probs": (2, 3), "roi_masks": (2, 7, 7), "features": (2, 5)}
    arrays = {name: np.ones(shape, dtype=np.float32) for name, shape in rows.items()}
    pixels, whole = np.zeros((4, 6, 3), dtype=np.uint8), np.ones(5, dtype=np.float32)
    arrays["box_classes"], rows["box_classes"] = np.array([0, 1]), (2,)
    image = LoadedImage(pixels, TWICE, "photo", **arrays, box_ids=(1, 2), image_feature=whole)
    emptied = image.without_boxes()
    assert all(getattr(emptied, name).shape == (0, *shape[1:]) for name, shape in rows.items())
    assert emptied.box_ids is None and emptied.image_feature is whole
    assert len(image.boxes) == 2, "the image itself stays as it is"
    proposed = LoadedImage(pixels, TWICE, "photo")
    assert proposed.without_boxes() is proposed
