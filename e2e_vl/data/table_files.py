"""Tables: arrays that one process makes from files, and that all others, and later starts, map to memory.

A table is a file with the arrays one after the other, then a header in MessagePack, the header's size and a checksum of
everything. Its stamp tells what it was made from. A table that is stale, truncated or damaged is made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from filelock import FileLock

from detector.errors import MissingFileError
from detector.io import atomic_file, map_file
from detector.logs import OnceFilter

logger = logging.getLogger(__name__)
logger.addFilter(OnceFilter())

MIN_SOURCE_BYTES = 2**25  # of annotation files; smaller ones are read in half a second

MakeArrays = Callable[[], Sequence[np.ndarray]]


class _SourceState(NamedTuple):
    """By what a source is recognised as unchanged."""

    size: int  # bytes
    # of the last change, in nanoseconds; of a folder: a hash of the names, sizes and times of its files
    time: int | str


_ALIGNMENT = 64  # bytes, of the arrays
_HEADER_SIZE = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<L")  # CRC-32


class _Warning(msgspec.Struct, array_like=True):
    logger: str
    message: str
    once: str | None  # see `OnceFilter`


class _Header(msgspec.Struct):
    stamp: list[Any]  # what the arrays were made from: the readers' code, the settings, sizes and times of the sources
    layout: list[tuple[str, tuple[int, ...]]]  # dtype and shape of each array
    warnings: list[_Warning]  # of reading the sources


def tabulate(sources: Sequence[Path], folder: Path | None, kind: Sequence[Any], make: MakeArrays) -> list[np.ndarray]:
    """Return what `make` makes from annotation files, with the help of a table if the files are large together.

    If the table cannot be written, `make` is called in every process, and a warning says so.

    Args:
        sources: the files, or folders of files.
        folder: of the table; None: there is none.
        kind: names what is made and the settings that shape it: plain values.
    """
    made: list[np.ndarray] = []

    def make_once() -> list[np.ndarray]:
        made.extend(make())
        return made

    try:
        if folder is not None:
            states = [_find_state(source) for source in sources]
            if sum(state.size for state in states) >= MIN_SOURCE_BYTES:
                return _open_table(sources, states, folder, kind, make_once)
    except FileNotFoundError:
        pass  # `make` names the missing file
    except (OSError, NotImplementedError) as error:  # the latter is a file system without locks
        logger.warning(
            "%s: no table of %s can be written here (%s), so every process reads the file at every start; make the "
            "folder writable for one start.",
            folder,
            sources[0],
            error,
            extra={"once": str(folder)},
        )
    return made or make_once()


def open_table(sources: Sequence[Path], folder: Path, kind: Sequence[Any], make: MakeArrays) -> list[np.ndarray]:
    """Return arrays that are made from files, memory-mapped from a table in `folder`.

    One process makes the table, and others wait for it. Warnings of the making are logged at every start.

    Args:
        sources, kind: see `tabulate`.

    Raises:
        OSError: the table cannot be written.
    """
    return _open_table(sources, [_find_state(source) for source in sources], folder, kind, make)


def _find_state(source: Path) -> _SourceState:
    status = source.stat()
    if not source.is_dir():
        return _SourceState(status.st_size, status.st_mtime_ns)
    size = 0
    lines = []
    for entry in _list_files(str(source.resolve())):
        status = entry.stat()
        size += status.st_size
        lines.append(f"{status.st_size} {status.st_mtime_ns} {entry.path}")
    content = "\n".join(sorted(lines)).encode("utf-8", "surrogateescape")
    return _SourceState(size, hashlib.sha256(content).hexdigest())


def _list_files(folder: str) -> Iterator[os.DirEntry]:
    """Yield the files of a folder and its subfolders, in any order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _list_files(entry.path)
            else:
                yield entry


def _open_table(
    sources: Sequence[Path], states: Sequence[_SourceState], folder: Path, kind: Sequence[Any], make: MakeArrays
) -> list[np.ndarray]:
    """Open a table like `open_table`; `states` are those of the sources."""
    paths = [str(source.resolve()) for source in sources]
    identity = msgspec.json.encode([kind, paths])
    path = folder / f"{sources[0].name}.{hashlib.sha256(identity).hexdigest()[:20]}.table"
    stamp: list[Any] = [_hash_readers(), identity.decode()]
    for state in states:
        stamp += state
    table = _read(path, stamp)
    if table is None:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            table = _read(path, stamp)  # another process may have written it
            if table is None:
                return _make(path, stamp, make)
    header, arrays = table
    for warning in header.warnings:
        logging.getLogger(warning.logger).warning("%s", warning.message, extra={"once": warning.once})
    return arrays


@functools.cache
def _hash_readers() -> str:
    """Hash the source code of all readers: other code may make something else of the same files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, stamp: list[Any]) -> tuple[_Header, list[np.ndarray]] | None:
    """Map a table to memory; None if it is missing, stale or damaged."""
    try:
        content = memoryview(map_file(path))
    except MissingFileError:
        return None
    header_end = len(content) - _HEADER_SIZE.size - _CHECKSUM.size
    checked_end = len(content) - _CHECKSUM.size
    if header_end < 0 or (zlib.crc32(content[:checked_end]),) != _CHECKSUM.unpack(content[checked_end:]):
        logger.warning("%s: damaged or truncated; it is made again.", path)
        return None
    (header_size,) = _HEADER_SIZE.unpack(content[header_end:checked_end])
    header = msgspec.msgpack.decode(content[header_end - header_size : header_end], type=_Header)
    if header.stamp != stamp:
        return None
    arrays: list[np.ndarray] = []
    position = 0
    for code, shape in header.layout:
        dtype = np.dtype(code)
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(content, dtype, count, position).reshape(shape))
        position += count * dtype.itemsize
        position += -position % _ALIGNMENT
    return header, arrays


def _make(path: Path, stamp: list[Any], make: MakeArrays) -> list[np.ndarray]:
    """Make and write a table; its arrays are returned from the file, which other processes share."""
    with _recording_warnings() as warnings:
        arrays = make()
    layout = [(array.dtype.str, array.shape) for array in arrays]
    header = msgspec.msgpack.encode(_Header(stamp, layout, warnings))
    with atomic_file(path) as part:
        with part.open("wb") as file:
            for array in arrays:
                file.write(np.ascontiguousarray(array).data)
                file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(header + _HEADER_SIZE.pack(len(header)))
        checksum = zlib.crc32(map_file(part))
        with part.open("ab") as file:
            file.write(_CHECKSUM.pack(checksum))
    _, mapped_arrays = _read(path, stamp)
    return mapped_arrays


@contextlib.contextmanager
def _recording_warnings() -> Iterator[list[_Warning]]:
    """Yield a list to which all warnings that are logged in this context are added."""
    warnings: list[_Warning] = []
    handler = logging.Handler(logging.WARNING)

    def record_warning(record: logging.LogRecord) -> None:
        warnings.append(_Warning(record.name, record.getMessage(), getattr(record, "once", None)))

    handler.emit = record_warning
    logging.getLogger().addHandler(handler)
    try:
        yield warnings
    finally:
        logging.getLogger().removeHandler(handler)
