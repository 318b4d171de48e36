"""Which photos the explorer accepts."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.errors import MissingFileError, UserError
from e2e_vl.explorer.limits import Limits
from e2e_vl.explorer.session import read_photo


def write(path: Path, image: Image.Image, kind: str, **more) -> Path:
    stream = io.BytesIO()
    image.save(stream, kind, **more)
    path.write_bytes(stream.getvalue())
    return path


def test_jpeg_and_png_are_accepted_whatever_their_name(tmp_path):
    picture = Image.effect_noise((40, 20), 50).convert("RGB")
    for kind in ("JPEG", "PNG"):
        photo = read_photo(write(tmp_path / "photo.txt", picture, kind), Limits())
        assert photo.size == (20, 40)
        assert photo.pixels.dtype == np.uint8 and photo.pixels.shape[1] == 2 * photo.pixels.shape[0]
        assert photo.scale == pytest.approx([photo.pixels.shape[1] / 40] * 2)


def test_a_photo_is_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = write(tmp_path / "photo.jpg", Image.new("RGB", (40, 20)), "JPEG", exif=exif)
    assert read_photo(path, Limits()).size == (40, 20)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP"])
def test_other_formats_are_refused_whatever_their_name(tmp_path, kind):
    path = write(tmp_path / "photo.jpg", Image.new("RGB", (40, 20)), kind)
    with pytest.raises(ValueError, match=r"photo\.jpg is neither a JPEG nor a PNG file; convert it first\."):
        read_photo(path, Limits())


def test_large_and_damaged_photos_are_refused(tmp_path):
    path = write(tmp_path / "photo.png", Image.effect_noise((300, 200), 50), "PNG")
    with pytest.raises(ValueError, match=r"photo\.png has 0\.\d MB; the limit is 0\.01 MB"):
        read_photo(path, Limits(megabytes=0.01))
    with pytest.raises(ValueError, match=r"photo\.png has 300 x 200 pixels; the limit is 59999 pixels"):
        read_photo(path, Limits(megapixels=0.059999))
    assert read_photo(path, Limits(megapixels=0.06)).size == (200, 300)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"photo\.png is damaged or cut off"):
        read_photo(path, Limits())
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="neither a JPEG nor a PNG"):
        read_photo(path, Limits())


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_limits_are_positive(limit):
    with pytest.raises(ValueError, match=r"--max-megapixels is .*; it must be a positive number"):
        Limits(megapixels=limit)


def test_what_is_no_file_or_has_a_strange_name_is_said_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path, tmp_path / "none.png", tmp_path / "pipe.png"):
        with pytest.raises(MissingFileError, match=rf"{path.name} is no file; drop the photo again\."):
            read_photo(path, Limits())
    (tmp_path / "a\nb.png").write_bytes(b"\xff\xd8\xffjunk")
    with pytest.raises(UserError, match=r"a\\nb\.png is not a readable"):
        read_photo(tmp_path / "a\nb.png", Limits())
