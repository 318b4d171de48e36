"""Files in folders or in zip archives of any size, named as the official VL-BERT data do: `archive.zip@/member`."""

from __future__ import annotations

import bisect
import hashlib
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index

_VERSION = "zip 1"
_COLUMNS = 4  # hash of the name, offset of the local header, bytes in the archive, method of compression
_LOCAL_HEADER = 30  # bytes before the name


class ArchivedFiles:
    """Reads `folder/archive.zip@/member`: from the archive if it is there, else from the folder of the same name.

    Members are found by an index on disk: the directory of an archive of millions of members would take gigabytes in
    every process. (It is read once, to make the index in the folder `cache`.) Names start from the folder `root`.
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
        """
        archive, marker, member = name.partition("@")
        if not marker:
            if not (self.root / name).is_file():
                raise FileNotFoundError(f"{self.root / name}: there is no such file; it is named as {name}")
            return self.root / name
        member = member.lstrip("/")
        path = self.root / archive
        if path.is_file():
            return path, member
        # parts of an archive (train_frcnn.0.zip ...) are one folder when unpacked
        folders = dict.fromkeys([path.with_suffix(""), path.with_name(re.sub(r"\.\d+$", "", path.stem))])
        for folder in folders:
            if (folder / member).is_file():
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
    try:
        with zipfile.ZipFile(archive) as file:
            members = [member for member in file.infolist() if not member.is_dir()]
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{archive}: no readable zip archive ({error}); get it again") from error
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
            raise ValueError(f"{archive}: {member.filename} is encrypted or compressed in a way that is not supported")
    rows = np.array(
        [(_hash(m.filename), m.header_offset, m.compress_size, m.compress_type) for m in members], dtype=np.int64
    ).reshape(-1, _COLUMNS)
    rows = rows[rows[:, 0].argsort(kind="stable")]
    if (np.diff(rows[:, 0]) == 0).any():
        raise ValueError(f"{archive}: two members have one name; unpack it and name the folder instead")
    yield rows
