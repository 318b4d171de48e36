"""From an image file to pixels of the network's size, and boxes moved the same way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from detector.images import ResizeRule, decode_resized, load_resized


@dataclasses.dataclass(frozen=True)
class Placement:
    """How pixels of a stored image became pixels of the resized one."""

    original_size: tuple[int, int]  # (height, width)
    size: tuple[int, int]  # (height, width) after the resize
    flipped: bool = False

    def move_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Scale boxes and flip them, without clamping.

        A flip is x' = width - 1 - x on both corners as they are stored (official VL-BERT code), width being that of the
        resized image.

        Args:
            boxes: float [R, 4], xyxy in pixels of the stored image.

        Returns:
            float64 [R, 4], xyxy in pixels of the resized image.
        """
        height, width = self.size
        x_scale, y_scale = width / self.original_size[1], height / self.original_size[0]
        moved = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * (x_scale, y_scale, x_scale, y_scale)
        if self.flipped:
            moved[:, [0, 2]] = width - 1 - moved[:, [2, 0]]
        return moved

    def move_objects(self, boxes: np.ndarray) -> np.ndarray:
        """Scale, mirror and clip as Detectron2 does: x' = width - x, clipped to [0, width] x [0, height].

        For the targets of detection losses. (`move_and_clamp_boxes` is the official VL-BERT code's way.)

        Args:
            boxes: float64 [G, 4], xyxy in pixels of the stored image.

        Returns:
            float32 [G, 4], xyxy in pixels of the resized image.
        """
        height, width = self.size
        scale = np.array([width, height]) / np.array(self.original_size[::-1])
        moved = boxes * np.tile(scale, 2)
        if self.flipped:
            moved[:, [0, 2]] = width - moved[:, [2, 0]]
        return moved.clip(0, [width, height, width, height]).astype(np.float32)

    def move_and_clamp_boxes(self, boxes: np.ndarray, name: str) -> np.ndarray:
        """Scale, flip and clamp boxes to [0, width - 1] x [0, height - 1] (official VL-BERT code).

        A box that lies in the image but loses its whole width or height to the clamp, because it only covers the last
        pixel, becomes one pixel wide or high there: boxes never have zero area.

        Args:
            boxes: float [R, 4], xyxy in pixels of the stored image.
            name: names the boxes in the error.

        Returns:
            float32 [R, 4], xyxy in pixels of the resized image.

        Raises:
            ValueError: a box lies outside the stored image.
        """
        boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
        original_height, original_width = self.original_size
        outside = (boxes[:, 0] >= original_width) | (boxes[:, 1] >= original_height) | (boxes[:, 2:] <= 0).any(axis=1)
        if outside.any():
            row = int(outside.argmax())
            raise ValueError(
                f"{name}: box {row} [x1, y1, x2, y2] = {boxes[row].tolist()} lies outside the "
                f"{original_width} x {original_height} image; correct or remove it"
            )
        height, width = self.size
        moved = self.move_boxes(boxes)
        moved = np.clip(moved, 0, np.array([width - 1, height - 1, width - 1, height - 1])).astype(np.float32)
        for low, high in ((0, 2), (1, 3)):
            lost = moved[:, high] <= moved[:, low]
            moved[lost, low] = np.maximum(moved[lost, high] - 1, 0)
            moved[lost, high] = moved[lost, low] + 1
        return moved


@dataclasses.dataclass(frozen=True)
class EncodedImage:
    """The content of an image file that lies in an archive."""

    content: bytes
    name: str  # archive and member, for error messages


class ImageSizeError(ValueError):
    """An image of another size than its annotation file says."""


def read_image(
    source: str | Path | EncodedImage,
    expected_size: tuple[int, int] | None,
    resize: ResizeRule,
    *,
    flip: bool = False,
    channel_order: str = "BGR",
    name: str = "",
) -> tuple[np.ndarray, Placement]:
    """Load, resize and maybe flip one image.

    Args:
        source: image file, or its content.
        expected_size: (height, width) that the annotation file states, or None.
        resize: the network's size.
        flip: mirror left and right.
        channel_order: "BGR" or "RGB".
        name: which record asks for the file, for error messages, such as "image 42".

    Returns:
        Pixels uint8 [h, w, 3] and the placement.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no readable image.
        ImageSizeError: it has another size than expected.
    """
    if isinstance(source, EncodedImage):
        where = source.name
        pixels, original_size = decode_resized(source.content, source.name, resize, channel_order)
    else:
        where = path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: the file of {name or 'an image'} is missing; check the image folder's path"
            )
        pixels, original_size = load_resized(path, resize, channel_order)
    if expected_size is not None and original_size != tuple(expected_size):
        raise ImageSizeError(
            f"{where}: {name or 'the image'} is {original_size[1]} x {original_size[0]} pixels, but its annotation "
            f"file says {expected_size[1]} x {expected_size[0]}; boxes would not fit, use the "
            "images that the annotations were made on"
        )
    if flip:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return pixels, Placement(original_size, (pixels.shape[0], pixels.shape[1]), flip)
