"""Images, texts, boxes and choices as users have them, in the form of the data."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from detector.boxes import check_boxes
from detector.errors import UserError, first_line, user_path
from e2e_vl.data.user_inputs import read_boxes
from e2e_vl.samples import AnnotatedObjects, ImageBytes

ImageInput = str | Path | bytes | np.ndarray | Image.Image
ImageFile = Path | ImageBytes

_ORIENTATION = 0x0112  # the EXIF tag
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # that a PNG file holds without loss


def image_file(image: ImageInput) -> ImageFile:
    """A path, the content of a file, a PIL image or an array as an image file.

    Images in memory become PNG files in memory, so that every image takes the road of files: its mode, transparency and
    EXIF orientation mean what they mean in a file (`detector.images.load_image`).

    Args:
        image: an array is uint8, [height, width] in grey, [height, width, 3] in RGB or [height, width, 4] in RGBA.
    """
    if isinstance(image, str | Path):
        return user_path(image, "Image")
    if isinstance(image, bytes):
        return ImageBytes(image, "(the bytes given)")
    if isinstance(image, np.ndarray):
        is_picture = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))
        if image.dtype != np.uint8 or not is_picture:
            raise UserError(
                "An image array must be uint8, [height, width, 3] in RGB, [height, width, 4] in RGBA or [height, width]"
                f" in grey, not {image.dtype} {list(image.shape)}."
            )
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise UserError(
            f"An image is a path, bytes, a PIL image or a uint8 array, not {type(image).__name__}; open it first."
        )
    if image.mode in ("I", "F"):  # PIL would cut their values off at 255
        raise UserError(f"The image given has 32-bit pixels (mode {image.mode}); convert it to 8 bits per channel.")
    stream, upright = io.BytesIO(), Image.Exif()
    try:
        stored = image.copy() if image.mode in _PNG_MODES else image.convert("RGB")
        upright[_ORIENTATION] = int(image.getexif().get(_ORIENTATION, 1))
        stored.info = {}  # what the image was read with, such as the colour that is transparent, may not fit into a PNG
        stored.save(stream, "PNG", compress_level=1, exif=upright)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"The image given is closed, damaged or empty ({first_line(error)}); open it again.") from error
    return ImageBytes(stream.getvalue(), "(the image given)")


def content_key(image: ImageFile) -> Path | bytes:
    """Equal for two names of one file, and for images in memory with the same content."""
    return image.resolve() if isinstance(image, Path) else image.content


def for_each_question(value: Any, count: int, is_one: Callable[[Any], bool], what: str) -> list[Any]:
    """One value for all `count` questions, or a list with one for each of them.

    Args:
        is_one: whether a value is one for a question.
        what: names the value and its form in the error.
    """
    if is_one(value):
        return [value] * count
    if not isinstance(value, list | tuple) or not all(map(is_one, value)):
        raise UserError(f"{what}, or a list with one for each question.")
    if len(value) != count:
        raise UserError(f"{what}; a list needs one for each of the {count} questions, and this one has {len(value)}.")
    return list(value)


def given_boxes(boxes: Any, origin: str) -> AnnotatedObjects | None:
    """Boxes from a user: numbers [R, 4] xyxy in pixels of the original image, or what `--boxes` of the commands takes.

    Args:
        boxes: R must not be 0; a single box [4] stands for [1, 4].
        origin: names the boxes in errors.
    """
    if boxes is None or isinstance(boxes, AnnotatedObjects):
        return boxes
    if isinstance(boxes, str | Path):
        boxes = [str(boxes)]
    if isinstance(boxes, Sequence) and len(boxes) and all(isinstance(word, str) for word in boxes):
        found = read_boxes(boxes, origin)
        if not len(found):
            raise UserError(f"{found.origin}: there is no box; give at least one, or leave the boxes out.")
        return found
    try:
        array = np.asarray(boxes, dtype=np.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # such as rows of different lengths
        array = np.zeros(0)
    array = array[None] if array.shape == (4,) else array
    if array.ndim != 2 or array.shape[1] != 4 or not len(array):
        raise UserError(
            f"{origin} must be numbers [R, 4], at least one row x1, y1, x2, y2; they hold for all questions of a call. "
            "Without candidates of your own leave them out."
        )
    check_boxes(array, origin, "box")
    return AnnotatedObjects(array, origin)
