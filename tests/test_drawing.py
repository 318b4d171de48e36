from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.drawing import LONGEST, SHORTEST, draw_boxes

RED, BLUE = (255, 0, 0), (0, 0, 255)


def is_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (picture == np.array(colour)).all(-1)


def test_box_is_drawn_around_its_pixels():
    image = np.zeros((480, 640, 3), dtype=np.uint8)
    picture = draw_boxes(image, [[100, 50, 201, 151]], colours=[RED])
    assert picture.shape == (480, 640, 3) and not image.any()
    rows, columns = is_colour(picture, RED).nonzero()
    assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (100, 50, 201, 151)
    assert not picture[60:140, 110:190].any()


@pytest.mark.parametrize(
    ("size", "expected"), [((30, 60), (240, 480)), ((3000, 4000), (960, 1280)), ((500, 600), (500, 600))]
)
def test_small_and_large_images(size: tuple[int, int], expected: tuple[int, int]):
    h, w = size
    picture = draw_boxes(np.zeros((h, w, 3), np.uint8), [[w / 2, h / 2, w, h]], ["there"], [RED])
    assert picture.shape[:2] == expected
    rows, columns = is_colour(picture, RED).nonzero()
    assert columns.max() == expected[1] - 1 and rows.max() == expected[0] - 1
    assert abs(columns.min() - expected[1] / 2) <= 1


@pytest.mark.parametrize("size", [(2, 3000), (3000, 2), (1, 1)])
def test_thin_images_get_a_margin(size: tuple[int, int]):
    picture = draw_boxes(np.zeros((*size, 3), np.uint8), [[0, 0, size[1], size[0]]], ["thin 0.50"], [RED])
    assert min(picture.shape[:2]) >= 100
    assert SHORTEST <= max(picture.shape[:2]) <= LONGEST
    assert is_colour(picture, RED).any()


def test_labels_stay_inside_and_the_first_box_is_on_top():
    image = np.zeros((480, 640, 3), dtype=np.uint8)
    boxes = [[600, 0, 640, 20], [600, 0, 640, 20]]
    plain = draw_boxes(image, boxes, colours=[RED, BLUE])
    assert is_colour(plain, RED).any() and not is_colour(plain, BLUE).any()
    labelled = draw_boxes(image, boxes[:1], ["a long label 0.99"], [RED])
    assert is_colour(labelled, RED).sum() > is_colour(plain, RED).sum()
    assert is_colour(labelled, RED)[:, :560].any()  # it was moved left to fit


def test_title_is_above_the_picture():
    image = np.zeros((480, 640, 3), dtype=np.uint8)
    without = draw_boxes(image, [])
    short = draw_boxes(image, [], title="a short one")
    long = draw_boxes(image, [], title="a very long one " * 20)
    assert np.array_equal(without, image)
    assert without.shape[0] < short.shape[0] < long.shape[0]
    assert np.array_equal(short[-480:], image)


def test_numbers_must_agree():
    with pytest.raises(ValueError, match="1 boxes, 2 labels"):
        draw_boxes(np.zeros((10, 10, 3), np.uint8), [[0, 0, 5, 5]], ["a", "b"])
