"""From an image file to the pixels a network sees: reading, resizing, normalising, padding.

An image is a uint8 array [height, width, 3]. Images are resized as uint8 with PIL's antialiased bilinear filter, as in
Detectron2 and the official VL-BERT code; filters without antialiasing change the features of a shrunken photo by a
fifth.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from detector.boxes import Array
from detector.errors import MissingFileError, UserError
from detector.image_parts import check_parts
from detector.structures import ImageBatch

Pixels = UInt8[np.ndarray, "height width 3"]

MAX_PIXELS = 2**29  # of one file, about 23000 x 23000; decoded pixels take 4 bytes: 2 GiB (4 GiB if rotated)
# A file of any size may have so many pixels; beyond them it must have a byte for each `PIXELS_PER_BYTE`, so that a file
# of some KB does not take some GiB. A JPEG of one colour has about 250 pixels per byte.
SMALL = 2**26
PIXELS_PER_BYTE = 300

# The formats that are read, by what a file holds and not by its name. PIL knows forty more, and one of them starts a
# program for what a file says (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_READERS = (
    (re.compile(rb"\xff\xd8\xff"), JpegImagePlugin.JpegImageFile),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), PngImagePlugin.PngImageFile),
    (re.compile(rb"RIFF....WEBPVP8[ LX]", re.DOTALL), WebPImagePlugin.WebPImageFile),
    (re.compile(rb"GIF8[79]a"), GifImagePlugin.GifImageFile),
    (re.compile(rb"BM"), BmpImagePlugin.BmpImageFile),
    (re.compile(rb"MM[\x00*][*\x00+]|II[*+\x00][\x00*]"), TiffImagePlugin.TiffImageFile),
)

_CHANNEL_ORDERS = ("BGR", "RGB")
_ROUNDINGS = ("detectron2", "truncate", "torchvision")
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {  # EXIF orientation -> the turn that makes the stored pixels upright; 1 is upright already
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# PIL's errors for a damaged file, depending on the format and on the place of the damage.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, struct.error, zlib.error),
    Image.DecompressionBombError,  # of a frame that is larger than the picture
)


@dataclass(frozen=True)
class ResizeRule:
    """Size of the network input: the short edge gets a fixed length unless the long one would pass its limit.

    Args:
        short_edge: wanted length of the short edge, pixels.
        long_edge: limit for the long edge, pixels.
        rounding: "detectron2" (`ResizeShortestEdge`: both edges are rounded) or "truncate" (the official VL-BERT code:
            a short edge that had to shrink is cut to an integer first, then the other edge is computed from it and
            cut too, so that it may end just under `long_edge`), or "torchvision" (both edges are cut after they were
            multiplied with one factor).

    Raises:
        UserError: an edge that is not positive, a long edge shorter than the short edge, or an unknown rounding.
    """

    short_edge: int = 800
    long_edge: int = 1333
    rounding: str = "detectron2"

    def __post_init__(self) -> None:
        if self.short_edge < 1 or self.long_edge < self.short_edge:
            raise UserError(
                f"Resize rule: short_edge {self.short_edge} and long_edge {self.long_edge} must be positive, "
                "and long_edge must not be below short_edge."
            )
        if self.rounding not in _ROUNDINGS:
            raise UserError(f"Resize rule: rounding '{self.rounding}' is unknown; use one of {', '.join(_ROUNDINGS)}.")

    def target_size(self, h: int, w: int) -> tuple[int, int]:
        """(height, width) after resizing an image of height h and width w; no side becomes less than 1."""
        if h < 1 or w < 1:
            raise UserError(f"An image of {w} x {h} pixels cannot be resized.")
        rules = {"detectron2": self._detectron2, "truncate": self._truncate, "torchvision": self._torchvision}
        new_h, new_w = rules[self.rounding](h, w)
        return max(new_h, 1), max(new_w, 1)

    def _detectron2(self, h: int, w: int) -> tuple[int, int]:
        scale = self.short_edge / min(h, w)
        new_h, new_w = (float(self.short_edge), scale * w) if h < w else (scale * h, float(self.short_edge))
        longer = max(new_h, new_w)
        if longer > self.long_edge:
            new_h, new_w = new_h * (self.long_edge / longer), new_w * (self.long_edge / longer)
        return int(new_h + 0.5), int(new_w + 0.5)

    def _truncate(self, h: int, w: int) -> tuple[int, int]:
        short, long = min(h, w), max(h, w)
        new_short = self.short_edge
        if long * new_short > self.long_edge * short:
            new_short = max(self.long_edge * short // long, 1)
        new_long = min(new_short * long // short, self.long_edge)
        return (new_long, new_short) if w < h else (new_short, new_long)

    def _torchvision(self, h: int, w: int) -> tuple[int, int]:
        factor = min(self.short_edge / min(h, w), self.long_edge / max(h, w))
        return math.floor(h * factor), math.floor(w * factor)


def load_image(path: str | Path, channel_order: str = "BGR") -> Pixels:
    """Read a JPEG or PNG file at its full size.

    Every kind becomes three 8-bit channels: grey is repeated, palettes are looked up, CMYK is converted, 16-bit values
    keep their upper byte, and transparency is dropped, not blended (the stored colours stay, as in Detectron2's
    reader). The EXIF orientation is applied; an unreadable EXIF block counts as upright. The format is read from the
    file's content, not from its name; it is one of `FORMATS`. Of several pictures in a file the first one is read.

    Args:
        path: the file.
        channel_order: "BGR" or "RGB".

    Returns:
        a contiguous array.

    Raises:
        MissingFileError: the file does not exist.
        UserError: the file is empty, damaged, cut off, not an image, or has more than `MAX_PIXELS` pixels, more pixels
            than so few bytes hold, or more scans or parts than real images (see `detector/image_parts.py`).
    """
    return _to_array(_read(path), channel_order)


def load_resized(path: str | Path, rule: ResizeRule, channel_order: str = "BGR") -> tuple[Pixels, tuple[int, int]]:
    """Read a file and resize it, with less memory for very large files than `load_image` and a resize after it.

    Returns:
        the resized image, and the (height, width) of the file's image after its rotation.

    Raises:
        FileNotFoundError, ValueError: as `load_image`.
    """
    return _resized(_read(path), rule, channel_order)


def decode_resized(
    content: bytes, name: str, rule: ResizeRule, channel_order: str = "BGR", max_pixels: int = MAX_PIXELS
) -> tuple[Pixels, tuple[int, int]]:
    """`load_resized` for the content of a file, such as a member of an archive; `name` names it in errors.

    An image of more than `max_pixels` pixels is refused before its pixels are decoded.

    Raises:
        UserError: as `load_image`.
    """
    if not content:
        raise UserError(f"Image {name} is empty (0 bytes); get the file again.")
    return _resized(_decode(io.BytesIO(content), name, max_pixels), rule, channel_order)


def _resized(image: Image.Image, rule: ResizeRule, channel_order: str) -> tuple[Pixels, tuple[int, int]]:
    size = (image.height, image.width)
    return _to_array(resize_image(image, rule.target_size(*size)), channel_order), size


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to `size`, (height, width), with PIL's antialiased bilinear filter."""
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def resize_boxes(boxes: Float[Array, "*R 4"], size: tuple[int, int], new_size: tuple[int, int]) -> Float[Array, "*R 4"]:
    """Move boxes along when their image is resized.

    Args:
        boxes: xyxy in pixels of the image before.
        size, new_size: (height, width) of the image before and after; exchange them to go back.

    Returns:
        new boxes of the same type, in pixels of the image after.
    """
    x, y = new_size[1] / size[1], new_size[0] / size[0]
    factors = boxes.new_tensor([x, y, x, y]) if isinstance(boxes, torch.Tensor) else np.array([x, y, x, y], boxes.dtype)
    return boxes * factors


