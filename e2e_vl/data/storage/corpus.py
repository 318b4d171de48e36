"""Text corpora: plain text or the official `.doc` files, UTF-8, one sample a line; of any size."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from detector.errors import UserError
from detector.file_faults import reading
from e2e_vl.data.storage.files import require_file
from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index

_VERSION = "lines 1"
_CHUNK = 1 << 20  # bytes read at once while a file is indexed
_LONGEST_LINE = 1 << 24  # bytes
_WHITE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


class TextLines(Sequence):
    """The lines of a UTF-8 text file by their number, without the blank ones; only an index is kept, and that on disk.

    Args:
        path: the file. It is read once, to find the lines and to check its encoding, and never held in memory.
        cache: folder that keeps the index.
        what: names the content in errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not UTF-8 text or has no line with content.
    """

    def __init__(self, path: str | Path, cache: str | Path, what: str = "text") -> None:
        self.path = require_file(path, what)
        index = cached_index([self.path], Path(cache), _VERSION, lambda: _line_starts(self.path, what))
        self._files = OpenFiles()
        self._starts = ArrayFile(index, self._files)
        if not len(self._starts):
            raise UserError(f"{self.path}: the {what} file has no line with content")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> str:
        """One line without white space around it.

        Raises:
            ValueError: the file has changed, or the line is longer than 16 MiB.
        """
        start = int(self._starts[number])
        size = 1 << 12
        while True:
            data = self._files.read(self.path, start, size)
            line, found, _ = data.partition(b"\n")
            if found or len(data) < size:
                break
            size *= 8
            if size > 8 * _LONGEST_LINE:
                raise UserError(
                    f"{self.path}: the line at byte {start} is longer than {_LONGEST_LINE} bytes; one sample is "
                    "expected on each line"
                )
        try:
            return line.decode("utf-8").strip().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: has changed while it was in use (line at byte {start})") from error


def _line_starts(path: Path, what: str) -> Iterator[np.ndarray]:
    """int64 [n]: where lines with something other than ASCII white space begin, a part of the file at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the chunk
    start, has_content = 0, False  # of the line that is not finished yet
    with reading(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            _check_text(decoder, chunk, path, what, position)
            data = np.frombuffer(chunk, dtype=np.uint8)
            ends = np.flatnonzero(data == ord("\n"))
            if len(ends):
                segments = np.concatenate([[0], ends[:-1] + 1])
                counts = np.add.reduceat(~_WHITE[data[: ends[-1] + 1]], segments, dtype=np.int64)
                begins = np.concatenate([[start], position + ends[:-1] + 1])
                counts[0] += has_content
                yield begins[counts > 0]
                start, has_content = position + int(ends[-1]) + 1, False
                data = data[ends[-1] + 1 :]
            has_content = has_content or not _WHITE[data].all()
            position += len(chunk)
    _check_text(decoder, b"", path, what, position)
    if has_content:
        yield np.array([start])


def _check_text(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path, what: str, position: int) -> None:
    try:
        text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the {what} file is not UTF-8 text (near byte {position + error.start}); convert or unpack it"
        ) from error
    if "\0" in text:
        raise UserError(f"{path}: the {what} file holds zero bytes (near byte {position}), so it is no text file")
