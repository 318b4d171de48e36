"""Reading `.npy` content and `.npz` files without trusting what they claim.

numpy gives an array as much memory as its header says, and unpacks an archive of any size. Here sizes are compared with
the bytes that are there before anything is read, and arrays hold numbers or, as single values, text.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.zip_directory import DamagedZipError, read_member, read_members

MOST_ARRAYS = 64  # of a file
LONGEST_HEADER = 10_000  # characters, numpy's own limit
MOST_DIMENSIONS = 32

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(
    file: Path | BinaryIO, where: str | None = None, *, only: tuple[str, ...] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file by name.

    Args:
        file: a path, or an open file.
        where: names an open file in errors.
        only: the arrays to read, if they are there; None: all.

    Raises:
        MissingFileError: no such file.
        UserError: it is damaged, cut off, claims more than it holds, or has arrays of other things than numbers and
            text.
    """
    where = where or str(file)
    try:
        if isinstance(file, Path):
            with file.open("rb") as opened:
                return _read(opened, only)
        return _read(file, only)
    except FileNotFoundError as error:
        raise MissingFileError(f"{where}: there is no such file of arrays") from error
    except (DamagedZipError, ValueError, OSError, EOFError, MemoryError, OverflowError) as error:
        raise UserError(f"{where}: no readable file of arrays ({str(error)[:200]}); make or copy it again") from error


def read_npy(path: Path) -> np.ndarray:
    """Read the array of numbers in a `.npy` file; it may be written to.

    Raises:
        MissingFileError: no such file.
        UserError: it is damaged, cut off, claims more than it holds, or holds other things than numbers.
    """
    try:
        values = _array(path.read_bytes(), "of the file")
        if values.dtype.kind == "U":
            raise ValueError("it holds text")
        return values
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no such array") from error
    except (ValueError, OSError, EOFError, MemoryError, OverflowError) as error:
        raise UserError(f"{path}: no readable array ({str(error)[:200]}); make or copy it again") from error


def _read(file: BinaryIO, only: tuple[str, ...] | None) -> dict[str, np.ndarray]:
    members = read_members(file, MOST_ARRAYS)
    arrays = {}
    for name, member in members.items():
        key = name.removesuffix(".npy")
        if key in arrays:
            raise ValueError(f"it has two arrays of the name {key}")
        if only is None or key in only:
            arrays[key] = _array(read_member(file, member), key)
    return arrays


def _array(content: bytes, name: str) -> np.ndarray:
    """The array in the content of a `.npy` file; it may be written to."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"the array {name!r} has the unknown version {version}")
    try:
        shape, is_fortran, dtype = _HEADERS[version](stream, max_header_size=LONGEST_HEADER)
    except Exception as error:  # the header is Python's text, and its parsers raise many kinds of errors
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"the header of the array {name!r} is damaged: {reason}") from error
    is_text = dtype.kind == "U" and shape == ()
    if dtype.kind not in "biuf" and not is_text:
        raise ValueError(f"the array {name!r} holds {dtype} and no numbers")
    if len(shape) > MOST_DIMENSIONS or any(number < 0 for number in shape):
        raise ValueError(f"the array {name!r} has the shape {list(shape)[:8]}")
    room = len(content) - stream.tell()
    if math.prod(shape) * dtype.itemsize != room:
        raise ValueError(f"the array {name!r} claims the shape {list(shape)}, but has {room} bytes")
    values = np.frombuffer(content, dtype, offset=stream.tell()) if room else np.zeros(0, dtype)
    return values.reshape(shape, order="F" if is_fortran else "C").copy()