def make_image_batch(
    images: Sequence[np.ndarray],
    original_sizes: Sequence[tuple[int, int]],
    names: Sequence[str],
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    pad_to: tuple[int, int] | None = None,
) -> ImageBatch:
    """Normalise images and put them into one batch, padded with zeros (the mean colour) at the right and the bottom.

    Args:
        images: N resized images, uint8 [height, width, 3].
        original_sizes: N (height, width) before the resize.
        names: N names for error messages.
        pixel_mean, pixel_std: 3 values in grey levels, in the images' channel order.
        pad_to: (H, W) of the batch; None = the size of its largest image, as in Detectron2. A box's features depend a
            little on the padding, so a fixed size makes them independent of the other images in the batch.

    Raises:
        UserError: an image of a different type or shape, or one that is larger than `pad_to`; the message names it.
    """
    assert len(images) == len(original_sizes) == len(names)
    if not images:
        raise UserError("A batch needs at least one image.")
    for image, name in zip(images, names, strict=True):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            raise UserError(f"{name} must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}.")
        if pad_to is not None and (image.shape[0] > pad_to[0] or image.shape[1] > pad_to[1]):
            raise UserError(
                f"{name}: the resized image has {image.shape[0]} x {image.shape[1]} pixels (height x width) and does "
                f"not fit into the fixed batch size {pad_to[0]} x {pad_to[1]}; enlarge it or use another resize rule."
            )
    sizes = torch.tensor([image.shape[:2] for image in images])
    height, width = pad_to if pad_to is not None else sizes.amax(0).tolist()
    mean = torch.tensor(pixel_mean, dtype=torch.float32)[:, None, None]
    std = torch.tensor(pixel_std, dtype=torch.float32)[:, None, None]
    pixels = torch.zeros(len(images), 3, height, width)
    for row, image in zip(pixels, images, strict=True):
        content = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float()
        row[:, : image.shape[0], : image.shape[1]] = (content - mean) / std
    return ImageBatch(pixels, sizes, torch.tensor([tuple(size) for size in original_sizes]), list(names))


