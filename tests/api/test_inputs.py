"""Images, boxes and choices in any form that users have them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detector.config import SelectionRule
from detector.errors import UserError
from detector.images import ResizeRule, decode_resized, load_image
from e2e_vl.api.inputs import as_answers, as_choices, as_lists, content_key, given_boxes, image_file, stamp_of

RULE = ResizeRule(40, 60)


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def pixels_of(image: object) -> np.ndarray:
    file = image_file(image)
    return decode_resized(file.content, file.name, RULE, "RGB")[0]


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
        found = decode_resized(image.content, image.name, ResizeRule(40, 60), "RGB")[0]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def test_modes_that_only_memory_has():
    values = np.linspace(0, 65535, 2400).reshape(40, 60)
    expected = np.repeat((values.astype(np.uint16) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    for image in (
        Image.fromarray(values.astype(np.int32)),
        Image.fromarray(values.astype(np.uint16)),
        Image.fromarray(values.astype(">u2")),
    ):
        assert image.mode.startswith("I")
        np.testing.assert_array_equal(pixels_of(image), expected)
    plain = np.asarray(picture())
    np.testing.assert_array_equal(pixels_of(picture("RGBX")), plain)
    for mode in ("HSV", "YCbCr", "CMYK"):
        np.testing.assert_allclose(pixels_of(picture(mode)), np.asarray(picture(mode).convert("RGB")))
    for mode in ("RGBa", "PA", "La"):
        source = picture("LA" if mode == "La" else "RGBA" if mode == "RGBa" else "P")
        assert pixels_of(source.convert(mode)).shape == (40, 60, 3)


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
        (lambda: picture("L").convert("F"), "floating-point pixels"),
        (lambda: Image.fromarray(np.full((4, 4), 70000, dtype=np.int32)), "32-bit pixels"),
        (lambda: Image.new("RGB", (0, 4)), "0 x 4 pixels"),
        (truncated, "cut off"),
        (lambda: np.zeros((4, 4), dtype=np.float32), "must be uint8"),
        (lambda: np.zeros((4, 4, 2), dtype=np.uint8), "must be uint8"),
        (lambda: np.zeros((0, 4), dtype=np.uint8), "must be uint8"),
        (lambda: 7, "not int"),
        (lambda: np.broadcast_to(np.zeros((1, 1, 3), dtype=np.uint8), (10**6, 10**6, 3)), "limit is 536870912 pixels"),
        (lambda: "a\0.jpg", "no file can have this name"),
        (lambda: "https://example.org/a.jpg", "an address and not a path"),
        (lambda: "~nobody-of-this-name/a.jpg", "before an unknown name"),
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
    before = stamp_of(tmp_path / "a.png")
    picture("L").save(tmp_path / "a.png")
    assert stamp_of(tmp_path / "a.png") != before and stamp_of(image_file(picture())) is None


@pytest.mark.parametrize(
    "boxes", [[1, 2, 30, 40], [[1, 2, 30, 40]], ((1, 2, 30, 40),), torch.tensor([[1, 2, 30, 40]]), "1,2,30,40"]
)
def test_forms_of_boxes(boxes):
    found = given_boxes(boxes, "boxes")
    assert found.boxes.tolist() == [[1, 2, 30, 40]] and found.boxes.dtype == np.float64


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([], "at least one row"),
        (np.zeros((0, 4)), "at least one row"),
        ([[1, 2, 3, 4, 0.5, 6]], r"not \[1, 6\]"),
        ([1, 2, 3, 4, 5, 6, 7, 8], r"not \[8\]"),
        ([[[1, 2, 3, 4]], [[5, 6, 7, 8]]], r"not \[2, 1, 4\]: they hold for all questions"),
        ([[1, 2, 3, 4], [5, 6, 7]], r"must be numbers \[R, 4\]"),
        ([["a", 2, 3, 4]], r"must be numbers \[R, 4\]"),
        ([[1, 2, 1, 4]], "box 0"),
        ([[1, 2, float("nan"), 4]], "box 0"),
        ([[1, 2, 10**400, 4]], r"must be numbers \[R, 4\]"),
    ],
)
def test_what_is_no_box(boxes, message):
    with pytest.raises(ValueError, match=message) as error:
        given_boxes(boxes, "boxes")
    assert "\n" not in str(error.value)


def test_a_file_without_boxes(tmp_path):
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ValueError, match=r"none\.json: there is no box"):
        given_boxes(tmp_path / "none.json", "boxes")


def test_choices_of_all_and_of_each_question():
    assert as_choices((), 2) == as_choices(None, 2) == as_choices(np.array([]), 2) == [(), ()]
    assert as_choices(["a", "b"], 2) == as_choices(np.array(["a", "b"]), 2) == [("a", "b"), ("a", "b")]
    assert as_choices([["a"], ("b", "c")], 2) == [("a",), ("b", "c")]
    assert as_choices(np.array([["a", "b"]]), 1) == [("a", "b")]


@pytest.mark.parametrize(
    ("choices", "count", "message"),
    [
        ("abcd", 1, "must be a list of strings"),
        ([1, 2], 1, "must be a list of strings"),
        (["a", ["b"]], 2, "must be a list of strings"),
        ([["a"], ["b"]], 3, "2 lists for 3 questions"),
        ([["a"], ["b"]], 1, "2 lists for 1 questions"),
        ({"a": 1}, 1, "must be a list of strings"),
    ],
)
def test_bad_choices(choices, count, message):
    with pytest.raises(ValueError, match=message):
        as_choices(choices, count)


def test_answers_of_all_and_of_each_question():
    assert as_answers(None, 2) == [None, None] and as_answers("a", 2) == ["a", "a"]
    assert as_answers(["a", "b"], 2) == as_answers(np.array(["a", "b"]), 2) == ["a", "b"]
    for answer, count, message in (["a"], 2, "1 strings for 2"), ([1], 1, "must be a string"), (3, 1, "must be a str"):
        with pytest.raises(ValueError, match=message):
            as_answers(answer, count)


def test_an_empty_tuple_of_images():
    with pytest.raises(ValueError, match="tuple of images is empty"):
        as_lists((), "a text")


def test_an_opened_file_of_a_strange_format_is_not_read(tmp_path, monkeypatch):
    picture().save(tmp_path / "photo.eps")
    image = Image.open(tmp_path / "photo.eps")
    monkeypatch.setattr(type(image), "load", lambda self: pytest.fail("it would start a program"))
    with pytest.raises(ValueError, match=r"was opened from a file of the format EPS, which is not read here"):
        image_file(image)


def test_hostile_arrays_paths_and_boxes(tmp_path):
    endless = np.broadcast_to(np.zeros(3, np.uint8), (1 << 20, 1 << 20, 3))
    with pytest.raises(UserError, match=r"has 1048576 x 1048576 pixels; the limit is"):
        image_file(endless)
    for name in ("a\0b", "\ud800", "x" * 300, "~nobody-of-this-name", tmp_path / "loop"):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to("loop")
        for read in (image_file, lambda name: given_boxes(name, "boxes")):
            with pytest.raises(UserError, match=r"cannot be looked for .*; give another path"):
                read(name)
    with pytest.raises(UserError, match=r"boxes must be numbers \[R, 4\]"):
        given_boxes([[0, 0, 10**400, 5]], "boxes")


@pytest.mark.parametrize("value", [None, "x", float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["min_score", "min_regions", "max_regions"])
def test_numbers_of_regions(name, value):
    with pytest.raises(UserError, match=f"Selection rule: {name} .* must be a finite number"):
        SelectionRule(**{name: value})
