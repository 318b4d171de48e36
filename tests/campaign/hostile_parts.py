"""What the builders of hostile files share."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

HUGE = 1 << 40
Builder = Callable[[Path, Path], Path]


class Touch:
    """As a pickle it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def written(name: str, content: bytes) -> Builder:
    def build(folder: Path, canary: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return build


def torch_bytes(content: object, *, is_zip: bool = True) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=is_zip)
    return stream.getvalue()


def rewritten(content: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive whose members went through `change`; None leaves one out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return stream.getvalue()