def _to_array(image: Image.Image, channel_order: str) -> Pixels:
    if channel_order not in _CHANNEL_ORDERS:
        raise UserError(f"Channel order '{channel_order}' is unknown; use one of {', '.join(_CHANNEL_ORDERS)}.")
    pixels = np.array(image)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if channel_order == "BGR" else pixels


def _read(path: str | Path) -> Image.Image:
    """An upright RGB image."""
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"Image {path} does not exist; check the path, or the folder of the data set's images.")
    if not path.is_file():
        raise UserError(f"Image {path} is not a file; name a JPEG or PNG file.")
    if path.stat().st_size == 0:
        raise UserError(f"Image {path} is empty (0 bytes); get the file again.")
    with path.open("rb") as stream:
        return _decode(stream, str(path))


def _decode(stream: io.BufferedIOBase, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An upright RGB image from the content of a file."""
    try:
        image = _open(stream, name, max_pixels)
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(f"Image {name} needs more memory than there is; make it smaller first.") from error
    except _DAMAGED as error:
        raise UserError(f"Image {name} is not a readable JPEG or PNG file; get or convert it again.") from error
    try:
        image.load()
        rgb = _to_rgb(image, name)
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(
            f"Image {name} has {image.width} x {image.height} pixels, which need more memory than there is; make it "
            "smaller first."
        ) from error
    except _DAMAGED as error:
        raise UserError(f"Image {name} is damaged or cut off ({str(error)[:200]}); get the file again.") from error
    turn = _UPRIGHT.get(_orientation(image))
    return rgb if turn is None else rgb.transpose(turn)


def _open(stream: io.BufferedIOBase, name: str, max_pixels: int) -> Image.Image:
    """Read the header.

    `Image.open` is avoided: its size limit (a warning at 89 million pixels, an error at twice as many) can only be
    changed for the whole process.

    Raises:
        UserError: the header claims too much.
    """
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    start = stream.read(16)
    stream.seek(0)
    reader = next((reader for signature, reader in _READERS if signature.match(start)), None)
    if reader is None:
        raise UnidentifiedImageError("no known format")
    check_parts(stream, name, reader.format)
    image = reader(stream)
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise UserError(
            f"Image {name} has {image.width} x {image.height} pixels; the limit is {max_pixels} pixels, "
            "so make it smaller first."
        )
    if pixels > max(SMALL, PIXELS_PER_BYTE * length):
        raise UserError(
            f"Image {name} claims {image.width} x {image.height} pixels in {length} bytes, which no photo does; make "
            "it smaller first."
        )
    return image


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16-bit grey; PIL's own conversion would clip it at 255
        values = np.asarray(image)
        if image.mode == "I" and (values.min() < 0 or values.max() > 65535):
            raise UserError(f"Image {name} has 32-bit pixels; save it with 8 or 16 bits per channel.")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UserError(f"Image {name} has floating-point pixels; save it with 8 or 16 bits per channel.")
    if "transparency" in image.info:  # converting this kind to RGB in one step makes PIL warn
        image = image.convert("RGBA")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # a damaged EXIF block raises many kinds of errors, and the picture itself is fine
        return 1
