"""Looking at the headers of a tar file before `tarfile` reads it.

`tarfile` reads as many bytes as a header of extended names claims, searches them with regular expressions that take
hours for some texts, and follows a chain of such headers by recursion. A sparse member may have any size it likes, also
a negative one, whatever the file holds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

from detector.errors import UserError
from detector.reading import reading

BLOCK = 512
LONGEST_EXTENSION = 1 << 16  # bytes of a header of extended names or times; names are a few hundred bytes long
MOST_EXTENSIONS = 8  # of one member
_EXTENSIONS = b"xgXLK"
_SPARSE = b"S"
_STRANGE = re.compile(rb" size=|GNU\.sparse|[0-9]{200}")
_FIELD = slice(124, 136)  # the size of a member
_KIND = 156


def check_tar(path: Path, remedy: str) -> None:
    """Follow the headers of a tar file up to its end or to one that is damaged, which `tarfile` names.

    Args:
        path: the file.
        remedy: the end of the sentence.

    Raises:
        UserError: a member claims to be longer than the file, or has extended headers that are long, many or strange.
    """
    with reading(path), path.open("rb") as file:
        problem = _find_problem(file, path.stat().st_size)
    if problem is not None:
        raise UserError(f"{path}: no readable tar file ({problem}); {remedy}")


def _find_problem(file: BinaryIO, length: int) -> str | None:
    position, extensions = 0, 0
    while position + BLOCK <= length:
        header, where = _read(file, position, BLOCK), f"the member at byte {position}"
        size, kind = _size(header[_FIELD]), header[_KIND : _KIND + 1]
        if size is None or not header.strip(b"\0"):
            return None
        position += BLOCK
        if size < 0:
            return f"{where} claims {size} bytes; it is damaged"
        if size > length - position:
            return f"{where} claims {size} bytes, more than there are; it is cut off or damaged"
        is_extension = kind in _EXTENSIONS
        extensions = extensions + 1 if is_extension else 0
        if kind == _SPARSE or extensions > MOST_EXTENSIONS or (is_extension and size > LONGEST_EXTENSION):
            return f"{where} has extended headers that no image or caption needs"
        if is_extension and _STRANGE.search(_read(file, position, size)):
            return f"{where} has an extended header that states a size, gaps or a very long number"
        position += -(-size // BLOCK) * BLOCK
    return None


def _read(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _size(field: bytes) -> int | None:
    """A number of octal digits, or of bytes behind a first one of 128 (255 if it is negative); None: it is none."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.split(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None
