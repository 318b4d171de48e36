"""Images, texts, boxes and choices as users have them, in the form of the data."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile as OpenedImage

from detector.boxes import check_boxes
from detector.errors import UserError, user_path
from detector.images import FORMATS
from e2e_vl.data.user_inputs import read_boxes
from e2e_vl.samples import AnnotatedObjects, ImageBytes

ImageInput = str | Path | bytes | np.ndarray | Image.Image
ImageFile = Path | ImageBytes

_IN_MEMORY = "(the image given)"
_ORIENTATION = 0x0112  # the EXIF tag
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # that a PNG file holds without loss
_HIGHEST = 65535  # of 16-bit pixels
# PIL's errors for a damaged or closed image, depending on the format and on the place of the damage.
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, struct.error, zlib.error)


def image_file(image: ImageInput) -> ImageFile:
    """A path, the content of a file, a PIL image or an array as an image file.

    Images in memory become PNG files in memory, so that every image takes the road of files: its mode, transparency and
    EXIF orientation mean what they mean in a file (`detector.images.load_image`).

    Args:
        image: an array is uint8, [height, width] in grey, [height, width, 3] in RGB or [height, width, 4] in RGBA.

    Raises:
        ValueError: something else, or an image that is damaged, empty or of a kind that no file could have.
    """
    if isinstance(image, str | Path):
        return user_path(image, "Image")
    if isinstance(image, bytes):
        return ImageBytes(image, "(the bytes given)")
    if isinstance(image, np.ndarray):
        is_picture = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))
        if image.dtype != np.uint8 or not is_picture or image.size == 0:
            raise UserError(
                "An image array must be uint8, [height, width, 3] in RGB, [height, width, 4] in RGBA or [height, width]"
                f" in grey, not {image.dtype} {list(image.shape)}."
            )
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise UserError(
            f"An image is a path, bytes, a PIL image or a uint8 array, not {type(image).__name__}; open it first."
        )
    _check_unread(image)
    try:
        image.load()
    except (MemoryError, *_DAMAGED) as error:
        raise UserError(f"Image {_IN_MEMORY} is closed, damaged or cut off ({error}); open it again.") from error
    if not image.width or not image.height:
        raise UserError(f"Image {_IN_MEMORY} has {image.width} x {image.height} pixels; give one with pixels.")
    upright, stream = Image.Exif(), io.BytesIO()
    with contextlib.suppress(Exception):  # a damaged EXIF block raises many kinds of errors, and the picture is fine
        upright[_ORIENTATION] = int(image.getexif().get(_ORIENTATION, 1))
    stored = _storable(image)
    stored.info = {}  # what the image was read with, such as the colour that is transparent, may not fit into a PNG
    stored.save(stream, "PNG", compress_level=1, exif=upright)
    return ImageBytes(stream.getvalue(), _IN_MEMORY)


def _check_unread(image: Image.Image) -> None:
    """Look at an image that PIL has opened but not read: reading an EPS file would start a program.

    Raises:
        UserError: its format is not one of `FORMATS`.
    """
    if isinstance(image, OpenedImage) and image.tile and image.format not in (*FORMATS, "MPO"):
        raise UserError(
            f"Image {_IN_MEMORY} was opened from a file of the format {image.format}, which is not read here; give "
            f"one of {', '.join(FORMATS)}, or call its load() before."
        )


def _storable(image: Image.Image) -> Image.Image:
    """A copy of the image in a mode that a PNG file holds."""
    if image.mode in _PNG_MODES:
        return image.copy()
    if image.mode.startswith("I"):  # 32-bit grey, or 16-bit grey with another order of bytes
        values = np.asarray(image)
        if values.min() < 0 or values.max() > _HIGHEST:
            raise UserError(f"Image {_IN_MEMORY} has 32-bit pixels; convert it to 8 or 16 bits per channel.")
        return Image.fromarray(values.astype(np.uint16))
    if image.mode == "F":
        raise UserError(f"Image {_IN_MEMORY} has floating-point pixels; convert it to 8 bits per channel.")
    steps = {"RGBa": ("RGBA",), "La": ("LA",), "PA": ("RGBA",)}.get(image.mode, ("RGB",))
    try:
        for mode in steps:
            image = image.convert(mode)
    except ValueError as error:  # LAB
        raise UserError(
            f"Image {_IN_MEMORY} has the mode {image.mode}, which PIL cannot turn into RGB; convert it first."
        ) from error
    return image


def stamp_of(image: ImageFile) -> tuple[int, int] | None:
    """Size in bytes and time of the last change (ns) of a file; None for an image in memory, or where no file is."""
    if isinstance(image, ImageBytes) or not image.is_file():
        return None
    facts = image.stat()
    return facts.st_size, facts.st_mtime_ns


def content_key(image: ImageFile) -> Path | bytes:
    """Equal for two names of one file, and for images in memory with the same content."""
    return image.resolve() if isinstance(image, Path) else image.content


def as_lists(image: Any, text: Any) -> tuple[list[Any], list[str], bool]:
    """One image or text beside a list of the other stands for each of them.

    Returns:
        images and texts of equal number, and whether both were single.

    Raises:
        ValueError: lists of different lengths, empty lists or tuples, or a text that is no string.
    """
    is_single = not isinstance(image, list) and not isinstance(text, list)
    images = image if isinstance(image, list) else None
    texts = text if isinstance(text, list) else None
    count = len(texts if texts is not None else images if images is not None else [None])
    images = images if images is not None else [image] * count
    texts = texts if texts is not None else [text] * count
    if not count or len(images) != len(texts):
        raise UserError(
            f"A list of length {len(images)} as image and one of length {len(texts)} as text do not go together; give "
            "one text per image."
        )
    if not all(isinstance(one, str) for one in texts):
        raise UserError("A text must be a string; for several texts give a list of strings.")
    if any(isinstance(one, tuple) and not one for one in images):
        raise UserError("A tuple of images is empty; give the images that the text is about.")
    return images, texts, is_single


def as_choices(choices: Any, count: int) -> list[tuple[str, ...]]:
    """The choices of each of `count` questions: the same strings for all, or a list of strings per question.

    Raises:
        ValueError: one string, values that are no strings, or lists for another number of questions.
    """
    rows = _plain(choices)
    if rows is None or rows == []:
        return [()] * count
    if isinstance(rows, list) and all(isinstance(one, str) for one in rows):
        return [tuple(rows)] * count
    rows = [_plain(row) for row in rows] if isinstance(rows, list) else None
    if rows is None or not all(isinstance(row, list) and all(isinstance(one, str) for one in row) for row in rows):
        raise UserError("choices must be a list of strings, or a list of such lists with one list per question.")
    if len(rows) != count:
        raise UserError(f"choices holds {len(rows)} lists for {count} questions; give one list per question.")
    return [tuple(row) for row in rows]


def as_answers(answer: Any, count: int) -> list[str | None]:
    """The given answer of each of `count` questions: one for all, or a list of them.

    Raises:
        ValueError: values that are no strings, or a list of another length.
    """
    rows = _plain(answer)
    if rows is None or isinstance(rows, str):
        return [rows] * count
    if not isinstance(rows, list) or not all(isinstance(one, str) for one in rows):
        raise UserError("answer must be a string, or a list with one string per question.")
    if len(rows) != count:
        raise UserError(f"answer holds {len(rows)} strings for {count} questions; give one per question.")
    return rows


def _plain(values: Any) -> Any:
    """Tuples and arrays as lists."""
    if isinstance(values, np.ndarray):
        return values.tolist()
    return list(values) if isinstance(values, tuple) else values


def given_boxes(boxes: Any, origin: str) -> AnnotatedObjects | None:
    """Boxes from a user: numbers [R, 4] xyxy in pixels of the original image, or what `--boxes` of the commands takes.

    Args:
        boxes: R must not be 0; a single box [4] stands for [1, 4].
        origin: names the boxes in errors.

    Raises:
        ValueError: no boxes, numbers of another shape, or boxes without area.
    """
    if boxes is None or isinstance(boxes, AnnotatedObjects):
        return boxes
    is_words = isinstance(boxes, Sequence) and len(boxes) > 0 and all(isinstance(word, str) for word in boxes)
    if isinstance(boxes, str | Path) or is_words:
        found = read_boxes([str(boxes)] if isinstance(boxes, str | Path) else boxes, origin)
        return require_some(found)
    try:
        array = np.asarray(boxes, dtype=np.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        # rows of different lengths, no numbers, a tensor with gradients, a whole number beyond all floats
        raise UserError(f"{origin} must be numbers [R, 4], one row x1, y1, x2, y2 per box.") from error
    array = array[None] if array.shape == (4,) else array
    if array.ndim == 3:
        raise UserError(
            f"{origin} must be numbers [R, 4], not {list(array.shape)}: they hold for all questions of a call; ask "
            "about each set of boxes in a call of its own."
        )
    if array.ndim != 2 or array.shape[1] != 4 or not len(array):
        raise UserError(
            f"{origin} must be numbers [R, 4] with at least one row x1, y1, x2, y2, not {list(array.shape)}; without "
            "candidates of your own leave them out."
        )
    check_boxes(array, origin, "box")
    return AnnotatedObjects(array, origin)


def require_some(boxes: AnnotatedObjects) -> AnnotatedObjects:
    """Return the boxes unchanged. Raises ValueError if the list is empty."""
    if not len(boxes):
        raise UserError(f"{boxes.origin}: there is no box; give at least one, or leave the boxes out.")
    return boxes
