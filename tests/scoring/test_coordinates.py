"""The scale of boxes is found from where they lie, and only if one scale alone fits."""

from __future__ import annotations

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.scoring.coordinates import choose_scale, fitting_scales, require_upright, to_corners, to_pixels


def draw(last: float | None, number: int = 200, size: tuple[int, int] = (480, 640)) -> tuple[np.ndarray, np.ndarray]:
    """Boxes all over their images, as shares of them times `last`, or in pixels; and (height, width) of each image."""
    generator = np.random.default_rng(0)
    points = np.sort(generator.uniform(0, 1, (number, 2, 2)), axis=1).reshape(-1, 4)
    points[0] = [0, 0, 1, 1]
    sizes = np.tile(size, (number, 1))
    return points * (np.tile(sizes[:, ::-1], 2) if last is None else last), sizes


@pytest.mark.parametrize(
    ("last", "scales"),
    [
        (None, ["pixels"]),
        (1.0, ["0-1"]),
        (1000.0, ["0-1000"]),
        (999.0, ["0-999", "0-1000"]),
        (100.0, ["pixels", "0-100"]),
        (5000.0, []),
    ],
)
def test_scales_that_explain_all_boxes(last, scales):
    assert fitting_scales(*draw(last)) == scales


def test_few_boxes_and_large_images_do_not_tell_pixels_from_thousandths():
    boxes, sizes = draw(None)
    assert fitting_scales(boxes[1:11], sizes[1:11]) == ["pixels", "0-999", "0-1000"]
    assert fitting_scales(*draw(1000.0, size=(2000, 3000))) == ["pixels", "0-1000"]
    assert fitting_scales(np.zeros((0, 4)), np.zeros((0, 2))) == []


def test_one_per_cent_of_nonsense_and_pixels_of_a_resized_image_do_not_matter():
    boxes, sizes = draw(1000.0)
    boxes[5] = [2, 311, 99_999, 98]
    assert fitting_scales(boxes, sizes) == ["0-1000"]
    boxes, sizes = draw(None)
    assert fitting_scales(boxes * (644 / 640), sizes) == ["pixels"]


def test_a_format_is_believed_unless_the_boxes_contradict_it():
    for last in (None, 100.0):
        assert choose_scale(*draw(last), True, "f.json") == "pixels"
    for last in (1.0, 1000.0):
        with pytest.raises(UserError, match="not in pixels"):
            choose_scale(*draw(last), True, "f.json")
    assert choose_scale(*draw(1.0), False, "f.json") == "0-1"
    with pytest.raises(UserError, match=r"f.json: .*0-999 or 0-1000"):
        choose_scale(*draw(999.0), False, "f.json")
    with pytest.raises(UserError, match="fit no scale"):
        choose_scale(*draw(5000.0), False, "f.json")


def test_corners_and_pixels():
    assert to_corners([[1, 2, 3, 4]], "xywh").tolist() == [[1, 2, 4, 6]]
    assert to_pixels(np.array([[0, 500, 1000, 250]]), np.array([[80, 40]]), "0-1000").tolist() == [[0, 40, 40, 20]]
    require_upright(np.array([[0, 0, 1, 1]] * 9 + [[1, 0, 0, 1]]), "xyxy", "f.json")
    with pytest.raises(UserError, match="1 of 1 boxes end before they begin"):
        require_upright(np.array([[1, 0, 0, 1]]), "xyxy", "f.json")
