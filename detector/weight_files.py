"""Reading weights files of every kind as tensors by name. No file can run code."""

from __future__ import annotations

import dataclasses
import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from detector.config import NORM_EPS
from detector.errors import MissingFileError, UserError, in_one_line
from detector.pickle_scan import DamagedPickleError, check_pickle_file
from detector.torch_files import MOST_DIMENSIONS, DamagedTorchFileError, ForbiddenGlobalError, check_torch_file
from detector.zoo import NamedWeights, cached_weights, known_weights, remedy, resolve_weights, similar_names

# Reading pickles of numpy arrays without running any code in them.


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


# Where the detector is in a folder: a saved detector, a saved model, a run directory, a Detectron2 output directory.
WEIGHTS_NAME = "model.safetensors"
INDEX_END = ".index.json"  # of the file in which transformers lists the parts of weights
_LONGEST = 1 << 62  # of a dimension
_MOST_TENSORS = 1 << 16  # of a file
IN_FOLDERS = (WEIGHTS_NAME, f"detector/{WEIGHTS_NAME}", f"model/detector/{WEIGHTS_NAME}", "model_final.pth")


@dataclasses.dataclass(frozen=True)
class WeightsFile:
    """The content of a file, under the names that it uses."""

    path: Path
    tensors: dict[str, Tensor]
    matching_heuristics: bool = False  # Detectron2 may match its names with the ends of the model's
    norm_eps: float = NORM_EPS  # epsilon of the frozen batch norms that the numbers are meant for


def read_weights(path: str | Path) -> WeightsFile:
    """Read a `.safetensors` file, a pickle of arrays (`.pkl`), or a `.pth` / `.model` / `.bin` file of torch.

    A pickle holds arrays by name: bare, under `model` (Detectron2) or under `blobs` (Caffe2; the optimiser's momentum
    is left out). A torch file holds a state dict: bare, or under `model` (Detectron2) or `state_dict`. If `path` is a
    folder, the detector in it is read; if it is the name of published weights, they are downloaded (`find_weights`).

    Raises:
        FileNotFoundError, ValueError: the file is missing, damaged, of an unknown kind, or holds more than tensors.
    """
    published = known_weights(path)
    norm_eps = WeightsFile.norm_eps if published is None else published.norm_eps
    path = find_weights(path)
    if path.suffix == ".safetensors":
        try:
            check_safetensors(path)
            return WeightsFile(path, _checked(load_file(path), path))
        except UserError:
            raise
        except (SafetensorError, OSError, MemoryError, ValueError) as error:
            raise _unreadable(path, error) from error
    is_pickle = path.suffix == ".pkl" and not zipfile.is_zipfile(path)  # torch writes zip archives
    loaded = _load_pickle(path) if is_pickle else _load_torch(path)
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected weights by name, found {type(loaded).__name__}; {remedy(path)}.")
    flag, author = loaded.get("matching_heuristics"), loaded.get("__author__")
    heuristics = (isinstance(flag, bool | int) and bool(flag)) or (isinstance(author, str) and author == "Caffe2")
    state = next((loaded[key] for key in ("model", "state_dict", "blobs") if isinstance(loaded.get(key), dict)), loaded)
    if is_pickle and "model" not in loaded:  # Detectron2 takes it for a file of Caffe2, too
        heuristics = True
        state = {name: value for name, value in state.items() if not str(name).endswith("_momentum")}
    try:
        tensors = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}
    except (TypeError, ValueError) as error:  # numbers in another order of bytes, or of a kind that torch lacks
        raise _unreadable(path, error) from error
    return WeightsFile(path, _checked(tensors, path), heuristics, norm_eps)


