from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from detector.images import ResizeRule
from e2e_vl.data.image_loader import ImageSizeError, read_image
from e2e_vl.examples import ImageTransform
from e2e_vl.samples import ImageBytes

NAMED = {"flip": False, "channel_order": "BGR", "name": "image 5"}


def test_pixels_are_resized_flipped_and_ordered(tmp_path):
    pixels = np.zeros((4, 8, 3), dtype=np.uint8)
    pixels[:, :4] = (250, 100, 10)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    rule = ResizeRule(short_edge=8, long_edge=100)
    image, image_transform = read_image(tmp_path / "a.png", (4, 8), rule, **NAMED)
    assert image.shape == (8, 16, 3)
    assert image_transform == ImageTransform((4, 8), (8, 16), False)
    np.testing.assert_array_equal(image[0, 0], [10, 100, 250])
    mirrored, image_transform = read_image(
        tmp_path / "a.png", (4, 8), rule, **NAMED | {"flip": True, "channel_order": "RGB"}
    )
    assert image_transform.flipped
    np.testing.assert_array_equal(mirrored[:, ::-1, ::-1], image)
    encoded = ImageBytes((tmp_path / "a.png").read_bytes(), "a.tar: a.png")
    np.testing.assert_array_equal(read_image(encoded, None, rule, **NAMED)[0], image)


def test_missing_file_and_other_size_are_named(tmp_path):
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match=r"b\.png: the file of image 5 is missing"):
        read_image(tmp_path / "b.png", (4, 8), ResizeRule(), **NAMED)
    with pytest.raises(ImageSizeError, match=r"a\.png: image 5 is 8 x 4 pixels, but its annotation file says 4 x 8"):
        read_image(tmp_path / "a.png", (8, 4), ResizeRule(), **NAMED)
    with pytest.raises(ValueError, match=r"a\.tar: b\.png"):
        read_image(ImageBytes(b"no image", "a.tar: b.png"), None, ResizeRule(), **NAMED)
