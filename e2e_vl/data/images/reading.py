"""From an image file to pixels of the network's size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.images import ResizeRule, decode_resized, load_resized
from e2e_vl.examples import Placement
from e2e_vl.samples import EncodedImage


class ImageSizeError(UserError):
    """An image of another size than its annotation file says."""


def read_image(
    source: Path | EncodedImage,
    expected_size: tuple[int, int] | None,
    resize: ResizeRule,
    *,
    flip: bool,
    channel_order: str,
    name: str,
) -> tuple[np.ndarray, Placement]:
    """Load, resize and maybe mirror one image.

    Args:
        source: image file, or its content.
        expected_size: (height, width) that the annotation file states, or None.
        resize: the network's size.
        channel_order: "BGR" or "RGB".
        name: which record asks for the file, for error messages, such as "image 42".

    Returns:
        Pixels uint8 [height, width, 3] and the placement.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no readable image.
        ImageSizeError: it has another size than expected.
    """
    if isinstance(source, EncodedImage):
        where = source.name
        pixels, original_size = decode_resized(source.content, source.name, resize, channel_order)
    else:
        where = source
        if not source.is_file():
            raise MissingFileError(f"{source}: the file of {name} is missing; check the image folder's path")
        pixels, original_size = load_resized(source, resize, channel_order)
    if expected_size is not None and original_size != tuple(expected_size):
        raise ImageSizeError(
            f"{where}: {name} is {original_size[1]} x {original_size[0]} pixels, but its annotation "
            f"file says {expected_size[1]} x {expected_size[0]}; boxes would not fit, use the images that the "
            "annotations were made on"
        )
    if flip:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return pixels, Placement(original_size, (pixels.shape[0], pixels.shape[1]), flip)
