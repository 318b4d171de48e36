"""Images given by a user: one image in any form, or many in folders, patterns, lists, iterators and batches."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import ExifTags, Image

from detector.errors import MissingFileError, UserError, first_line, reading, user_path
from detector.image_files import read_orientation
from e2e_vl.io import is_listed
from e2e_vl.samples import ImageBytes

logger = logging.getLogger(__name__)

ImageFile = Path | ImageBytes
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".heic", ".heif")
MAX_DOWNLOAD = 64 << 20  # bytes of an image at an address
TIMEOUT = 30  # seconds without an answer from its server
CHANNELS = (1, 3, 4)  # of an array: grey, RGB, RGBA

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG stores without loss
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)  # no drive of Windows, which has one letter


# One image


def to_image_file(image: Any) -> ImageFile:
    """Convert an image in any form to an image file.

    Images in memory are encoded as PNG, so that `detector.images.load_image` handles mode, transparency and EXIF
    orientation as in a file.

    Args:
        image: a path; an address (https:, http:, file:, data:); the bytes of a file, or an open file; a PIL image; or
            an array or a tensor: [height, width] in grey, [height, width, 3] or [3, height, width] in RGB, and likewise
            1 channel in grey or 4 in RGBA. Its values are floats in [0, 1], integers up to 255, or 16-bit integers.

    Raises:
        UserError: it is none of these.
    """
    if isinstance(image, ImageBytes):
        return image
    if isinstance(image, str | os.PathLike):
        return _from_text(os.fsdecode(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return ImageBytes(bytes(image), "(the bytes given)")
    if isinstance(image, Image.Image):
        return _from_pil(image)
    for method in ("read", "read_bytes"):  # of open files; of members of archives
        if callable(getattr(image, method, None)):
            return _from_open_file(image, method)
    if isinstance(getattr(image, "content", None), bytes):  # an answer of requests
        return ImageBytes(image.content, str(getattr(image, "url", "(the bytes given)")))
    if _is_array(image):
        values = to_numpy(image)
        if values.ndim == 1 and values.dtype == np.uint8:  # a file as torchvision.io.read_file reads it
            return ImageBytes(values.tobytes(), "(the bytes given)")
        return _from_pil(_from_array(image))
    raise _no_image(type(image).__name__)


def _no_image(kind: str) -> UserError:
    return UserError(
        "An image is a path, an address, bytes, an open file, a PIL image of 8 or 16 bits, or an array or a tensor of "
        "integers up to 255, 16-bit integers, or floats in [0, 1]: [height, width] in grey, [height, width, 3] or "
        f"[3, height, width] in RGB, or with 4 channels in RGBA; not {kind}."
    )


def _from_text(text: str) -> ImageFile:
    """Return the image at a path or an address."""
    require_text(text)
    address = text.lower()
    if address.startswith(("https://", "http://")):
        return _fetch(text)
    if address.startswith("data:"):
        try:
            with urllib.request.urlopen(text) as answer:
                return ImageBytes(answer.read(), f"({text.partition(',')[0]})")
        except (OSError, ValueError) as error:
            raise UserError(f"Image {text[:40]} is no data: URL ({first_line(error)}); give a path.") from error
    if address.startswith("file:"):
        text = _path_of_url(text)
    path = user_path(text, "Image")
    try:
        is_folder = path.is_dir()
    except OSError as error:  # the name is too long
        raise UserError(f"Image {text[:40]}... is no path ({error.strerror}); decode base64 to bytes.") from error
    if is_folder:
        raise UserError(f"{path} is a folder; give one image, or a list of images.")
    return path


def _path_of_url(address: str) -> str:
    """Return the path that a file: URL names on this machine."""
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise UserError(f"Image {address} is no file: URL ({first_line(error)}); give a path.") from error
    if parts.netloc.lower() not in ("", "localhost"):
        raise UserError(
            f"Image {address} names '{parts.netloc}' as a machine; write file:/// and the whole path, or give a path."
        )
    return urllib.request.url2pathname(parts.path)


def require_text(text: str) -> None:
    """Raise a UserError if a text cannot be a path; an empty one would be the working directory."""
    if not text.strip() or "\0" in text:
        raise UserError(f"Image {text!r} is neither a path nor an address; check it.")


def _from_open_file(file: Any, method: str) -> ImageBytes:
    """Read the image in an open file, from its beginning."""
    name = getattr(file, "name", None)
    if not isinstance(name, str):
        name = "(the file given)"
    try:
        if method == "read":
            with contextlib.suppress(AttributeError, OSError):  # a stream that only goes forward
                file.seek(0)
        content = getattr(file, method)()
    except (OSError, ValueError) as error:  # a closed file, text in another encoding
        raise UserError(
            f"Image {name} could not be read ({first_line(error)}); open it again, in mode 'rb'."
        ) from error
    if not isinstance(content, bytes):
        raise UserError(f"Image {name}: the file gives {type(content).__name__}, not bytes; open it in mode 'rb'.")
    return ImageBytes(content, name)


def _from_pil(image: Image.Image) -> ImageBytes:
    """Encode a PIL image as PNG."""
    if image.mode.startswith(("I", "F")) and image.mode not in _PNG_MODES:  # PIL would clip such values at 255
        pixels = _from_array(np.asarray(image))
    else:
        pixels = image
    with reading("The image given", Exception):  # PIL raises many types
        stored = pixels.copy() if pixels.mode in _PNG_MODES else pixels.convert("RGB")
        stored.info = {}  # metadata such as a transparent colour may be invalid in a PNG
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = read_orientation(image)
        stream = io.BytesIO()
        stored.save(stream, "PNG", compress_level=1, exif=exif)
    return ImageBytes(stream.getvalue(), "(the image given)")


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy or of a package that numpy reads, or a tensor."""
    return hasattr(value, "detach") or hasattr(value, "__array__")


