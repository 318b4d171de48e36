"""Images in any form that users have them: in memory, in files, at addresses; one or many."""

from __future__ import annotations

import base64
import collections
import functools
import http.server
import io
import sys
import threading
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detector.errors import UserError
from detector.images import ResizeRule, load_image, load_resized
from e2e_vl.data import user_images
from e2e_vl.data.user_images import expand_images, find_images, list_items, natural_key, to_image_file


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def pixels_of(image: object) -> np.ndarray:
    file = to_image_file(image)
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
    image = Image.open(file)
    image.load()
    before = (image.mode, dict(image.info))
    np.testing.assert_array_equal(pixels_of(image), load_image(tmp_path / "image", "RGB"))
    assert (image.mode, image.info) == before


def test_arrays_and_modes_that_only_memory_has():
    values = np.linspace(0, 65535, 2400).reshape(40, 60).astype(np.uint16)
    expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(pixels_of(Image.fromarray(values)), expected)
    np.testing.assert_array_equal(pixels_of(picture("HSV")), np.asarray(picture("HSV").convert("RGB")))
    colours = np.asarray(picture())
    alpha = np.dstack([colours, np.full((40, 60), 7, dtype=np.uint8)])
    first, floats = torch.tensor(colours).permute(2, 0, 1), colours.astype(np.float32) / 255
    for form in (colours, alpha, first, first.numpy(), first / 255, first[:, :, :3], floats, torch.tensor(floats)):
        pixels = np.asarray(Image.open(io.BytesIO(to_image_file(form).content)).convert("RGB"))
        np.testing.assert_array_equal(pixels, colours[:, : pixels.shape[1]])
    np.testing.assert_array_equal(pixels_of(values), expected)
    np.testing.assert_array_equal(pixels_of(Image.fromarray(values.astype(np.int32))), expected)
    for form in (colours.astype(np.int64), torch.tensor(colours).int(), (first / 255).requires_grad_()):
        np.testing.assert_array_equal(pixels_of(form), colours)
    np.testing.assert_array_equal(pixels_of(colours[:, :, 0] > 99)[..., 0], (colours[:, :, 0] > 99) * 255)
    for form in (colours[:, :, 0], colours[:, :, :1], first[:1], floats[:, :, 0]):
        np.testing.assert_array_equal(pixels_of(form), np.repeat(colours[:, :, :1], 3, axis=2))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (picture("L").convert("F"), "from 5 to 251; undo"),
        (np.full((4, 4), 7, dtype=np.uint16), "uint16 from 7 to 7"),
        (np.full((4, 4), -1), "int64 from -1 to -1"),
        (np.zeros((4, 4), dtype=complex), "not complex128"),
        (Image.new("RGB", (0, 0)), "cannot write empty"),
        (io.StringIO("text"), "in mode 'rb'"),
        ("", "neither a path"),
        ("a\0.jpg", "neither a path"),
        ("A" * 5000, "decode base64"),
        (b"", "is an empty file"),
        (b"<!DOCTYPE html><html>", "is an HTML page"),
        (np.full((4, 4, 3), 7, dtype=np.float32), "from 7 to 7; undo"),
        (torch.full((3, 4, 4), torch.nan), "from nan to nan; undo"),
        (np.zeros((2, 40, 60), dtype=np.uint8), r"not uint8 \[2, 40, 60\]"),
        (torch.zeros(1, 3, 40, 60), r"not torch.float32 \[1, 3, 40, 60\]"),
        (7, "not int"),
        (b"no image", "the bytes given"),
        (".", "is a folder; give one image"),
        ("file://photos/a.png", "names 'photos' as a machine"),
        ("file://[a/b.png", "is no file: URL"),
        ("gs://bucket/a.png", "is a URL, not a path"),
        ("https://127.0.0.1:1/a.png", "could not be fetched .*refused"),
    ],
)
def test_what_is_no_image(image, message):
    with pytest.raises(UserError, match=message):
        pixels_of(image)


def test_files_in_memory_and_addresses_without_a_network(tmp_path):
    content, path = saved(picture()).getvalue(), tmp_path / "a 1.png"
    path.write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", content)
    stream = io.BytesIO(content)
    stream.seek(len(content))
    with path.open("rb") as file, zipfile.ZipFile(tmp_path / "a.zip") as archive, archive.open("a.png") as member:
        forms = [file, member, zipfile.Path(archive, "a.png"), stream, bytearray(content), memoryview(content)]
        forms += [np.frombuffer(content, dtype=np.uint8), f"data:image/png;base64,{base64.b64encode(content).decode()}"]
        forms += [types.SimpleNamespace(content=content, url="https://example.org/a.png"), to_image_file(content)]
        for form in forms:
            assert to_image_file(form).content == content
    for form in (path, str(path), np.str_(path), path.as_uri()):
        assert to_image_file(form) == path


