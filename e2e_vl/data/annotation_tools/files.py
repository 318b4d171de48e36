"""Files of an export: which ones count, and their names in messages."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


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
