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

RULE = ResizeRule(40, 60)


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def pixels_of(image: object) -> np.ndarray:
    file = image_file(image)
    return load_resized(file.content, RULE, "RGB", file.name)[0]


FILES = {  # mode -> a file that holds it
    "1": "png",
    "L": "png",
    "LA": "png",
    "P": "png",
    "RGB": "png",
    "RGBA": "png",
    "CMYK": "tiff",
    "YCbCr": "tiff",
}


@pytest.mark.parametrize("mode", FILES)
def test_a_pil_image_is_what_its_file_is(tmp_path, mode):
    image = picture(mode)
    image.save(tmp_path / f"image.{FILES[mode]}")
    assert Image.open(tmp_path / f"image.{FILES[mode]}").mode == mode
    np.testing.assert_array_equal(pixels_of(image), load_image(tmp_path / f"image.{FILES[mode]}", "RGB"))


def test_transparent_palettes_and_rotated_photos_are_what_their_files_are(tmp_path):
    picture("P").save(tmp_path / "palette.png", transparency=3)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture().save(tmp_path / "rotated.png", exif=exif)
    picture().save(tmp_path / "damaged.jpg", exif=b"Exif\0\0no tags")
    for path in tmp_path.iterdir():
        expected = load_image(path, "RGB")
        image = image_file(Image.open(path))
        found = load_resized(image.content, RULE, "RGB", image.name)[0]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def test_modes_that_only_memory_has():
    values = np.linspace(0, 65535, 2400).reshape(40, 60).astype(np.uint16)
    expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(pixels_of(Image.fromarray(values)), expected)
    plain = np.asarray(picture())
    np.testing.assert_array_equal(pixels_of(picture("RGBX")), plain)
    for mode in ("HSV", "YCbCr", "CMYK"):
        np.testing.assert_allclose(pixels_of(picture(mode)), np.asarray(picture(mode).convert("RGB")))


def test_arrays_are_read_as_pil_reads_them():
    colours = np.asarray(picture())
    alpha = np.dstack([colours, np.full((40, 60), 7, dtype=np.uint8)])
    np.testing.assert_array_equal(pixels_of(colours), colours)
    np.testing.assert_array_equal(pixels_of(alpha), colours)
    np.testing.assert_array_equal(pixels_of(colours[:, :, 0]), np.repeat(colours[:, :, :1], 3, axis=2))


def truncated() -> Image.Image:
    stream = io.BytesIO()
    picture().save(stream, "PNG")
    return Image.open(io.BytesIO(stream.getvalue()[:2000]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: picture("L").convert("F"), "32-bit pixels"),
        (lambda: Image.fromarray(np.full((4, 4), 70000, dtype=np.int32)), "32-bit pixels"),
        (lambda: Image.new("RGB", (0, 4)), "closed, damaged or empty"),
        (truncated, "closed, damaged or empty"),
        (lambda: np.zeros((4, 4), dtype=np.float32), "must be uint8"),
        (lambda: np.zeros((4, 4, 2), dtype=np.uint8), "must be uint8"),
        (lambda: 7, "not int"),
        (lambda: "https://example.org/a.jpg", "an address and not a path"),
    ],
)
def test_bad_images_are_one_sentence(make, message):
    with pytest.raises(ValueError, match=message) as error:
        image_file(make())
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    "boxes", [[1, 2, 30, 40], [[1, 2, 30, 40]], ((1, 2, 30, 40),), torch.tensor([[1, 2, 30, 40]]), "1,2,30,40"]
)
def test_forms_of_boxes(boxes):
    found = given_boxes(boxes, "boxes")
    assert found.boxes.tolist() == [[1, 2, 30, 40]] and found.boxes.dtype == np.float64


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [[1, 2, 3, 4, 0.5, 6]],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [[[1, 2, 3, 4]], [[5, 6, 7, 8]]],
        [[1, 2, 3, 4], [5, 6, 7]],
        [["a", 2, 3, 4]],
        [[1, 2, 1, 4]],
        [[1, 2, float("nan"), 4]],
        [[1, 2, 10**400, 4]],
    ],
)
def test_what_is_no_box(boxes):
    with pytest.raises(UserError, match="boxes") as error:
        given_boxes(boxes, "boxes")
    assert "\n" not in str(error.value)


def test_a_file_without_boxes(tmp_path):
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ValueError, match=r"none\.json: there is no box"):
        given_boxes(tmp_path / "none.json", "boxes")


def test_one_value_for_all_questions_or_one_for_each():
    def is_text(value: object) -> bool:
        return isinstance(value, str)

    assert for_each_question("a", 2, is_text, "x") == ["a", "a"]
    assert (
        for_each_question(["a", "b"], 2, is_text, "x") == for_each_question(("a", "b"), 2, is_text, "x") == ["a", "b"]
    )
    for value, message in ((["a"], "each of the 2"), ([1, 2], "x, or a list"), (3, "x, or a list")):
        with pytest.raises(UserError, match=message):
            for_each_question(value, 2, is_text, "x")
