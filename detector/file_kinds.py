"""Name what a file is that stands where another one is expected, by its first bytes, for error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

KIND_BYTES = 64  # that tell the kind

# Kind -> expression for the first bytes: what failed downloads and clones leave, and common formats.
OTHER_KINDS = {
    "an empty file": rb"\Z",
    "an HTML page": rb"\s*(<!doctype html|<html)",
    "a pointer of Git LFS, without the file itself": rb"version https://git-lfs",
    "a compressed file, to be unpacked first": rb"\x1f\x8b|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ",
    "an HDF5 file": rb"\x89HDF",
    "a PDF": rb"%PDF",
}


def read_start(path: Path) -> bytes:
    """Read the first bytes of a file, which tell its kind."""
    with path.open("rb") as file:
        return file.read(KIND_BYTES)


def name_kind(content: bytes, kinds: Mapping[str, bytes] = OTHER_KINDS) -> str | None:
    """Name the first kind whose expression matches the first bytes of a file; None: unknown."""
    for kind, pattern in kinds.items():
        if re.match(pattern, content[:KIND_BYTES], re.DOTALL | re.IGNORECASE):
            return kind
    return None
