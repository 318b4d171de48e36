"""Conversion of users' images, texts, boxes and choices."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from detector.errors import UserError, user_path
from e2e_vl.data.user_inputs import checked_boxes, read_boxes
from e2e_vl.samples import AnnotatedObjects, ImageBytes

ImageInput = str | Path | bytes | np.ndarray | Image.Image
ImageFile = Path | ImageBytes

_ORIENTATION = 0x0112  # the EXIF tag
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG stores without loss


def image_file(image: ImageInput) -> ImageFile:
    """Convert a path, the content of a file, a PIL image or an array to an image file.

    Images in memory are encoded as PNG, so that `detector.images.load_image` handles mode, transparency and EXIF
    orientation as in a file.

    Args:
        image: arrays are uint8, [height, width] in grey, [height, width, 3] in RGB or [height, width, 4] in RGBA.
    """
    if isinstance(image, str | Path):
        return user_path(image, "Image")
    if isinstance(image, bytes):
        return ImageBytes(image, "(the bytes given)")
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] in ((), (3,), (4,)):
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image) or image.mode in ("I", "F"):  # PIL would clip 32-bit values at 255
        kind = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise UserError(
            "An image is a path, bytes, a PIL image of 8 or 16 bits, or a uint8 array [height, width, 3] in "
            f"RGB, [height, width, 4] in RGBA or [height, width] in grey, not {kind}."
        )
    stored = image.copy() if image.mode in _PNG_MODES else image.convert("RGB")
    stored.info = {}  # metadata such as a transparent colour may be invalid in a PNG
    stream, upright = io.BytesIO(), Image.Exif()
    upright[_ORIENTATION] = int(image.getexif().get(_ORIENTATION, 1))
    stored.save(stream, "PNG", compress_level=1, exif=upright)
    return ImageBytes(stream.getvalue(), "(the image given)")


def content_key(image: ImageFile) -> Path | bytes:
    """A key that is equal for the same file or the same content."""
    return image.resolve() if isinstance(image, Path) else image.content


def for_each_question(value: Any, count: int, is_one: Callable[[Any], bool], what: str) -> list[Any]:
    """A list of `count` values from a single value or a list.

    Args:
        is_one: whether a value is a single one.
        what: begins the error message.
    """
    if is_one(value):
        return [value] * count
    if not isinstance(value, list | tuple) or len(value) != count or not all(map(is_one, value)):
        raise UserError(f"{what}, or a list with one for each of the {count} questions.")
    return list(value)


def given_boxes(boxes: Any) -> AnnotatedObjects | None:
    """A user's boxes.

    Args:
        boxes: numbers [R, 4] or [4], xyxy in pixels of the original image; or words or a file as in `--boxes`.
    """
    if boxes is None or isinstance(boxes, AnnotatedObjects):
        return boxes
    if isinstance(boxes, str | Path):
        boxes = [str(boxes)]
    if isinstance(boxes, Sequence) and len(boxes) and all(isinstance(word, str) for word in boxes):
        return read_boxes(boxes, "boxes")
    return AnnotatedObjects(checked_boxes(np.atleast_2d(np.asarray(boxes, dtype=np.float64)), "boxes"), "boxes")
