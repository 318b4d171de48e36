"""Reading pickles of numpy arrays without running any code in them.

Detectron2's `.pkl` files are pickles, and a pickle may name any function to be called. Here only numbers, strings,
plain containers and numeric numpy arrays are allowed, and the classes below rebuild the arrays from their bytes: no
function named by the file is called, and neither is numpy's own unpickling, which trusts the file about memory.
`detector.pickle_scan` looks at the opcodes before that.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from detector.errors import MissingFileError, UserError
from detector.pickle_scan import DamagedPickleError, check_pickle_file

NUMERIC_KINDS = "biuf"  # bool, signed, unsigned, float
LONGEST_SCALAR = 32  # bytes of one number of numpy
SMALL = 1 << 20  # bytes that every file may copy ...
COPIES = 4  # ... and that it may copy per byte of its own: text to bytes, and bytes to an array


class _Dtype:
    """Stands for `numpy.dtype`; accepts numeric types only."""

    def __init__(self, code: str | bytes, align: object = False, copy: object = False) -> None:
        name = code.decode("ascii") if isinstance(code, bytes) else code
        dtype = np.dtype(name) if isinstance(name, str) and name[:1] not in "OV" else None
        if dtype is None or dtype.kind not in NUMERIC_KINDS:
            raise pickle.UnpicklingError(f"an array of type {code!r}")
        self.value = dtype

    def __setstate__(self, state: tuple) -> None:
        order = state[1]
        self.value = self.value.newbyteorder(order.decode("ascii") if isinstance(order, bytes) else order)


class _Array:
    """Stands for `numpy.ndarray` while it is rebuilt; its numbers are copied when the whole file is known."""

    def __init__(self, *_: object) -> None:
        self.state: tuple | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, is_fortran, data = state
        self.state = (data, dtype, shape, "F" if is_fortran else "C")

    @property
    def value(self) -> np.ndarray:
        if self.state is None:
            raise pickle.UnpicklingError("an array without content")
        return _to_array(*self.state)


class _OrderedDict(dict):
    """Stands for `collections.OrderedDict`; attributes of the dict are left out."""

    def __setstate__(self, state: object) -> None:
        pass


def _to_array(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("an array without a type")
    if any(number < 0 for number in shape):
        raise pickle.UnpicklingError(f"an array of the shape {list(shape)[:8]}")
    raw = data.encode("latin1") if isinstance(data, str) else bytes(data)  # Python 2 writes bytes as a str
    return np.frombuffer(raw, dtype.value).reshape(shape, order=order).copy()


def _from_buffer(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.state = (data, dtype, shape, order)
    return array


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError("an array of an unknown class")
    return _Array()


def _scalar(dtype: Any, data: Any) -> np.generic:
    if len(data) > LONGEST_SCALAR:
        raise pickle.UnpicklingError(f"a number of {len(data)} bytes")
    return _to_array(data, dtype, (), "C")[()]


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("__builtin__", "bytes"): lambda: b"",  # empty ones, as Python 3 writes them for Python 2
}
for _core in ("numpy.core", "numpy._core"):  # numpy renamed it in version 2
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _reconstruct
    _ALLOWED[f"{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _from_buffer


class _Unpickler(pickle.Unpickler):
    """Builds plain things, and not many more of them than `size` bytes of a file can hold.

    What one opcode copies is counted: a file may name one string of a megabyte again and again.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, encoding="latin1")
        self.budget = SMALL + COPIES * size

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return self._encode
        if (module, name) == ("collections", "OrderedDict"):
            return self._ordered
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _ALLOWED[module, name]

    def persistent_load(self, saved: object) -> Any:
        raise pickle.UnpicklingError("a reference to something outside of it")

    def plain(self, value: Any, done: dict[int, Any]) -> Any:
        """The value with arrays in place of their stand-ins.

        `done` holds what every container became, by its id: one that is named twice is not copied twice, or a few
        hundred bytes could fill the memory.
        """
        if not isinstance(value, _Array | dict | list | tuple):
            return value
        if id(value) not in done:
            done[id(value)] = None  # in the place of a container inside itself
            if isinstance(value, _Array):
                self._spend(len(value.state[0]) if value.state else 0)
                done[id(value)] = value.value
            elif isinstance(value, dict):
                items = value.items()
                done[id(value)] = {self.plain(key, done): self.plain(item, done) for key, item in items}
            else:
                done[id(value)] = [self.plain(item, done) for item in value]
        return done[id(value)]

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"text in {encoding!r}")
        self._spend(len(text))
        return text.encode("latin1")

    def _ordered(self, items: Sequence[tuple[Any, Any]] = ()) -> _OrderedDict:
        self._spend(len(items))
        if not all(isinstance(key, str | bytes | int) for key, _ in items):
            raise pickle.UnpicklingError("a dict whose keys are neither names nor numbers")
        return _OrderedDict(items)

    def _spend(self, number: int) -> None:
        self.budget -= number
        if self.budget < 0:
            raise DamagedPickleError("its arrays would take more memory than the file")


def load_arrays(path: str | Path) -> Any:
    """The content of a pickle: numbers, strings, lists, tuples, dicts and numpy arrays. Strings of Python 2 are latin1.

    Raises:
        MissingFileError: the file does not exist.
        UserError: the file is damaged or holds anything else; nothing in it is executed.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such weights file.")
    try:
        check_pickle_file(path)
        with path.open("rb") as file:
            unpickler = _Unpickler(file, path.stat().st_size)
            return unpickler.plain(unpickler.load(), {})
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: not a plain pickle of arrays, it holds {str(error)[:100]}; nothing in it was executed."
        ) from error
    except Exception as error:  # a damaged pickle can break anything
        reason = f"{type(error).__name__}: {error}"[:200]
        raise UserError(f"{path}: cannot be read as a pickle of arrays: {reason}") from error
