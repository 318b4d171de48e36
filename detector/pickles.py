"""Reading pickles of numpy arrays without running any code in them.

Detectron2's `.pkl` files are pickles, and a pickle may name any function to be called. Here only numbers, strings,
plain containers and numeric numpy arrays are allowed, and the classes below rebuild the arrays from their bytes: no
function named by the file is called, and neither is numpy's own unpickling, which trusts the file about memory.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np

NUMERIC_KINDS = "biuf"  # bool, signed, unsigned, float


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
    """Stands for `numpy.ndarray` while it is rebuilt."""

    def __init__(self, *_: object) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, is_fortran, data = state
        self.value = _to_array(data, dtype, shape, "F" if is_fortran else "C")


def _to_array(data: Any, dtype: Any, shape: tuple[int, ...], order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("an array without a type")
    raw = data.encode("latin1") if isinstance(data, str) else bytes(data)  # Python 2 writes bytes as a str
    return np.frombuffer(raw, dtype.value).reshape(shape, order=order).copy()


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError("an array of an unknown class")
    return _Array()


def _scalar(dtype: Any, data: Any) -> np.generic:
    return _to_array(data, dtype, (), "C")[()]


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes for Python 2 ...
    ("__builtin__", "bytes"): lambda: b"",  # ... and empty ones
}
for _core in ("numpy.core", "numpy._core"):  # numpy renamed it in version 2
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _reconstruct
    _ALLOWED[f"{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _to_array


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _ALLOWED[module, name]


def load_arrays(path: str | Path) -> Any:
    """The content of a pickle: numbers, strings, lists, tuples, dicts and numpy arrays. Strings of Python 2 are latin1.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or holds anything else; nothing in it is executed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file.")
    try:
        with path.open("rb") as file:
            return _plain(_Unpickler(file, encoding="latin1").load(), {})
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: not a plain pickle of arrays, it holds {str(error)[:100]}; nothing in it was executed."
        ) from error
    except Exception as error:  # a damaged pickle can break anything
        raise ValueError(f"{path}: cannot be read as a pickle of arrays: {type(error).__name__}: {error}") from error


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """The value with arrays in place of their stand-ins.

    `done` holds what every container became, by its id: one that is named twice is not copied twice, or a few hundred
    bytes could fill the memory.
    """
    if isinstance(value, _Array):
        if value.value is None:
            raise pickle.UnpicklingError("an array without content")
        return value.value
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in done:
        done[id(value)] = None  # in the place of a container inside itself
        if isinstance(value, dict):
            done[id(value)] = {_plain(key, done): _plain(item, done) for key, item in value.items()}
        else:
            done[id(value)] = [_plain(item, done) for item in value]
    return done[id(value)]