def check_safetensors(path: Path) -> None:
    """Look at the shapes that a `.safetensors` file states, before torch makes tensors of them.

    Raises:
        ValueError: a tensor has more dimensions than numpy knows, or one of them is longer than torch can count; or
            there are very many tensors, or two of one name.
        SafetensorError, OSError: the file is damaged, or cannot be read.
    """
    with safe_open(path, framework="pt"), path.open("rb") as file:  # the first one refuses what is no such file
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length), object_pairs_hook=list)
    if len(entries) > _MOST_TENSORS or len({name for name, _ in entries}) < len(entries):
        raise ValueError(f"it has more than {_MOST_TENSORS} tensors, or one name twice")
    for name, entry in entries:
        shape = next((value for key, value in entry if key == "shape"), ())
        if len(shape) > MOST_DIMENSIONS or any(size >= _LONGEST for size in shape):
            raise ValueError(f"{in_one_line(name)[:100]} has a shape that no tensor has")


def _checked(tensors: dict[Any, Any], path: Path) -> dict[str, Tensor]:
    """The same tensors; raises UserError for names or values of another kind."""
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not _is_plain(value):
            raise UserError(
                f"{path}: expected a state dict of tensors, bare or under the key `model`; {name!r} is not a tensor: "
                f"{remedy(path)}."
            )
    return tensors


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has numbers of its own; sparse, quantised and meta tensors may claim any size.

    Two numbers of 4 bits in a byte are no numbers that torch could turn into others.
    """
    is_packed = str(tensor.dtype).startswith("torch.float4")
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized and not is_packed


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of `read_weights`, under the file's own names."""
    return read_weights(path).tensors


def find_weights(path: str | Path) -> Path:
    """The path of a file as it is; for a folder, the path of the detector's weights in it.

    For the name of published weights (`detector.zoo`), it is the path of the file in the cache, which is
    downloaded once.

    Raises:
        FileNotFoundError: the file does not exist, the folder holds no weights, or a download fails.
        ValueError: an unknown name of published weights, or a file in the cache that is not the published one.
    """
    path = resolve_weights(path)
    if isinstance(path, NamedWeights):
        return cached_weights(path)
    if path.is_dir():
        found = next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)
        if found is None:
            expected = f"expected one of {', '.join(IN_FOLDERS)}"
            raise MissingFileError(f"{path}: holds no detector's weights{split_weights(path)}; {expected}.")
        return found
    if path.name.endswith(INDEX_END):
        raise UserError(f"{path}: names the files of weights{split_weights(path)}.")
    if not path.is_file():
        similar = similar_names(path)
        hint = f" Did you mean the published weights {' or '.join(similar)}?" if similar else ""
        raise MissingFileError(f"{path}: no such weights file.{hint}")
    return path


def split_weights(path: Path) -> str:
    """What to do with weights that transformers split over several files, as a part of a sentence; "" without them.

    Args:
        path: a folder, or the index of the files.
    """
    names = [path.name] if not path.is_dir() else sorted(one.name for one in path.glob(f"*{INDEX_END}"))
    if not any(name.endswith(INDEX_END) for name in names):
        return ""
    return (
        f" in one file, but parts of them ({in_one_line(names[0])}), which are not read one by one: load them with "
        'transformers and save them by save_pretrained(DIR, max_shard_size="100GB")'
    )


def _load_pickle(path: Path) -> Any:
    try:
        return load_arrays(path)
    except ValueError as error:  # it names the file
        raise UserError(f"{str(error).rstrip('.')}; {remedy(path)}.") from error


def _load_torch(path: Path) -> Any:
    try:
        check_torch_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except ForbiddenGlobalError as error:
        raise UserError(
            f"{path}: not a plain file of tensors (it names {str(error)[:100]}), and nothing in it was executed; "
            f"{remedy(path)}."
        ) from error
    except (DamagedTorchFileError, RuntimeError, EOFError, ValueError, OSError, MemoryError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # torch raises pickle errors of several kinds for a file that is not plain tensors
        raise UserError(
            f"{path}: not a plain file of tensors ({type(error).__name__}), and nothing in it was executed; "
            f"{remedy(path)}."
        ) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path}: cannot be read as weights ({reason}); {remedy(path)}.")
