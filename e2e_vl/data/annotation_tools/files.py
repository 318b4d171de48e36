"""Files of an export: which ones count, and their names in messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e_vl.io import files_in


def list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """List the files whose names end with one of the suffixes, in subfolders too, sorted.

    Hidden folders are left out: Jupyter keeps older copies of files in `.ipynb_checkpoints`. So is `__MACOSX`, which
    macOS adds to archives.
    """
    paths = []
    for path in files_in(folder, suffixes):
        folders = path.relative_to(folder).parts[:-1]
        if "__MACOSX" not in folders and not any(name.startswith(".") for name in folders):
            paths.append(path)
    return paths


def relative_name(path: Path, source: Path) -> str:
    """Return the name of a file of an export in messages: relative to the folder that is read."""
    folder = source if source.is_dir() else source.parent
    return path.relative_to(folder).as_posix()
