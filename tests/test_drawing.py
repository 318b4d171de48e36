from __future__ import annotations

import itertools

import numpy as np
import pytest

from e2e_vl.drawing import LONGEST, PALETTE, SHORTEST, choose_box_colours, draw_boxes

RED, BLUE = (255, 0, 0), (0, 0, 255)


def is_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (picture == np.array(colour)).all(-1)


def test_box_is_drawn_around_its_pixels_below_a_title():
    image = np.zeros((480, 640, 3), dtype=np.uint8)
    picture = draw_boxes(image, [[100, 50, 201, 151]], colours=[RED])
    assert picture.shape == (480, 640, 3) and not image.any()
    rows, columns = is_colour(picture, RED).nonzero()
    assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (100, 50, 201, 151)
    assert not picture[60:140, 110:190].any()
    titled = draw_boxes(image, [], title="a title")
    assert len(titled) > 480 and np.array_equal(titled[-480:], image)


@pytest.mark.parametrize(("size", "expected"), [((30, 60), (240, 480)), ((3000, 4000), (960, 1280))])
def test_small_and_large_images(size: tuple[int, int], expected: tuple[int, int]):
    h, w = size
    picture = draw_boxes(np.zeros((h, w, 3), np.uint8), [[w / 2, h / 2, w, h]], ["there"], [RED])
    assert picture.shape[:2] == expected
    rows, columns = is_colour(picture, RED).nonzero()
    assert columns.max() == expected[1] - 1 and rows.max() == expected[0] - 1
    assert abs(columns.min() - expected[1] / 2) <= 1
    thin = draw_boxes(np.zeros((2, 50 * w, 3), np.uint8), [[0, 0, 50 * w, 2]], ["thin 0.50"], [RED])
    assert len(thin) >= 100 and SHORTEST <= thin.shape[1] <= LONGEST, "with a margin"


def test_labels_stay_inside_and_the_first_box_is_on_top():
    image = np.zeros((480, 640, 3), dtype=np.uint8)
    boxes = [[600, 0, 640, 20], [600, 0, 640, 20]]
    plain = draw_boxes(image, boxes, colours=[RED, BLUE])
    assert is_colour(plain, RED).any() and not is_colour(plain, BLUE).any()
    labelled = draw_boxes(image, boxes[:1], ["a long label 0.99"], [RED])
    assert is_colour(labelled, RED).sum() > is_colour(plain, RED).sum()
    assert is_colour(labelled, RED)[:, :560].any()  # it was moved left to fit


def colours_of(number: int) -> list[tuple[int, int, int]]:
    return [(10 + row % 240, row // 240 + 1, 99) for row in range(number)]


@pytest.mark.parametrize(("size", "number"), [((480, 640), 40), ((600, 60), 30)])
def test_no_label_covers_another_and_none_is_left_out(size: tuple[int, int], number: int):
    """So many labels have the smallest font, and each is as large as one that stands alone in it."""
    x, y = size[1] * 0.4, size[0] * 0.4
    colours = colours_of(number)
    alone = draw_boxes(np.full((600, 60, 3), 255, np.uint8), [[9, 9, 9, 9]], ["elephant 0.98"], colours[:1])
    image = np.full((*size, 3), 255, np.uint8)
    picture = draw_boxes(image, [[x, y, x, y]] * number, ["elephant 0.98"] * number, colours)
    least = min(int(is_colour(picture, colour).sum()) for colour in colours)
    assert least >= int(is_colour(alone, colours[0]).sum()) - 1 > 500  # its box is one pixel


def test_labels_without_room_stand_below_the_image():
    labels, colours = [f"label {row}" for row in range(250)], colours_of(250)
    picture = draw_boxes(np.full((300, 480, 3), 255, np.uint8), [[0, 0, 480, 300]] * 250, labels, colours)
    assert picture.shape[0] > 300 and picture.shape[1] == 480
    assert all(is_colour(picture, colour).any() for colour in colours)


def test_words_that_are_wider_than_the_picture_are_broken():
    image = np.full((480, 480, 3), 255, np.uint8)
    title = draw_boxes(image, [], title="W" * 200)
    header = title[:-480]
    assert len(header) > 3 * 12
    assert (header[:, -2:] == 255).all()  # nothing is cut off
    label = draw_boxes(image, [[0, 200, 10, 210]], ["W" * 200], [RED])
    rows, columns = is_colour(label, RED).nonzero()
    assert columns.max() < 480 and rows.max() - rows.min() > 3 * 12
    assert is_colour(label, RED)[rows.min() : rows.max(), columns.max() - 1].mean() > 0.8  # its own edge is seen


def test_a_dashed_box_has_the_same_corners_and_about_half_of_the_outline():
    image, box = np.zeros((480, 640, 3), dtype=np.uint8), [[100, 50, 301, 251]]
    whole, dashed = (is_colour(draw_boxes(image, box, colours=[RED], dashed=[flag]), RED) for flag in (False, True))
    assert not (dashed & ~whole).any() and dashed[50, 100]
    assert 0.4 < dashed.sum() / whole.sum() < 0.65
    sides = (dashed[50], dashed[250], dashed[:, 100], dashed[:, 300])
    assert all(60 < side.sum() < 140 for side in sides), "of 201 pixels of each side"


def test_no_phrase_has_the_colour_of_the_answer():
    count = 2 * len(PALETTE) + 3
    for answers in (0, 1, 3):
        colours = choose_box_colours(answers, count)
        assert len(colours) == answers + count and PALETTE[0] not in colours[answers:]
        assert colours[:answers] == list(PALETTE[:answers])
        assert all(one != other for one, other in itertools.pairwise(colours))
    assert choose_box_colours(1, 7) == list(PALETTE), "as without phrases"
