"""Open image files with PIL: their formats, their size and their EXIF orientation.

Sizes are (height, width). An image is *stored* as the raster of its file, and *upright* after its EXIF rotation.
"""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL import features as pil_features
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH

from detector.errors import UserError, reading
from detector.file_kinds import OTHER_KINDS, name_kind, read_start
from detector.logs import OnceFilter

logger = logging.getLogger(__name__)
logger.addFilter(OnceFilter())

# EXIF orientations that exchange the sides of an image -> what undoes `ImageOps.exif_transpose`
AS_STORED = {
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

# Detected from the file's content, not its name. PIL supports about forty more, one of which runs a program (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
if "avif" in pil_features.modules and pil_features.check("avif"):  # since Pillow 11.3
    FORMATS += ("AVIF",)

# First bytes of files that people take for images, for error messages. HEIC photos are MP4 containers, like videos.
IMAGE_KINDS = {
    "a HEIC photo": rb".{4}ftyp(hei[cxms]|hev[cmxs]|mif1|msf1)",
    "an AVIF image": rb".{4}ftypavi[fs]",
    "a JPEG XL image": rb"\xff\x0a|.{4}JXL ",
    "a JPEG 2000 image": rb".{4}jP  |\xff\x4f\xff\x51",
    "a video": rb".{4}ftyp|\x1a\x45\xdf\xa3|RIFF.{4}AVI ",
    "a Photoshop file": rb"8BPS",
    "an SVG drawing": rb"\s*(<\?xml|<svg)",
    **OTHER_KINDS,
}


class ImageHeader(NamedTuple):
    """What an image file says before its pixels."""

    stored_size: tuple[int, int]
    orientation: int  # of EXIF, 1 to 8

    @property
    def exchanges_sides(self) -> bool:
        """Whether the upright image is as wide as the stored one is high."""
        return self.orientation in AS_STORED

    @property
    def upright_size(self) -> tuple[int, int]:
        return self.stored_size[::-1] if self.exchanges_sides else self.stored_size


def read_header(path: str | Path) -> ImageHeader:
    """Read the size and the orientation of an image file without decoding its pixels.

    Raises:
        UserError: the file is no image of a supported format.
    """
    with reading(f"Image {path}", Exception), open_image(path, str(path)) as image:  # PIL raises many types
        stored_size = image.height, image.width
        if image.format == "TIFF":  # newer versions of PIL give the upright size before the pixels are decoded
            stored_size = image.tag_v2[IMAGELENGTH], image.tag_v2[IMAGEWIDTH]
        orientation = 1
        if image.format != "PNG" or "exif" in image.info:  # to look for it behind the pixels, PIL decodes a PNG
            orientation = read_orientation(image)
    return ImageHeader(stored_size, orientation)


def read_size(path: str | Path, annotated_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the size in which `read_image` reads a file, without decoding its pixels.

    Args:
        annotated_size: see `detector.images.load_image`.

    Raises:
        UserError: the file is no image of a supported format.
    """
    header = read_header(path)
    return header.stored_size if annotated_size == header.stored_size else header.upright_size


def read_image(source: str | Path | bytes, name: str, annotated_size: tuple[int, int] | None = None) -> Image.Image:
    """Read an RGB image and apply its EXIF orientation, unless it was annotated as stored.

    Args:
        source: a file, or its content.
        name: name of the file in error messages.
        annotated_size: see `detector.images.load_image`.

    Raises:
        UserError: the file is no image of a supported format, or is damaged.
    """
    with reading(f"Image {name}", Exception), open_image(source, name) as image:  # PIL raises many types
        if image.format == "TIFF":
            image.filename = ""  # else PIL maps grey pixels from the file in their upright size, which mixes them up
        orientation = read_orientation(image)
        image.load()
        with contextlib.suppress(Exception):  # damaged EXIF data
            ImageOps.exif_transpose(image, in_place=True)
        has_exchanged_sides = annotated_size == (image.width, image.height) and image.width != image.height
        if has_exchanged_sides and orientation in AS_STORED:
            image = image.transpose(AS_STORED[orientation])
            logger.warning(
                "Image %s was annotated without its EXIF rotation, and is read as it is stored, like all such images.",
                name,
                extra={"once": "annotated as stored"},
            )
        if image.mode.startswith(("I", "F")):  # 16-bit grey; PIL's own conversion would clip it at 255
            values = np.asarray(image)
            if image.mode == "F" or values.min() < 0 or values.max() > 65535:
                raise ValueError("its pixels have 32 bits; save it with 8 or 16 bits per channel")
            return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
        if "transparency" in image.info:  # PIL warns about a direct conversion to RGB
            return image.convert("RGBA").convert("RGB")
        if image.mode == "RGB":
            return image  # a conversion would copy it
        return image.convert("RGB")


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an open image, 1 to 8; 1 if it is missing, invalid or unreadable."""
    orientation = 1
    with contextlib.suppress(Exception):  # damaged EXIF data
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1  # some cameras write 0


def open_image(source: str | Path | bytes, name: str) -> Image.Image:
    """Open an image file, or its content, without decoding it; HEIC photos need the package pillow-heif.

    Raises:
        UserError: the format is not supported.
    """
    try:
        return Image.open(_stream(source), formats=FORMATS)
    except UnidentifiedImageError:
        start = source if isinstance(source, bytes) else read_start(Path(source))
        kind = name_kind(start, IMAGE_KINDS)
    if kind is None:
        formats = ", ".join(FORMATS)
        raise UserError(f"Image {name}: damaged or in another format than {formats}; replace it or convert it.")
    if kind == "a HEIC photo":
        advice = "pip install pillow-heif, or convert it to JPEG"
        with contextlib.suppress(ImportError):
            from pillow_heif import register_heif_opener

            register_heif_opener()
            return Image.open(_stream(source), formats=("HEIF",))
    elif kind == "an AVIF image":
        advice = "pip install 'pillow>=11.3', or convert it to JPEG"
    elif kind == "a video":
        advice = "ask about its frames (`e2e-vl ask --fps 1`, e2e_vl.video_frames)"
    else:
        advice = "check its address, replace it, or convert it to JPEG or PNG"
    raise UserError(f"Image {name} is {kind}, which cannot be read; {advice}.")


def _stream(source: str | Path | bytes) -> str | Path | io.BytesIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source
