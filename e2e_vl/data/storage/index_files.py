"""Indices of files that are larger than memory: made by one pass, kept as `.npy` files, read row by row.

Rows are read from the file when they are asked for and never mapped: mapped pages count as memory of a process, and
with random access that would be the whole index after a while. One process makes an index, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import math
import os
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from detector.errors import DiskError, MissingFileError, UserError, reading
from detector.io import take_place

logger = logging.getLogger(__name__)


_PATIENCE = 0.5  # seconds without a word
_BLOCK = 64  # rows that have a checksum together
_LAYOUT = "rows with checksums"


class OpenFiles:
    """Files open for reading in this process, the latest few of many.

    File positions may not be shared with a forked worker, so every process opens its own: `limit` at most.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self._files: dict[Path, BinaryIO] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on; fewer at the end of the file."""
        file = self[path]
        file.seek(offset)
        data = file.read(size)
        while len(data) < size and (more := file.read(size - len(data))):  # one call may give less, on a network disk
            data += more
        return data

    def __getitem__(self, path: Path) -> BinaryIO:
        """The open file; its position is anywhere.

        Raises:
            MissingFileError: it was removed since it was looked for.
        """
        if self._process != os.getpid():
            self._files, self._process = {}, os.getpid()
        file = self._files.pop(path, None)
        if file is None:
            while len(self._files) >= self.limit:
                self._files.pop(next(iter(self._files))).close()
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError as error:
                raise MissingFileError(f"{path}: it was removed while in use; put it back") from error
        self._files[path] = file
        return file


class ArrayFile(Sequence):
    """The rows of a `.npy` file with an int64 array of one or two dimensions, read one by one through `files`.

    Behind the array the file has the CRC-32 of each `_BLOCK` rows, with which the rows are compared when they are read:
    a wrong place would give something else that may look right.

    Raises:
        ValueError: no such array, or a row that is not as it was written.
    """

    def __init__(self, path: Path, files: OpenFiles) -> None:
        self.path = path
        self.files = files
        try:
            with reading(path), path.open("rb") as file:
                version = np.lib.format.read_magic(file)
                read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                shape, fortran, dtype = read_header(file) if read_header else ((), False, None)
                self._offset = file.tell()
                self._row_bytes = 8 * math.prod(shape[1:])
                end = self._offset + self._row_bytes * (shape or (0,))[0]
                number = -(-len(range(*shape[:1])) // _BLOCK)
                is_whole = file.seek(0, io.SEEK_END) == end + 4 * number
                file.seek(end if is_whole else 0)
                self._checks = np.frombuffer(file.read(4 * number), dtype="<u4") if is_whole else None
        except OSError:
            raise
        except Exception as error:  # the header is Python's text, and its parsers raise many kinds of errors
            raise self._broken() from error
        if self._checks is None or not shape or fortran or dtype != np.int64:
            raise self._broken()
        self.shape: tuple[int, ...] = shape

    def _broken(self) -> UserError:
        return UserError(f"{self.path}: not an index as it was written; remove the file, it is made again")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        """int64, the shape of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        block, at = divmod(row, _BLOCK)
        rows = min(_BLOCK, len(self) - block * _BLOCK)
        data = self.files.read(self.path, self._offset + block * _BLOCK * self._row_bytes, rows * self._row_bytes)
        if zlib.crc32(data) != self._checks[block]:
            raise self._broken()
        return np.frombuffer(data, dtype=np.int64).reshape(rows, *self.shape[1:])[at]


def cached_index(
    sources: Sequence[Path], folder: Path, version: str, rows: Callable[[], Iterator[np.ndarray]], columns: int = 0
) -> Path:
    """The `.npy` file with the index of some files; made if it is not there yet.

    Its name tells the paths, sizes and times of the files and the version, so an index never belongs to other content.
    Of several processes that want it at once, one makes it, writes a file of its own and renames it when it is
    complete; the others wait.

    Args:
        version: kind and version of the index.
        rows: yields int64 arrays [n] or [n, columns], the parts of the index.
        columns: 0 for an index of one dimension.

    Raises:
        OSError: the folder cannot be written to; the message says which setting to change.
    """
    parts = [_LAYOUT, version]
    for source in sources:
        status = source.stat()
        parts += [str(source.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    stamp = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
    path = folder / f"{sources[0].name}.{stamp}.npy"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=path.name + ".", suffix=".unfinished", dir=folder)
    except OSError as error:
        raise DiskError(
            f"{folder}: the index of {sources[0]} cannot be kept there ({error.strerror}); set data.config.cache to a "
            "folder that can be written to"
        ) from error
    try:
        with one_process(path, f"the index of {sources[0]}"), os.fdopen(handle, "wb") as file:
            if not path.is_file():  # else another process has made it meanwhile
                _write(file, with_progress(rows(), f"indexing {sources[0].name}"), columns)
                file.close()
                take_place(Path(unfinished), path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def one_process(path: Path, what: str) -> Iterator[None]:
    """Waits until no other process holds the lock of this file, and says so if that takes long.

    The lock ends with its process, so that a kill leaves none behind.

    Args:
        path: the file that is about to be made; its lock lies beside it.
        what: names it for the user.
    """
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        logger.info("%s: another process is making %s; waiting for it.", path.parent, what)
        with tqdm(desc=f"waiting for another process, which makes {what}", bar_format="{desc}: {elapsed}") as bar:
            while not lock.is_locked:
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=1)
                bar.update()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            Path(lock.lock_file).unlink()
        lock.release()


def with_progress(parts: Iterator[np.ndarray], name: str) -> Iterator[np.ndarray]:
    """The parts of an index, with a bar that counts their rows."""
    first = next(parts, None)  # who makes all in one piece shows a bar of its own before it
    if first is None:
        return
    with tqdm(desc=name, unit=" records", unit_scale=True, delay=1, leave=False) as bar:
        for part in itertools.chain([first], parts):
            yield part
            bar.update(len(part))


def _write(file: BinaryIO, rows: Iterator[np.ndarray], columns: int) -> None:
    """The header holds the number of rows, so it is written again at the end; numpy leaves room for more digits."""
    count, checks, left = 0, array("I"), b""
    size = 8 * _BLOCK * max(columns, 1)
    for is_complete in (False, True):
        file.seek(0)
        shape = (count, columns) if columns else (count,)
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
        if is_complete:
            break
        for part in rows:
            data = np.ascontiguousarray(part, dtype="<i8").tobytes()
            file.write(data)
            count += len(part)
            data = memoryview(left + data)
            whole = len(data) // size * size
            checks.extend(zlib.crc32(data[at : at + size]) for at in range(0, whole, size))
            left = bytes(data[whole:])
        file.write(np.array([*checks, *([zlib.crc32(left)] if left else [])], dtype="<u4").tobytes())
