"""Files in folders or in zip archives of any size, named as the official VL-BERT data do: `archive.zip@/member`."""

from __future__ import annotations

import bisect
import hashlib
import io
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

from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index
from e2e_vl.file_names import inside

_VERSION = "zip 1"
_COLUMNS = 4  # hash of the name, offset of the local header, bytes in the archive, method of compression
_LOCAL_HEADER = 30  # bytes before the name
_ENTRY = struct.Struct("<4s4x2H8x2L3H8xL")  # of the directory: signature, flags, method, sizes, lengths, offset
_END = struct.Struct("<4s6xH2L2x")  # of the directory: signature, entries, its bytes and its offset
_END_64 = struct.Struct("<4s28x3Q")  # the same of archives of more than 65,535 members or 4 GiB
_LOCATOR_64 = struct.Struct("<4s4xQ4x")  # where that is; stands before the other one
_LONGEST_COMMENT = 1 << 16
_CHUNK = 1 << 22  # bytes of the directory that are read at once
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
            FileNotFoundError: neither archive nor file is there.
            UserError: a name that leads out of the root, or out of the archive.
        """
        archive, marker, member = name.partition("@") if isinstance(name, str) else (name, "", "")
        path = inside(self.root, archive, follows_links=True)
        if not marker:
            if not path.is_file():
                raise FileNotFoundError(f"{path}: there is no such file; it is named as {name}")
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
        raise FileNotFoundError(
            f"{path}: no such archive, and {path.with_suffix('') / member} is no file either; check where the data are"
        )

    def read(self, name: str) -> bytes:
        """Content of a file.

        Raises:
            FileNotFoundError: no such file or member.
            ValueError: an archive or member that is damaged or compressed in an unknown way.
        """
        found = self.find(name)
        return found.read_bytes() if isinstance(found, Path) else self._read_member(*found)

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
            raise FileNotFoundError(f"{archive}: has no member {member}; get the archive again")
        _, header_offset, size, method = (int(value) for value in row)
        header = self._files.read(archive, header_offset, _LOCAL_HEADER)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        data = self._files.read(archive, header_offset + _LOCAL_HEADER + name_length + extra_length, size)
        if method == zipfile.ZIP_STORED:
            return data
        try:
            return zlib.decompress(data, -zlib.MAX_WBITS)
        except zlib.error as error:
            raise ValueError(f"{archive}: the member {member} is damaged ({error}); get the archive again") from error

    def _index(self, archive: Path) -> ArrayFile:
        if archive not in self._indices:
            path = cached_index([archive], self.cache, _VERSION, lambda: _rows(archive), _COLUMNS)
            self._indices[archive] = ArrayFile(path, self._files)
        return self._indices[archive]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest(), "big", signed=True)


def _rows(archive: Path) -> Iterator[np.ndarray]:
    """int64 [n, 4], sorted by the hash of the name."""
    found = array("q")
    try:
        with archive.open("rb") as file:
            offset, size, count, shift = _directory(file)
            bar = tqdm(
                total=count, desc=f"indexing {archive.name}", unit=" files", unit_scale=True, delay=1, leave=False
            )
            with bar:
                for name, flags, method, packed, header in _entries(file, offset, size, count):
                    bar.update()
                    if name.endswith("/"):  # a folder
                        continue
                    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or flags & 1:
                        raise ValueError(f"{archive}: {name} is encrypted or compressed in a way that is not supported")
                    found.extend((_hash(name), header + shift, packed, method))
    except (_NoArchiveError, OSError) as error:
        raise ValueError(f"{archive}: no readable zip archive ({error}); get it again") from error
    rows = np.frombuffer(found, dtype=np.int64).reshape(-1, _COLUMNS)
    rows = rows[rows[:, 0].argsort(kind="stable")]
    if (np.diff(rows[:, 0]) == 0).any():
        raise ValueError(f"{archive}: two members have one name; unpack it and name the folder instead")
    yield from np.array_split(rows, len(rows) // _PART + 1)


class _NoArchiveError(Exception):
    """Why a file is no zip archive."""


def _directory(file: BinaryIO) -> tuple[int, int, int, int]:
    """Offset and bytes of the directory at the end of an archive, its entries, and the bytes before the archive.

    (`zipfile` makes an object of 600 bytes for each of millions of entries.)
    """
    length = file.seek(0, io.SEEK_END)
    before = max(length - _END.size - _LONGEST_COMMENT, 0)
    file.seek(before)
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise _NoArchiveError("it has no directory of its members")
    _, count, size, offset = _END.unpack_from(tail, at)
    end = before + at
    if at >= _LOCATOR_64.size and tail.startswith(b"PK\6\7", at - _LOCATOR_64.size):
        _, place = _LOCATOR_64.unpack_from(tail, at - _LOCATOR_64.size)
        file.seek(place)
        large = file.read(_END_64.size)
        if len(large) < _END_64.size or not large.startswith(b"PK\6\6"):
            raise _NoArchiveError("the directory of its members is damaged")
        _, count, size, offset = _END_64.unpack(large)
        end = place
    shift = end - size - offset
    if shift < 0:
        raise _NoArchiveError("the directory of its members is cut off")
    return offset + shift, size, count, shift


def _entries(file: BinaryIO, offset: int, size: int, count: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Name, flags, method of compression, bytes in the archive and offset of the local header of every member."""
    file.seek(offset)
    left, window, at = size, b"", 0
    for _ in range(count):
        while len(window) - at < _ENTRY.size + 3 * _LONGEST_COMMENT and left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise _NoArchiveError("the directory of its members is cut off")
            window, at, left = window[at:] + chunk, 0, left - len(chunk)
        if len(window) - at < _ENTRY.size:
            raise _NoArchiveError("the directory of its members is cut off")
        signature, flags, method, packed, whole, name_length, extra_length, comment_length, header = _ENTRY.unpack_from(
            window, at
        )
        if signature != b"PK\1\2":
            raise _NoArchiveError("the directory of its members is damaged")
        first = at + _ENTRY.size
        name = window[first : first + name_length].decode("utf-8" if flags & 0x800 else "cp437", "replace")
        extra = window[first + name_length : first + name_length + extra_length]
        packed, header = _large(extra, whole, packed, header)
        at = first + name_length + extra_length + comment_length
        yield name, flags, method, packed, header


def _large(extra: bytes, whole: int, packed: int, header: int) -> tuple[int, int]:
    """Bytes in the archive and offset of a member, which stand apart if they take more than 32 bits."""
    limit = 0xFFFFFFFF
    if limit not in (whole, packed, header):
        return packed, header
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            found = [numbers.pop(0) if value == limit and numbers else value for value in (whole, packed, header)]
            return found[1], found[2]
        at += 4 + length
    return packed, header