def test_heic_photos_need_a_package(monkeypatch):
    heic = b"\0\0\0\x18ftypheic" + bytes(50)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(UserError, match=r"is a HEIC photo, .* pip install pillow-heif, or convert"):
        pixels_of(heic)

    def register_heif_opener() -> None:
        monkeypatch.setitem(Image.OPEN, "HEIF", (lambda stream, name: picture(), None))
        monkeypatch.setattr(Image, "ID", [*Image.ID, "HEIF"])

    monkeypatch.setitem(sys.modules, "pillow_heif", types.SimpleNamespace(register_heif_opener=register_heif_opener))
    np.testing.assert_array_equal(pixels_of(heic), np.asarray(picture()))


# Many images


def test_many_images(tmp_path, caplog):
    for name in ("img10.png", "img2.png", "IMG1.jpg", "b/1.gif", "notes.txt", "._img1.jpg", ".x/1.jpg", "x [1]/a.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(images: object) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in expand_images(images)]

    everything = ["b/1.gif", "IMG1.jpg", "img2.png", "img10.png", "x [1]/a.heic"]
    assert names(tmp_path) == names(str(tmp_path)) == names(f"{tmp_path}/**") == everything
    assert "1 hidden image files" in caplog.text and ".x/1.jpg" in caplog.text
    assert names(f"{tmp_path}/img*") == ["img2.png", "img10.png"]
    assert names(f"{tmp_path}/x [1]/*") == ["x [1]/a.heic"]
    assert names(f"{tmp_path}/[ni]*") == ["img2.png", "img10.png"] and "notes.txt" in caplog.text
    assert names([f"{tmp_path}/b", tmp_path / "img2.png"]) == ["b/1.gif", "img2.png"]
    assert names(path for path in [tmp_path / "b"]) == names((tmp_path / "b").as_uri()) == ["b/1.gif"]
    assert names([[tmp_path / "b"], [tmp_path / "img2.png"]]) == ["b/1.gif", "img2.png"]
    assert [len(expand_images(np.zeros(shape))) for shape in ((2, 3, 5, 6), (1, 5, 6, 3))] == [2, 1]
    texts = ["a.png", "b.png"]
    assert expand_images(np.array(texts)) == texts == expand_images(dict.fromkeys(texts).keys())
    for image in (tmp_path / "img2.png", ("a", "b"), b"", np.zeros((5, 6, 3)), picture(), "https://a/*.png"):
        assert expand_images(image) is None
    assert find_images([f"{tmp_path}/b"]) == [tmp_path / "b/1.gif"]
    for source, message in (
        (f"{tmp_path}/zz*", "no file fits"),
        (f"{tmp_path}/*.txt", "no images"),
        ({"a"}, "no order"),
    ):
        with pytest.raises(UserError, match=message):
            expand_images(source)
    with pytest.raises(UserError, match="does not exist"):
        find_images(["no.png"])


def test_natural_order_compares_any_names():
    names = ["a", "a1", "1", "A2", "a10", "1a", "", "10", "²", "a1b10", "a1b9"]
    ordered = sorted((Path(name) for name in names), key=natural_key)
    assert [str(path) for path in ordered] == [".", "1", "1a", "10", "a", "a1", "a1b9", "a1b10", "A2", "a10", "²"]


def test_lists_of_any_type():
    for values in (
        ["a", "b"],
        ("a", "b"),
        iter("ab"),
        (letter for letter in "ab"),
        collections.deque("ab"),
        np.array(["a", "b"]),
    ):
        assert list_items(values) == ["a", "b"]
    for value in ("ab", b"ab", {"a": 1}, Path("a"), picture(), np.zeros((2, 2)), 3, None):
        assert list_items(value) is None


def test_an_image_at_an_address(tmp_path, monkeypatch):
    picture().save(tmp_path / "a.png")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        np.testing.assert_array_equal(pixels_of(f"{address}/a.png"), np.asarray(picture()))
        with pytest.raises(UserError, match=r"b\.png could not be fetched .*404"):
            to_image_file(f"{address}/b.png")
        monkeypatch.setattr(user_images, "MAX_DOWNLOAD", 1000)
        with pytest.raises(UserError, match=r"a\.png has more than"):
            to_image_file(f"{address}/a.png")
        server.shutdown()