def to_numpy(values: Any) -> np.ndarray:
    """Return the values of an array of any package, or of a tensor on any device, as an array of numpy."""
    try:
        if not hasattr(values, "detach"):
            return np.asarray(values)
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.float()  # numpy has no bfloat16
        return values.numpy()
    except (TypeError, ValueError, RuntimeError) as error:  # an array on a GPU, a sparse tensor
        raise UserError(f"{type(values).__name__} is no image ({first_line(error)}); convert it to numpy.") from error


def _from_array(array: Any) -> Image.Image:
    """Make an image of an array or a tensor, see `to_image_file`.

    Where the first and the last axis may be the channels, they are the first one of a tensor and the last of an array.
    """
    values = to_numpy(array)
    kind = f"{getattr(array, 'dtype', values.dtype)} {list(values.shape)}"
    if values.ndim == 3 and values.shape[0] in CHANNELS:
        is_tensor = hasattr(array, "detach")
        if is_tensor or values.shape[2] not in CHANNELS:
            values = values.transpose(1, 2, 0)
    if values.shape[2:] == (1,):
        values = values[:, :, 0]
    if not values.size or values.ndim not in (2, 3) or values.shape[2:] not in ((), (3,), (4,)):
        raise _no_image(kind)
    if values.dtype.kind == "f":
        values = _from_floats(values)
    elif values.dtype.kind in "iu":
        values = _from_integers(values)
    elif values.dtype.kind == "b":
        values = values.astype(np.uint8) * 255
    else:
        raise _no_image(kind)
    return Image.fromarray(np.ascontiguousarray(values))


def _from_floats(values: np.ndarray) -> np.ndarray:
    """Convert floats in [0, 1] to 8-bit values."""
    low = float(values.min())
    high = float(values.max())
    if not 0 <= low <= high <= 1:
        raise UserError(
            f"The float values of an image must lie in [0, 1], and these go from {low:g} to {high:g}; undo the "
            "normalisation, or convert values up to 255 to uint8."
        )
    return np.round(values * 255).astype(np.uint8)


def _from_integers(values: np.ndarray) -> np.ndarray:
    """Convert integers to 8-bit values; 16-bit values keep their upper byte, as in files."""
    low = int(values.min())
    high = int(values.max())
    is_16_bit = values.dtype.itemsize == 2 and values.dtype.kind == "u"
    if low < 0 or high > 65535 or (is_16_bit and high <= 255):
        raise UserError(
            "The integers of an image must lie in 0 .. 255, or in 0 .. 65535 for 16 bits, and these are "
            f"{values.dtype} from {low} to {high}; convert them to uint8."
        )
    if high > 255:
        values = values >> 8
    return values.astype(np.uint8)


