"""Files of an export: which ones count, and their text."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from detector.errors import UserError, reading

logger = logging.getLogger(__name__)

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def list_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """The files with these lower-case suffixes, in subfolders too, sorted.

    Hidden files are left out: macOS writes a file `._a.jpg` with attributes of `a.jpg` to other disks and archives.
    """
    paths = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        is_hidden = "__MACOSX" in parts or any(part.startswith(".") for part in parts)
        if path.suffix.lower() in suffixes and not is_hidden and path.is_file():
            paths.append(path)
    return sorted(paths)


def relative_name(path: Path, source: Path) -> str:
    """How messages name a file of an export: relative to the folder that is read."""
    return path.relative_to(source if source.is_dir() else source.parent).as_posix()


def decode_text(path: Path) -> str:
    """Read text as spreadsheets and tools write it: UTF-8, UTF-16 with a byte-order mark, or Windows-1252.

    Text that is not UTF-8 and has no mark of UTF-16 is Windows-1252, which Excel writes in western countries.
    """
    with reading(path, OSError):
        content = path.read_bytes()
    if content.startswith(_UTF16_MARKS):
        with reading(path, UnicodeDecodeError):
            return content.decode("utf-16")
    if b"\0" in content:
        raise UserError(f"{path}: its bytes are no text; save it as text in UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        with reading(path, UnicodeDecodeError):
            text = content.decode("cp1252")
    logger.warning("%s is not in UTF-8 and was read as Windows-1252; save it in UTF-8 if letters are wrong.", path)
    return text
