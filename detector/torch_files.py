"""Checking a file of torch before it is loaded: what it claims must lie in the file.

`torch.load(weights_only=True)` calls no function of a file, but believes its sizes: it gives a storage as many bytes as
the file says, unpacks archives of any size, and hashes tuples of tuples. Here the pickle in the file is read with
stand-ins that build no tensor, and every storage and tensor is compared with the bytes that are there.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from detector.errors import reading
from detector.pickle_scan import Bytes, DamagedPickleError, check_pickle
from detector.zip_directory import DamagedZipError, Member, check_member, find_directory, read_member, read_members

MOST_RECORDS = 1 << 18  # storages of a file
LONGEST_PICKLE = 1 << 28  # bytes
MOST_DIMENSIONS = 64  # of a tensor, as in numpy: torch takes minutes for one of 100,000
SMALL = 1 << 26  # bytes that the tensors of every file may take ...
TENSORS_PER_BYTE = 16  # ... and that they may take per byte of the file: one storage may belong to several tensors
_DAMAGED = (  # what a damaged pickle raises
    *(ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError),
    *(pickle.UnpicklingError, MemoryError, RecursionError),
)
LEGACY_PICKLES = 3  # magic number, version and system, before the pickle of the content

_ITEM_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4", "Untyped"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


class DamagedTorchFileError(ValueError):
    """Why a file cannot be a file of torch, as part of a sentence."""


class ForbiddenGlobalError(pickle.UnpicklingError):
    """A file names a function or class that no file of weights needs."""


def check_torch_file(path: Path, *, longest_pickle: int = LONGEST_PICKLE) -> None:
    """Check a file that `torch.save` wrote, or claims to have written; nothing of it is loaded or run.

    Args:
        longest_pickle: bytes that the pickle may have; arrays of numpy lie in it, tensors do not.

    Raises:
        ForbiddenGlobalError: it names anything but tensors, plain containers and numbers.
        DamagedTorchFileError: it is empty, damaged, cut off or no such file, claims more than it holds, or holds other
            bytes than were written (where it has checksums, as since torch 1.6 unless they were switched off).
    """
    try:
        with reading(path), path.open("rb") as file:
            start = file.read(tarfile.BLOCKSIZE)
            if start.startswith(b"PK\3\4"):
                _check_archive(path, longest_pickle)
                return
            _refuse_others(start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_legacy(data, longest_pickle)
    except ForbiddenGlobalError:
        raise
    except (DamagedPickleError, DamagedZipError) as error:
        raise DamagedTorchFileError(str(error)) from error
    except _DAMAGED as error:
        raise DamagedTorchFileError(f"it is damaged: {type(error).__name__}: {error}"[:200]) from error


def _refuse_others(start: bytes) -> None:
    if not start:
        raise DamagedPickleError("it is empty")
    if not start.startswith(b"\x80"):
        raise DamagedPickleError("it begins like no file that torch.save writes")
    try:
        tarfile.TarInfo.frombuf(start, "latin1", "replace")
    except (tarfile.HeaderError, ValueError):
        return
    raise DamagedPickleError("it is a tar archive, which torch wrote before version 0.1.10")


def _check_archive(path: Path, longest: int) -> None:
    """A file of torch 1.6 or later: a zip archive of a pickle and the storages."""
    with reading(path), path.open("rb") as file:
        # torch reads the directory at the stated offset, and with bytes before or behind the archive it may be another
        directory = find_directory(file)
        if directory.shift or directory.behind:
            raise DamagedZipError("the directory of its members is not where the file says")
        members = read_members(file, MOST_RECORDS)
        content, prefix = _find_pickle(members, longest)
        has_checksums = any(member.checksum for member in members.values())  # torch can leave them out
        data = read_member(file, content, has_checksum=has_checksums)
        for member in members.values() if has_checksums else ():
            check_member(file, member)  # torch itself does not
    folder = f"{prefix}/data/"
    records = {name.removeprefix(folder): one.whole for name, one in members.items() if name.startswith(folder)}
    check_pickle(data)
    _Claims(data, path.stat().st_size, records).load()


def _find_pickle(members: dict[str, Member], longest: int) -> tuple[Member, str]:
    """The pickle, and the folder of everything in the archive, which torch reads off the first member."""
    prefix = next(iter(members), "").partition("/")[0]
    content = members.get(f"{prefix}/data.pkl")
    if content is None:
        raise DamagedZipError("it is a zip archive without data.pkl")
    if content.whole > longest:
        raise DamagedZipError(f"its data.pkl claims {content.whole} bytes")
    return content, prefix


def _check_legacy(data: Bytes, longest: int) -> None:
    """A file of an older torch: some pickles, then the storages one after the other."""
    position = 0
    for _ in range(LEGACY_PICKLES):
        position = _end_of_pickle(data, position, longest)
    end = _end_of_pickle(data, position, longest)
    claims = _Claims(data[position:end], len(data), None)
    claims.load()
    behind = _end_of_pickle(data, end, longest)
    keys = _Claims(data[end:behind], len(data), None).load()
    if not isinstance(keys, list) or len(keys) != len(set(keys)) or not claims.storages.keys() >= set(keys):
        raise DamagedPickleError("its list of storages is damaged")
    needed = sum(8 + claims.storages[key] for key in keys)  # the number of items stands before each
    if needed > len(data) - behind or sum(claims.storages.values()) > len(data):
        raise DamagedPickleError(f"its storages claim {needed} bytes, and it has {len(data) - behind}")


def _end_of_pickle(data: Bytes, start: int, longest: int) -> int:
    end = check_pickle(data, start)
    if end - start > longest:
        raise DamagedPickleError(f"one of its pickles has {end - start} bytes")
    return end


class _Storage:
    """Stands for a storage."""

    def __init__(self, items: int, item_bytes: int) -> None:
        self.items, self.item_bytes = items, item_bytes


class _StorageType:
    """Stands for the class of a storage; it cannot be called."""

    def __init__(self, item_bytes: int) -> None:
        self.item_bytes = item_bytes


class _Plain:
    """Stands for a tensor, an array, a type or a number; takes no part in anything."""

    def __setstate__(self, state: object) -> None:
        pass


class _Tensor(_Plain):
    """An empty tensor or parameter, which old files give its storage later; with a number it would be of any size."""

    def __init__(self, *arguments: object) -> None:
        if arguments and not isinstance(arguments[0], _Plain):
            raise DamagedPickleError("it makes a tensor without a storage")

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and state and isinstance(state[0], _Storage):
            storage = state[0]
            if _bytes_of_tensor(*state[:4], storage.item_bytes) > storage.items * storage.item_bytes:
                raise DamagedPickleError("it has a tensor that is larger than its storage")


class _Ordered(dict):
    def __setstate__(self, state: object) -> None:
        pass


def _bytes_of_tensor(storage: Any, offset: Any, size: Any, stride: Any, item_bytes: int) -> int:
    """Bytes of a tensor without gaps.

    Raises:
        DamagedPickleError: it is no tensor, or it lies outside of its storage.
    """
    if (
        not isinstance(storage, _Storage)
        or not all(map(_is_size, (offset, *size, *stride)))
        or len(size) != len(stride)
    ):
        raise DamagedPickleError("it has a tensor without a storage or a shape")
    if len(size) > MOST_DIMENSIONS:
        raise DamagedPickleError(f"it has a tensor of {len(size)} dimensions; {MOST_DIMENSIONS} are the most")
    count = math.prod(size)
    last = offset + sum((number - 1) * step for number, step in zip(size, stride, strict=True))
    if count and (last + 1) * item_bytes > storage.items * storage.item_bytes:
        raise DamagedPickleError(f"it has a tensor of shape {list(size)[:8]} that lies outside of its storage")
    return count * item_bytes


class _Claims(pickle.Unpickler):
    """Reads the pickle of a file with stand-ins, and compares storages and tensors with what is in the file.

    Args:
        data: the pickle, which `check_pickle` accepts.
        size: bytes of the whole file.
        records: bytes of each storage by its key; None: they are not known yet.

    Attributes:
        storages: bytes that each storage claims, by its key.
    """

    def __init__(self, data: bytes, size: int, records: dict[str, int] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self.records = records
        self.storages: dict[str, int] = {}
        self.budget = SMALL + TENSORS_PER_BYTE * size

    def persistent_load(self, saved: Any) -> Any:
        if not isinstance(saved, tuple) or not saved or _text(saved[0]) not in ("storage", "module"):
            raise DamagedPickleError("it names something that is not a storage")
        if saved[0] != "storage":
            return saved[1]
        _, kind, key, _, items, *view = saved
        if not isinstance(kind, _StorageType) or not _is_size(items):
            raise DamagedPickleError("it has a storage without a size")
        key, claimed = _text(key), items * kind.item_bytes
        if self.records is not None and claimed > self.records.get(key, -1):
            raise DamagedPickleError(f"its storage {key!r} claims {claimed} bytes, and it has {self.records.get(key)}")
        if self.storages.setdefault(key, claimed) != claimed:
            raise DamagedPickleError(f"its storage {key!r} has two sizes")
        if view and view[0] is not None:
            _, first, items_of_view = view[0]
            if not _is_size(first) or not _is_size(items_of_view) or first + items_of_view > items:
                raise DamagedPickleError(f"a view of its storage {key!r} lies outside of it")
            items = items_of_view
        return _Storage(items, kind.item_bytes)

    def find_class(self, module: str, name: str) -> Any:
        base = name.removesuffix("Storage")
        if module.split(".")[0] == "torch" and name != base and base in _ITEM_BYTES:
            return _StorageType(_ITEM_BYTES[base])
        if module.split(".")[0] == "torch" and name.endswith("Tensor"):
            return _Tensor
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        found = self._functions().get(f"{module}.{name}") or _NAMED.get(f"{module}.{name}")
        if found is None:
            raise ForbiddenGlobalError(f"{module}.{name}")
        return found

    def _functions(self) -> dict[str, Callable[..., Any]]:
        rebuild = "torch._utils._rebuild_"
        return {
            **{f"{core}.multiarray._reconstruct": _reconstruct for core in ("numpy.core", "numpy._core")},
            **dict.fromkeys((f"{rebuild}tensor", f"{rebuild}tensor_v2", f"{rebuild}qtensor"), self._tensor),
            f"{rebuild}tensor_v3": self._typed_tensor,
            f"{rebuild}parameter": _first,
            f"{rebuild}parameter_with_state": _first,
            f"{rebuild}device_tensor_from_cpu_tensor": _first,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
            "collections.OrderedDict": self._ordered,
            "_codecs.encode": self._encode,
            "torch.Size": self._plain_of,
            "torch.device": self._plain_of,
            "torch.serialization._get_layout": self._plain_of,
            "builtins.complex": self._plain_of,
            "builtins.set": self._set,
            "__builtin__.set": self._set,
            "builtins.bytearray": self._byte_array,
            "__builtin__.bytearray": self._byte_array,
        }

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: object) -> _Plain:
        item_bytes = storage.item_bytes if isinstance(storage, _Storage) else 0
        self._spend(_bytes_of_tensor(storage, offset, size, stride, item_bytes))
        return _Plain()

    def _typed_tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> _Plain:
        """Of numbers that have no storage of their own type: grad, hooks and the type stand behind the stride."""
        self._spend(_bytes_of_tensor(storage, offset, size, stride, more[2].itemsize))
        return _Plain()

    def _of_type(self, function: Callable[..., Any], kind: object, arguments: tuple, state: object) -> Any:
        return function(*arguments)

    def _ordered(self, items: Sequence[tuple[Any, Any]] = ()) -> _Ordered:
        self._spend(len(items))
        if not all(isinstance(key, str | bytes | int) for key, _ in items):
            raise DamagedPickleError("a dict has keys that are neither names nor numbers")
        return _Ordered(items)

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise DamagedPickleError(f"it has text in {encoding[:20]!r}")
        self._spend(len(text))
        return text.encode("latin1")

    def _plain_of(self, *arguments: Any) -> _Plain:
        self._spend(sum(len(one) for one in arguments if isinstance(one, tuple | list | str | bytes)))
        return _Plain()

    def _set(self, items: Sequence[Any] = ()) -> _Plain:
        self._spend(len(items))
        if not all(isinstance(one, str | bytes | int | float) for one in items):
            raise DamagedPickleError("a set has items that are neither names nor numbers")
        return _Plain()

    def _byte_array(self, content: bytes = b"", *_: object) -> _Plain:
        self._spend(len(content))  # a number would be a size
        return _Plain()

    def _spend(self, number: int) -> None:
        self.budget -= number
        if self.budget < 0:
            raise DamagedPickleError("its tensors would take far more memory than the file")


def _reconstruct(kind: object, shape: Any, *_: object) -> _Plain:
    if shape != (0,):
        raise DamagedPickleError("it makes an array without numbers")
    return _Plain()


def _first(value: Any, *_: object) -> Any:
    return value


class _ArrayType(_Plain):
    def __init__(self, *_: object) -> None:
        pass


_QUANTISERS = (
    *("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric", "channel_affine_float_qparams"),
)
_NAMED: dict[str, Any] = {
    "torch.nn.parameter.Parameter": _Tensor,
    "numpy.ndarray": _Tensor,
    "numpy.dtype": _ArrayType,
    "numpy.dtypes.UInt32DType": _ArrayType,
    "collections.Counter": dict,
    **dict.fromkeys((f"torch.per_{kind}" for kind in _QUANTISERS), _Plain()),
}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
