"""Images, boxes and choices in any form that users have them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detector.errors import UserError
from detector.images import ResizeRule, load_image, load_resized
from e2e_vl.api.inputs import content_key, for_each_question, given_boxes, image_file


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def pixels_of(image: object) -> np.ndarray:
    file = image_file(image)
    return load_resized(file.content, ResizeRule(40, 60), "RGB", file.name)[0]


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream


ROTATED = Image.Exif()
ROTATED[0x0112] = 6


@pytest.mark.parametrize(
    "file",
    [
        *(saved(picture(mode)) for mode in ("1", "L", "LA", "RGBA")),
        *(saved(picture(mode), "TIFF") for mode in ("CMYK", "YCbCr")),
        saved(picture("P"), transparency=3),
        saved(picture(), exif=ROTATED),
        saved(picture(), "JPEG", exif=b"Exif\0\0no tags"),
    ],
)
def test_a_pil_image_has_the_pixels_of_its_file(file, tmp_path):
    (tmp_path / "image").write_bytes(file.getvalue())
    image = image_file(Image.open(file))
    expected = load_image(tmp_path / "image", "RGB")
    found = load_resized(image.content, ResizeRule(40, 60), "RGB", image.name)[0]
    np.testing.assert_array_equal(found, expected)


def test_arrays_and_modes_that_only_memory_has():
    values = np.linspace(0, 65535, 2400).reshape(40, 60).astype(np.uint16)
    expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(pixels_of(Image.fromarray(values)), expected)
    np.testing.assert_array_equal(pixels_of(picture("HSV")), np.asarray(picture("HSV").convert("RGB")))
    colours = np.asarray(picture())
    alpha = np.dstack([colours, np.full((40, 60), 7, dtype=np.uint8)])
    np.testing.assert_array_equal(pixels_of(colours), colours)
    np.testing.assert_array_equal(pixels_of(alpha), colours)
    np.testing.assert_array_equal(pixels_of(colours[:, :, 0]), np.repeat(colours[:, :, :1], 3, axis=2))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (picture("L").convert("F"), "not Image"),
        (np.zeros((4, 4), dtype=np.float32), r"not float32 \[4, 4\]"),
        (np.zeros((3, 40, 60), dtype=np.uint8), r"not uint8 \[3, 40, 60\]"),
        (7, "not int"),
    ],
)
def test_what_is_no_image(image, message):
    with pytest.raises(UserError, match=message):
        image_file(image)


def test_the_users_image_stays_as_it_is():
    image = picture("P")
    image.info["transparency"] = 3
    image_file(image)
    assert image.info == {"transparency": 3} and image.mode == "P"


def test_one_image_has_one_key(tmp_path, monkeypatch):
    picture().save(tmp_path / "a.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    names = (tmp_path / "a.png", "a.png", Path("./a.png"), tmp_path / "link.png")
    assert len({content_key(image_file(name)) for name in names}) == 1
    assert content_key(image_file(picture())) == content_key(image_file(np.asarray(picture())))
    assert content_key(image_file(picture())) != content_key(image_file(picture("L")))


def test_forms_of_boxes():
    for boxes in ([1, 2, 30, 40], ((1, 2, 30, 40),), torch.tensor([[1, 2, 30, 40]]), "1,2,30,40"):
        assert given_boxes(boxes).boxes.tolist() == [[1, 2, 30, 40]]
    for boxes in ([], [[1, 2, 3, 4, 0.5, 6]], [[1, 2, 1, 4]], [[1, 2, np.nan, 4]]):
        with pytest.raises(UserError, match="boxes"):
            given_boxes(boxes)


def test_one_value_for_all_questions_or_one_for_each():
    def is_text(value: object) -> bool:
        return isinstance(value, str)

    assert for_each_question("a", 2, is_text, "x") == ["a", "a"]
    assert for_each_question(("a", "b"), 2, is_text, "x") == ["a", "b"]
    for value in (["a"], [1, 2], 3):
        with pytest.raises(UserError, match="one for each of the 2 questions"):
            for_each_question(value, 2, is_text, "x")
