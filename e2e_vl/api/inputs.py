"""Images, texts and boxes as users have them, in the form of the data."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from detector.boxes import check_boxes
from e2e_vl.data.formats.user_boxes import read_boxes
from e2e_vl.samples import AnnotatedObjects, EncodedImage

ImageInput = str | Path | bytes | np.ndarray | Image.Image
ImageFile = Path | EncodedImage


def image_file(image: ImageInput) -> ImageFile:
    """A path, the content of a file, a PIL image, or uint8 pixels [height, width, 3] in RGB, as an image file.

    Images in memory become PNG files in memory, so that all images take one road.

    Raises:
        ValueError: something else.
    """
    if isinstance(image, str | Path):
        return Path(image).expanduser()
    if isinstance(image, bytes):
        return EncodedImage(image, "(the bytes given)")
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            raise ValueError(
                f"An image array must be uint8 [height, width, 3] in RGB, not {image.dtype} {list(image.shape)}."
            )
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ValueError(
            f"An image is a path, bytes, a PIL image or a uint8 array, not {type(image).__name__}; open it first."
        )
    stream = io.BytesIO()
    ImageOps.exif_transpose(image).save(stream, "PNG", compress_level=1)
    return EncodedImage(stream.getvalue(), "(the image given)")


def as_lists(image: Any, text: Any) -> tuple[list[Any], list[str], bool]:
    """One image or text beside a list of the other stands for each of them.

    Returns:
        images and texts of equal number, and whether both were single.

    Raises:
        ValueError: lists of different lengths, empty lists, or a text that is no string.
    """
    is_single = not isinstance(image, list) and not isinstance(text, list)
    images = image if isinstance(image, list) else None
    texts = text if isinstance(text, list) else None
    count = len(texts if texts is not None else images if images is not None else [None])
    images = images if images is not None else [image] * count
    texts = texts if texts is not None else [text] * count
    if not count or len(images) != len(texts):
        raise ValueError(f"{len(images)} images and {len(texts)} texts do not go together; give one text per image.")
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("A text must be a string; for several texts give a list of strings.")
    return images, texts, is_single


def given_boxes(boxes: Any, origin: str) -> AnnotatedObjects | None:
    """Boxes from a user: numbers [R, 4] xyxy in pixels of the original image, or what `--boxes` of the commands takes.

    Raises:
        ValueError: no boxes, or boxes without area.
    """
    if boxes is None or isinstance(boxes, AnnotatedObjects):
        return boxes
    if isinstance(boxes, str | Path):
        return read_boxes([str(boxes)], origin)
    if isinstance(boxes, Sequence) and boxes and all(isinstance(word, str) for word in boxes):
        return read_boxes(boxes, origin)
    array = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    check_boxes(array, origin, "box")
    return AnnotatedObjects(array, origin)
