"""Files in folders or in zip archives of any size, named as the official VL-BERT data do: `archive.zip@/member`."""

from __future__ import annotations

import bisect
import hashlib
import re
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError, reading
from detector.zip_directory import (
    LOCAL_HEADER,
    DamagedZipError,
    Directory,
    check_entry,
    content_start,
    find_directory,
    inflate,
    read_entries,
)
from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index
from e2e_vl.io import inside

_VERSION = "zip 4"
_COLUMNS = 6  # hash of the name, offset of the local header, packed bytes, method of packing, CRC-32, latest end
LARGEST_MEMBER = 1 << 28  # bytes of one unpacked image or JSON file
_PART = 1 << 16  # rows


class ArchivedFiles:
    """Reads `folder/archive.zip@/member`: from the archive if it is there, else from the folder of the same name.

    Members are found by an index on disk, in the folder `cache`: the directory of an archive of millions of members
    would take gigabytes in every process. Names start from the folder `root`.
    """

    def __init__(self, root: str | Path, cache: str | Path) -> None:
        self.root = Path(root)
        self.cache = Path(cache)
        self._files = OpenFiles()
        self._indices: dict[Path, ArrayFile] = {}

    def find(self, name: str) -> Path | tuple[Path, str]:
        """A file, or an archive and its member.

        Raises:
            MissingFileError: neither archive nor file is there.
            UserError: a name that leads out of the root, or out of the archive.
        """
        archive, marker, member = name.partition("@") if isinstance(name, str) else (name, "", "")
        path = inside(self.root, archive, follows_links=True)
        if not marker:
            if not path.is_file():
                raise MissingFileError(f"{path}: there is no such file; it is named as {name}")
            return path
        member = member.lstrip("/")
        inside(self.root, member, f"{path}, member", follows_links=True)  # also where the archive is unpacked
        if path.is_file():
            return path, member
        # parts of an archive (train_frcnn.0.zip ...) are one folder when unpacked
        folders = dict.fromkeys([path.with_suffix(""), path.with_name(re.sub(r"\.\d+$", "", path.stem))])
        for folder in folders:
            if inside(folder, member, follows_links=True).is_file():
                return folder / member
        raise MissingFileError(
            f"{path}: no such archive, and {path.with_suffix('') / member} is no file either; check where the data are"
        )

    def read(self, name: str) -> bytes:
        """Content of a file.

        Raises:
            MissingFileError: no such file or member.
            UserError: an archive or member that is damaged or compressed in an unknown way; that includes content that
                is not what was packed (CRC-32).
        """
        found = self.find(name)
        if not isinstance(found, Path):
            return self._read_member(*found)
        with reading(found):
            return found.read_bytes()

    def prepare(self, name: str) -> None:
        """Make the index of the archive of a file, and of the archive's other parts, before a worker wants it."""
        archive, marker, _ = name.partition("@") if isinstance(name, str) else (name, "", "")
        path = inside(self.root, archive, follows_links=True)
        if marker and path.is_file():
            stem = re.sub(r"\.\d+$", "", path.stem)
            parts = [one for one in path.parent.iterdir() if re.fullmatch(rf"{re.escape(stem)}(\.\d+)?\.zip", one.name)]
            for one in sorted({path, *parts}):
                self._index(one)

    def _read_member(self, archive: Path, member: str) -> bytes:
        index = self._index(archive)
        wanted = _hash(member)
        place = bisect.bisect_left(index, wanted, key=lambda row: row[0])
        row = index[place] if place < len(index) else None
        if row is None or row[0] != wanted:
            raise MissingFileError(f"{archive}: has no member {member}; get the archive again")
        try:
            return self._content(archive, member, row)
        except DamagedZipError as error:
            raise UserError(
                f"{archive}: the member {member} cannot be read ({error}); get the archive again"
            ) from error

    def _content(self, archive: Path, member: str, row: np.ndarray) -> bytes:
        _, header, size, method, checksum, end = map(int, row)
        if size > LARGEST_MEMBER:
            raise DamagedZipError(f"it has {size} bytes; {LARGEST_MEMBER} are the most")
        start = content_start(self._files[archive], header, member, method)
        if start + size > end:
            raise DamagedZipError("it overlaps what comes behind it")
        data = self._files.read(archive, start, size)
        if len(data) < size:
            raise DamagedZipError("it is cut off")
        content = data if method == zipfile.ZIP_STORED else inflate(data, LARGEST_MEMBER)
        if zlib.crc32(content) != checksum:
            raise DamagedZipError("it is not as it was packed: its checksum differs")
        return content

    def _index(self, archive: Path) -> ArrayFile:
        if archive not in self._indices:
            path = cached_index([archive], self.cache, _VERSION, lambda: _rows(archive), _COLUMNS)
            self._indices[archive] = ArrayFile(path, self._files)
        return self._indices[archive]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest(), "big", signed=True)


def _rows(archive: Path) -> Iterator[np.ndarray]:
    """int64 [n, 6], sorted by the hash of the name."""
    try:
        with archive.open("rb") as file:
            directory = find_directory(file)
            rows = _found(file, directory, f"indexing {archive.name}")
            rows = rows[rows[:, 1].argsort(kind="stable")]
            rows[:, 5] = np.append(rows[1:, 1], directory.offset)
            overlaps = np.flatnonzero(rows[:, 1] + LOCAL_HEADER + rows[:, 2] > rows[:, 5])
            if len(overlaps):
                raise DamagedZipError(f"{_name(file, directory, rows[overlaps[0]])!r} overlaps what comes behind it")
            rows = rows[rows[:, 0].argsort(kind="stable")]
            same = np.flatnonzero(np.diff(rows[:, 0]) == 0)
            if len(same):
                raise DamagedZipError(f"two members have the name {_name(file, directory, rows[same[0]])!r}")
    except (DamagedZipError, OSError, OverflowError, struct.error) as error:
        raise UserError(f"{archive}: no readable zip archive ({error}); get it again") from error
    yield from np.array_split(rows, len(rows) // _PART + 1)


def _found(file: BinaryIO, directory: Directory, title: str) -> np.ndarray:
    """int64 [n, 6], in the order of the directory; the last column is not known yet."""
    found = array("q")
    with tqdm(total=directory.count, desc=title, unit=" files", unit_scale=True, delay=1, leave=False) as bar:
        for entry in read_entries(file, directory):
            bar.update()
            if entry.name.endswith("/"):  # a folder
                continue
            check_entry(entry, directory)
            place = entry.header + directory.shift
            found.extend((_hash(entry.name), place, entry.packed, entry.method, entry.checksum, 0))
    return np.frombuffer(found, dtype=np.int64).reshape(-1, _COLUMNS)


def _name(file: BinaryIO, directory: Directory, row: np.ndarray) -> str:
    """The name of a member, which its row does not have."""
    return next(entry.name for entry in read_entries(file, directory) if _hash(entry.name) == row[0])
