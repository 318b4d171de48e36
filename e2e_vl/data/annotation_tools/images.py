"""The images that annotations are about: found by name, with their sizes and EXIF orientations."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np

from detector.errors import MissingFileError
from detector.image_files import AS_STORED, read_header
from e2e_vl.data.annotation_tools.files import list_files

READABLE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_OTHER_SUFFIXES = (".heic", ".heif", ".avif", ".gif", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".nef", ".arw")
_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{8}-")  # Label Studio's
_LOCAL_FILE = re.compile(r"^.*\?d=")  # Label Studio's address of a file that was not uploaded


class UprightImage(NamedTuple):
    """The size and orientation of an image as training sees it: after the EXIF rotation."""

    name: str  # relative to the folder of images
    width: int
    height: int
    orientation: int  # of EXIF, 1 to 8

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)"""
        return self.width, self.height

    @property
    def is_rotated(self) -> bool:
        """Whether the file stores a raster whose sides are swapped."""
        return self.orientation in AS_STORED

    def turn_upright(self, boxes: np.ndarray) -> np.ndarray:
        """Move boxes, xyxy float [R, 4], from the stored raster of a rotated image to the upright image."""
        x1, y1, x2, y2 = np.moveaxis(boxes, -1, 0)
        raster_width = self.height
        raster_height = self.width
        if self.orientation == 5:  # mirrored at the diagonal
            corners = (y1, x1, y2, x2)
        elif self.orientation == 6:  # turned to the right, as most phones store upright photos
            corners = (raster_height - y2, x1, raster_height - y1, x2)
        elif self.orientation == 7:  # mirrored at the other diagonal
            corners = (raster_height - y2, raster_width - x2, raster_height - y1, raster_width - x1)
        else:  # 8: turned to the left
            corners = (y1, raster_width - x2, y2, raster_width - x1)
        return np.stack(corners, axis=-1)


def _normalise(name: str) -> str:
    """Remove from a name what file systems change: capital letters, and how accents are written (macOS splits them)."""
    return unicodedata.normalize("NFC", name).casefold()


def _upload_name(name: str) -> str:
    """Return what an upload to Label Studio (Django) makes of a name: no blanks, brackets or commas."""
    return re.sub(r"[^-\w.]", "", _normalise(name).strip().replace(" ", "_"))


class ImageFolder:
    """The images in a folder and its subfolders, found by the names that annotation files give them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise MissingFileError(f"{path}: no such folder; put the images there, or give their folder as --images.")
        self._read: dict[str, UprightImage] = {}
        self._by_name: dict[str, list[PurePosixPath]] = {}
        self._by_stem: dict[str, list[PurePosixPath]] = {}
        self._by_upload_name: dict[str, list[PurePosixPath]] = {}
        for file in list_files(path, READABLE_SUFFIXES):
            image = PurePosixPath(file.relative_to(path).as_posix())
            self._by_name.setdefault(_normalise(image.name), []).append(image)
            self._by_stem.setdefault(_normalise(image.stem), []).append(image)
            for name in (image.name, image.stem):
                self._by_upload_name.setdefault(_upload_name(name), []).append(image)
        self._in_other_formats: dict[str, list[str]] = {}
        for file in list_files(path, _OTHER_SUFFIXES):
            for name in (file.name, file.stem):
                name_in_folder = file.relative_to(path).as_posix()
                self._in_other_formats.setdefault(_normalise(name), []).append(name_in_folder)

    def candidates(self, name: str) -> list[str]:
        """Return the images that a name, or a name without suffix, may mean: exactly one if its meaning is clear.

        Among several, those that share most folders with the name, and the same capital letters, go first. Label
        Studio's prefix is ignored if necessary: `images\\1/90fbb0c7-mug.jpg` may be mug.jpg.
        """
        *folders, last = PureWindowsPath(name).parts or ("",)  # splits at slashes of both kinds
        local_name = unquote(_LOCAL_FILE.sub("", last))
        spellings = (last, local_name, local_name.partition("?")[0], _UPLOAD_PREFIX.sub("", local_name))
        images: list[PurePosixPath] = []
        for spelling in spellings:
            key = _normalise(PureWindowsPath(spelling).name)
            images = self._by_name.get(key) or self._by_stem.get(key, [])
            if images:
                break
        if not images and _UPLOAD_PREFIX.match(local_name):
            images = self._by_upload_name.get(_normalise(_UPLOAD_PREFIX.sub("", local_name)), [])

        ranks: list[tuple[int, bool]] = []
        for image in images:
            shared_folders = set(folders) & set(image.parts[:-1])
            has_same_capitals = last in (image.name, image.stem)
            ranks.append((len(shared_folders), has_same_capitals))
        best_rank = max(ranks, default=None)
        return [image.as_posix() for image, rank in zip(images, ranks, strict=True) if rank == best_rank]

    def with_another_suffix(self, name: str) -> list[str]:
        """Return the images that a name means but for its suffix, as after a conversion to another format."""
        path = PureWindowsPath(name)
        if path.suffix.lower() not in (*READABLE_SUFFIXES, *_OTHER_SUFFIXES):
            return []
        return self.candidates(str(path.with_suffix("")))

    def in_other_formats(self, name: str) -> list[str]:
        """Return the files of a name, or of a name without suffix, that are images in formats that are not read."""
        return self._in_other_formats.get(_normalise(PureWindowsPath(name).name), [])

    def read(self, name: str) -> UprightImage:
        """Read the size and orientation of an image from the beginning of its file."""
        if name not in self._read:
            header = read_header(self.path / name)
            height, width = header.upright_size
            self._read[name] = UprightImage(name, width, height, header.orientation)
        return self._read[name]

    def size(self, name: str) -> tuple[int, int]:
        """Return (width, height) of an image after the EXIF rotation."""
        return self.read(name).size