def _fetch(address: str) -> ImageBytes:
    """Download the image file at an address."""
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "e2e-vl"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            content = answer.read(MAX_DOWNLOAD + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(
            f"Image {address} could not be fetched ({first_line(error)}); check the address, or download it."
        ) from error
    if len(content) > MAX_DOWNLOAD:
        raise UserError(f"Image {address} has more than {MAX_DOWNLOAD >> 20} MiB; download it and make it smaller.")
    return ImageBytes(content, address)


# Many images


def natural_key(path: Path) -> list[list[Any]]:
    """Return the sort key of natural order: numbers in names count as numbers, and case does not matter."""
    key = []
    for name in path.parts:
        pieces: list[Any] = re.split(r"(\d+)", name.casefold())  # text, digits, text, ...
        pieces[1::2] = map(int, pieces[1::2])
        key.append(pieces)
    return key


def images_in_folder(folder: Path) -> list[Path]:
    """List the image files in a folder and its subfolders in natural order, without hidden ones.

    Raises:
        UserError: there is none.
    """
    return _in_natural_order(folder.rglob("*"), folder, str(folder))


def _in_natural_order(paths: Iterable[Path], base: Path, source: str) -> list[Path]:
    """Return the image files among `paths`, but those hidden below `base`; `source` names them in messages.

    Those of macOS that begin with `._` are no images, see `is_listed`.
    """
    images: list[Path] = []
    hidden: list[Path] = []
    for path in paths:
        if is_listed(path.name, IMAGE_SUFFIXES) and path.is_file():
            if any(part.startswith(".") for part in path.relative_to(base).parts):
                hidden.append(path)
            else:
                images.append(path)
    if hidden:
        logger.warning("%s: skipped %d hidden image files, such as %s.", source, len(hidden), hidden[0])
    if not images:
        raise UserError(f"{source}: no images found; supported suffixes are {', '.join(IMAGE_SUFFIXES)}")
    return sorted(images, key=lambda path: (natural_key(path), path))


def expand_images(images: Any) -> list[Any] | None:
    """Return the images that a value stands for, in order; None: it is one image.

    Args:
        images: a folder; a pattern such as "photos/*.jpg"; a list, an iterator or a series; or a batch, an array or a
            tensor [N, 3, height, width] or [N, height, width, 3]. A list may contain any of these, also lists. A tuple
            is one "image": several images that one text is about.

    Raises:
        UserError: a folder has no image, a pattern fits nothing, or the images have no order.
    """
    if isinstance(images, str | os.PathLike):
        return _expand_path(os.fsdecode(images))
    if isinstance(images, tuple | bytes | bytearray | memoryview | Image.Image | ImageBytes) or hasattr(images, "read"):
        return None
    if _is_array(images):
        return _expand_array(images)
    items = list_items(images)
    if items is None:
        return None
    expanded: list[Any] = []
    for item in items:
        images_of_item = expand_images(item)
        if images_of_item is None:
            expanded.append(item)
        else:
            expanded += images_of_item
    return expanded


def find_images(sources: list[str]) -> list[ImageFile]:
    """Return the images that the arguments of a command name: files, addresses, folders and patterns.

    Raises:
        MissingFileError: a file does not exist; the model is not loaded yet.
    """
    files = [to_image_file(image) for image in expand_images(sources)]
    for file in files:
        if isinstance(file, Path) and not file.exists():
            raise MissingFileError(f"Image {file} does not exist.")
    return files


def list_items(values: Any) -> list[Any] | None:
    """Return the items of a list, a tuple, an iterator or a series, in order; None: it is none of these.

    Raises:
        UserError: the value is a set, which has no order.
    """
    if isinstance(values, set | frozenset):
        raise UserError("A set has no order, so results could not be told apart; give a list.")
    if isinstance(values, str | bytes | bytearray | memoryview | dict | os.PathLike | Image.Image):
        return None
    if hasattr(values, "read") or not isinstance(values, Iterable):
        return None
    if _is_array(values) and len(np.shape(values)) != 1:
        return None
    return list(values)


def _expand_path(text: str) -> list[Path] | None:
    """Return the images of a folder or a pattern; None for anything else."""
    require_text(text)
    if text.lower().startswith("file:"):
        text = _path_of_url(text)
    elif _ADDRESS.match(text):
        return None
    path = user_path(text, "Image")
    try:
        is_folder = path.is_dir()
        exists = path.exists()
    except OSError:  # the name is too long, which `to_image_file` says
        return None
    if is_folder:
        return images_in_folder(path)
    is_pattern = re.search(r"[*?[]", text) is not None and not exists
    return _expand_pattern(path) if is_pattern else None


def _expand_pattern(pattern: Path) -> list[Path]:
    """Return the images that fit a pattern, and those in folders that fit it, in natural order."""
    base = Path(pattern.anchor)
    parts = list(pattern.relative_to(base).parts)
    while (base / parts[0]).exists():  # also a folder with brackets in its name
        base /= parts.pop(0)
    matches = list(base.glob("/".join(parts)))
    if not matches:
        raise UserError(f"{pattern}: no file fits this pattern; check it, or give a folder.")
    paths: dict[Path, None] = {}  # without repetitions: `**` finds a folder and what is in it
    for path in matches:
        inner_paths = path.rglob("*") if path.is_dir() else [path]
        paths |= dict.fromkeys(inner_paths)
    others = [path for path in matches if path.is_file() and path.suffix.lower() not in IMAGE_SUFFIXES]
    if others:
        logger.warning("%s: skipped %d files that are not images, such as %s.", pattern, len(others), others[0])
    return _in_natural_order(paths, base, str(pattern))


def _expand_array(array: Any) -> list[Any] | None:
    """Return the images of a batch, or of a series of images; None for anything else."""
    shape = np.shape(array)
    if len(shape) == 4 and (shape[1] in CHANNELS or shape[3] in CHANNELS):
        return list(array)
    is_series = len(shape) == 1 and not hasattr(array, "detach") and np.asarray(array).dtype.kind in "OUT"
    return expand_images(list(array)) if is_series else None
