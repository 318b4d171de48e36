"""The photos that annotations are about: found by name, with their sizes and EXIF orientations."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.image_files import AS_STORED, read_header
from e2e_vl.data.annotation_tools.files import list_files

PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_OTHER_FORMATS = (".heic", ".heif", ".avif", ".gif", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".nef", ".arw")
_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{8}-")  # Label Studio's
_LOCAL_FILE = re.compile(r"^.*\?d=")  # Label Studio's address of a file that was not uploaded


class Photo(NamedTuple):
    """A photo as training sees it: after the EXIF rotation."""

    name: str  # relative to the folder of photos
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
        """Move boxes, xyxy float [R, 4], from the stored raster of a rotated photo to the upright photo."""
        x1, y1, x2, y2 = np.moveaxis(boxes, -1, 0)
        width, height = self.height, self.width  # of the raster
        if self.orientation == 5:  # mirrored at the diagonal
            corners = (y1, x1, y2, x2)
        elif self.orientation == 6:  # turned to the right, as most phones store upright photos
            corners = (height - y2, x1, height - y1, x2)
        elif self.orientation == 7:  # mirrored at the other diagonal
            corners = (height - y2, width - x2, height - y1, width - x1)
        else:  # 8: turned to the left
            corners = (y1, width - x2, y2, width - x1)
        return np.stack(corners, axis=-1)


def _normalise(name: str) -> str:
    """A name without what file systems change: capital letters, and how accents are written (macOS splits them)."""
    return unicodedata.normalize("NFC", name).casefold()


def _upload_name(name: str) -> str:
    """What an upload to Label Studio (Django) makes of a name: no blanks, brackets or commas."""
    return re.sub(r"[^-\w.]", "", _normalise(name).strip().replace(" ", "_"))


class Photos:
    """The photos in a folder and its subfolders, found by the names that annotation files give them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise MissingFileError(f"{folder}: no such folder; put the photos there, or give their folder as --images.")
        self.files = [PurePosixPath(path.relative_to(folder).as_posix()) for path in list_files(folder, PHOTOS)]
        self._read: dict[str, Photo] = {}
        self._by_name: dict[str, list[PurePosixPath]] = {}
        self._by_stem: dict[str, list[PurePosixPath]] = {}
        self._by_upload: dict[str, list[PurePosixPath]] = {}
        for path in self.files:
            self._by_name.setdefault(_normalise(path.name), []).append(path)
            self._by_stem.setdefault(_normalise(path.stem), []).append(path)
            for written in (path.name, path.stem):
                self._by_upload.setdefault(_upload_name(written), []).append(path)
        self._in_other_formats: dict[str, list[str]] = {}
        for path in list_files(folder, _OTHER_FORMATS):
            for name in (path.name, path.stem):
                name_in_folder = path.relative_to(folder).as_posix()
                self._in_other_formats.setdefault(_normalise(name), []).append(name_in_folder)

    def candidates(self, name: str) -> list[str]:
        """The photos that a name, or a name without suffix, may mean; one if it has one meaning.

        Among several, those that share most folders with the name, and the same capital letters, go first. Label
        Studio's prefix is ignored if necessary: `images\\1/90fbb0c7-mug.jpg` may be mug.jpg.
        """
        *folders, last = PureWindowsPath(name).parts or ("",)  # splits at slashes of both kinds
        local = unquote(_LOCAL_FILE.sub("", last))
        paths: list[PurePosixPath] = []
        for written in (last, local, local.partition("?")[0], _UPLOAD_PREFIX.sub("", local)):
            word = _normalise(PureWindowsPath(written).name)
            paths = self._by_name.get(word) or self._by_stem.get(word, [])
            if paths:
                break
        if not paths and _UPLOAD_PREFIX.match(local):
            paths = self._by_upload.get(_normalise(_UPLOAD_PREFIX.sub("", local)), [])
        ranks: list[tuple[int, bool]] = []
        for path in paths:
            shared_folders = set(folders) & set(path.parts[:-1])
            ranks.append((len(shared_folders), last in (path.name, path.stem)))
        best = max(ranks, default=None)
        return [path.as_posix() for path, rank in zip(paths, ranks, strict=True) if rank == best]

    def with_another_suffix(self, name: str) -> list[str]:
        """The photos that a name means but for its suffix, as after a conversion to another format."""
        path = PureWindowsPath(name)
        is_photo = path.suffix.lower() in (*PHOTOS, *_OTHER_FORMATS)
        return self.candidates(str(path.with_suffix(""))) if is_photo else []

    def in_other_formats(self, name: str) -> list[str]:
        """The files of a name, or of a name without suffix, that are photos in formats that are not read."""
        return self._in_other_formats.get(_normalise(PureWindowsPath(name).name), [])

    def find(self, name: str) -> str:
        """The one photo that a name means, relative to the folder of photos."""
        names = self.candidates(name)
        if len(names) != 1:
            raise UserError(f"{self.folder}: {len(names) or 'no'} photos have the name '{name}'; there must be one.")
        return names[0]

    def read(self, photo: str) -> Photo:
        """Size and orientation of a photo, from the beginning of its file."""
        if photo not in self._read:
            header = read_header(self.folder / photo)
            height, width = header.upright_size
            self._read[photo] = Photo(photo, width, height, header.orientation)
        return self._read[photo]

    def size(self, photo: str) -> tuple[int, int]:
        """(width, height) of a photo after the EXIF rotation."""
        return self.read(photo).size
