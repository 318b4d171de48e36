from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.file_kinds import name_kind
from detector.image_files import IMAGE_KINDS, read_image


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\0\0\0\x18ftypheic", "a HEIC photo"),
        (b"\0\0\0\x18ftypmif1", "a HEIC photo"),
        (b"\0\0\0\x18ftypavif", "an AVIF image"),
        (b"\0\0\0\x18ftypisom", "a video"),
        (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
        (b"%PDF-1.7", "a PDF"),
        (b" <svg>", "an SVG drawing"),
        (b"garbage", None),
    ],
)
def test_what_other_files_are(start, kind):
    assert name_kind(start, IMAGE_KINDS) == kind


@pytest.mark.parametrize("kind", ["png", "tiff"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_grey_pixels_turn_with_their_image(tmp_path: Path, kind: str, orientation: int):
    stored, path = np.arange(48, dtype=np.uint8).reshape(6, 8), tmp_path / f"a.{kind}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(path, exif=exif)
    upright = np.rot90(stored, {1: 0, 3: 2, 6: -1}[orientation])
    for source in (path, path.read_bytes()):
        np.testing.assert_array_equal(np.asarray(read_image(source, "a"))[:, :, 0], upright)
