"""Read text, JSON, YAML and pickle files (without executing code), and write files atomically.

An atomic write creates a temporary file next to its target, flushes it to disk and then renames it, so a killed process
or a full disk never leaves an incomplete file under the final name. Temporary names start with a dot and end with
`.part` or `.old`; `remove_leftovers` deletes those left by killed processes.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import mmap
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
import yaml

from detector.errors import UserError, first_line, reading, user_path
from detector.file_kinds import KIND_BYTES, name_kind

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PART = ".part"
_OLD = ".old"


def read_text(path: str | Path) -> str:
    """Read a text file, see `decode_text`. Line breaks become \\n."""
    return decode_text(_read_bytes(path), str(path)).replace("\r\n", "\n").replace("\r", "\n")


def decode_text(content: bytes, name: str) -> str:
    """Decode UTF-8, or UTF-16 or UTF-32 with a byte-order mark, without the mark.

    In other encodings (those of Windows) only quotation marks, dashes and dots are known; letters are an error, because
    they may be of any alphabet. Error messages start with `name`.
    """
    encoding = find_encoding(content)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        kind = name_kind(content)
        if kind is not None:
            raise UserError(f"{name}: it is {kind}; replace the file.") from error
        if encoding != "utf-8":
            raise UserError(
                f"{name}: damaged {encoding.upper()} ({first_line(error)}); save the file as UTF-8."
            ) from error
        if _WINDOWS_PUNCTUATION.fullmatch(content):
            return content.decode("cp1252")
        line = content.count(b"\n", 0, error.start) + 1
        where = f"{name}, line {line}" if b"\n" in content.strip() else name
        before = content[: error.start].rpartition(b"\n")[2]
        after = content[error.start :].partition(b"\n")[0]
        words = before[-10:] + after[:10]
        raise UserError(
            f"{where}: not UTF-8 (byte 0x{content[error.start]:02x}; in Windows-1252, the text would be "
            f"{words.decode('cp1252', 'replace')!r}); save the file as UTF-8."
        ) from error


def find_encoding(content: bytes) -> str:
    """Return the Unicode encoding of a file that begins with `content`, by its byte-order mark or first zero bytes."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            return encoding
    if content[1:2] == b"\0":
        return "utf-16-le"
    if content[:1] == b"\0":
        return "utf-16-be"
    return "utf-8"


_LARGEST_EXACT = 2**53  # floats count in steps of 1 up to here
_STRING_OR_NAN = re.compile(r'"(?:[^"\\]|\\.)*"|\bNaN\b')  # in JSON
# UTF-32 first: its mark begins with that of UTF-16
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# ASCII, and what is the same character in the Windows encodings of all European alphabets
_WINDOWS_PUNCTUATION = re.compile(rb"[\x00-\x7f\x82\x84\x85\x91-\x97]*")


def read_json(path: str | Path, type: type[T] | Any = Any) -> T:
    """Read a JSON file as an instance of `type`, which may be any type supported by msgspec."""
    return decode_json(_read_bytes(path), str(path), type)


def decode_json(text: str | bytes | mmap.mmap, name: str, type: type[T] | Any = Any) -> T:
    """Decode JSON like `read_json`. Error messages start with `name`.

    What Python and other tools write is read too: a byte-order mark, UTF-16, NaN (as null, logged), and 1.0 where an
    integer is expected. Integers beyond 64 bits become strings where an id is expected.
    """
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.ValidationError:
        value = decode_json(text, name)
        try:
            return convert(value, type)
        except msgspec.ValidationError as error:
            raise UserError(f"{name}: {first_line(error)}; correct or replace the file.") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        original = text if isinstance(text, str) else decode_text(bytes(text), name)
        changed = _STRING_OR_NAN.sub(lambda token: "null" if token[0] == "NaN" else token[0], original)
        if changed != original:
            logger.warning("%s: NaN is read as null, a missing value.", name)
            return decode_json(changed, f"{name} (NaN read as null)", type)
        if not isinstance(text, str):  # the encoding may be the fault
            return decode_json(original, name, type)
        kind = name_kind(original[:KIND_BYTES].encode())
        if kind is not None:
            raise UserError(f"{name}: not valid JSON: it is {kind}; replace the file.") from error
        hint = " (JSON has no Infinity)" if "Infinity" in original else ""
        raise UserError(f"{name}: not valid JSON: {first_line(error)}{hint}; correct or replace the file.") from error


def convert(value: Any, type: type[T] | Any) -> T:
    """Convert plain values to `type` like `msgspec.convert`, with the integers that `decode_json` reads."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError:
        return msgspec.convert(_plain_integers(value), type)


def _plain_integers(value: Any) -> Any:
    """Replace 1.0 with 1, and integers beyond 64 bits with strings, in nested lists and dicts."""
    if isinstance(value, dict):
        return {key: _plain_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        return int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file; an empty file gives None. Duplicate keys raise UserError."""
    return decode_yaml(_read_bytes(path), str(path))


def decode_yaml(text: str | bytes, name: str) -> Any:
    """Decode YAML like `read_yaml`. Error messages start with `name`."""
    try:
        return yaml.load(text, Loader=_YamlLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        parts = [getattr(error, "context", None), getattr(error, "problem", None)]
        reason = ", ".join(filter(None, parts)) or first_line(error)
        mark = getattr(error, "problem_mark", None)
        position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{name} is not valid YAML: {reason}{position}.") from error


class _YamlLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that reads 1e-5 as a number, as in YAML 1.2, and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, Any]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"found duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    [*"-+.0123456789"],
)


# What a pickle gets instead of the classes and functions that it names. NumPy's own trust the pickled state of a dtype
# or an array, and a false one makes addresses of bytes in the file; these check it. Their functions have no default
# values and no state, because a pickle may set the attributes of what it names.

_PLAIN_DTYPES = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU]\d+")
_BYTE_ORDERS = ("<", ">", "|", "=")
_LARGEST_CHARACTER = 0x10FFFF


class PickledDtype:
    """Replaces `numpy.dtype` in pickles: numbers and strings, nothing else."""

    def __init__(self, code: str, *flags: object) -> None:
        if not isinstance(code, str) or not _PLAIN_DTYPES.fullmatch(code):
            raise pickle.UnpicklingError(f"the dtype {code!r} is not allowed")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """Set the byte order. Sizes follow from the code; fields and subarrays are not allowed."""
        _, byte_order, subarray, names, fields, *_ = state
        if byte_order not in _BYTE_ORDERS or (subarray, names, fields) != (None, None, None):
            raise pickle.UnpicklingError("a dtype with fields or subarrays is not allowed")
        self.dtype = self.dtype.newbyteorder(byte_order)


class PickledArray(np.ndarray):
    """Replaces `numpy.ndarray` and its `_reconstruct` in pickles: an empty array whose content is set by its state."""

    def __new__(cls, *arguments: object) -> PickledArray:
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if self.size:  # NumPy would free the memory, which other arrays and tensors may share
            raise pickle.UnpicklingError("an array has two states")
        version, shape, dtype, is_fortran, content = state
        order: Literal["C", "F"] = "F" if is_fortran else "C"
        array = _pickled_values(content, dtype, shape, order)
        super().__setstate__((version, array.shape, array.dtype, bool(is_fortran), array.tobytes("A")))


def _pickled_scalar(dtype: PickledDtype, content: bytes | str) -> bool | int | float | complex | bytes | str:
    """Return the Python value, in place of `numpy.core.multiarray.scalar`."""
    return _pickled_values(content, dtype, (), "C").item()


def _pickled_buffer(content: bytes, dtype: PickledDtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> Any:
    """Return the array, in place of `numpy.core.numeric._frombuffer`."""
    return _pickled_values(content, dtype, shape, order)


def _pickled_values(
    content: bytes | str, dtype: PickledDtype, shape: tuple[int, ...], order: Literal["C", "F"]
) -> np.ndarray:
    if isinstance(content, str):  # bytes of Python 2
        content = content.encode("latin1")
    if dtype.dtype.itemsize == 0:  # of an empty string
        return np.zeros(shape, dtype.dtype)
    values = np.frombuffer(content, dtype.dtype).reshape(shape, order=order)
    if values.dtype.kind == "U" and values.size:
        characters = np.frombuffer(content, np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
        if characters.max() > _LARGEST_CHARACTER:
            raise pickle.UnpicklingError("a string has invalid characters")
    return values


def _pickled_bytes(text: str, encoding: str) -> bytes:
    """Return bytes, in place of `_codecs.encode`, by which Python 3 pickles them for Python 2."""
    return text.encode({"latin1": "latin1", "latin-1": "latin1"}[encoding])


class PickledDict(dict):
    """Replaces `collections.OrderedDict`. Attributes, such as the `_metadata` of PyTorch's state dicts, are dropped."""

    def __setstate__(self, state: object) -> None:
        pass


# By the names of NumPy 1; NumPy 2 renamed numpy.core to numpy._core.
NUMPY_IN_PICKLES: dict[str, Any] = {
    "numpy.ndarray": PickledArray,
    "numpy.dtype": PickledDtype,
    "numpy.core.multiarray._reconstruct": PickledArray,
    "numpy.core.multiarray.scalar": _pickled_scalar,
    "numpy.core.numeric._frombuffer": _pickled_buffer,
}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickle plain values and arrays of numbers and strings. Other classes are rejected, so no code is executed.

    Scalars of NumPy become Python values.
    """

    ALLOWED: ClassVar[dict[str, Any]] = {
        **NUMPY_IN_PICKLES,
        "collections.OrderedDict": PickledDict,
        "_codecs.encode": _pickled_bytes,
        "__builtin__.bytes": bytes,
    }

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full_name not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{full_name} is not allowed")
        return self.ALLOWED[full_name]


def read_pickle(path: str | Path, encoding: str = "latin1") -> Any:
    """Read a pickle of plain values and numeric arrays without executing code.

    `encoding`: encoding of strings written by Python 2. Arrays need latin1.
    """
    with reading(path, Exception), Path(path).open("rb") as file:  # damaged pickles raise many types
        return RestrictedUnpickler(file, encoding=encoding).load()


def _read_bytes(path: str | Path) -> bytes:
    with reading(path):
        return Path(path).read_bytes()


def map_file(path: str | Path) -> mmap.mmap | bytes:
    """Map a file to memory; an empty file, which cannot be mapped, becomes no bytes."""
    path = user_path(path)
    with reading(path), path.open("rb") as file:
        if path.stat().st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, see `json_text`."""
    write_text(path, json_text(value, str(path), indent=1) + "\n")


def json_text(value: Any, name: str, *, indent: int | None = None) -> str:
    """Encode standard JSON. NaN and infinite numbers raise UserError with the file's `name`."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise UserError(
            f"{name}: a number is NaN or infinite: the model has diverged; lower train.lr or use an earlier checkpoint."
        ) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path and rename it to `path` at the end. After an error the temporary file is deleted.

    Missing folders are made. If several processes write `path` at once, readers see one complete version. Pipes and
    devices, such as `/dev/stdout`, are written directly.
    """
    if path.parent in (Path("/dev"), Path("/dev/fd")) or (path.exists() and not (path.is_file() or path.is_dir())):
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _temporary_path(path, _unique_part())
    try:
        yield part
        flush_to_disk(part)
        part.replace(path)
        flush_to_disk(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that replaces `folder` at the end. After an error `folder` is unchanged."""
    part = _new_folder(folder)
    old = _temporary_path(folder, _OLD)
    try:
        yield part
        _sync_all(part)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        part.rename(folder)
        flush_to_disk(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextlib.contextmanager
def atomic_files(folder: Path, last: str) -> Iterator[Path]:
    """Yield an empty temporary folder and move its files into `folder` at the end. Other files in `folder` are kept.

    `last` is deleted first and moved last, so `folder` cannot be read while it contains both old and new files. `last`:
    name of a file that readers of such a folder require.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = _new_folder(folder / last)
    try:
        yield part
        _sync_all(part)
        (folder / last).unlink(missing_ok=True)
        for made in sorted(part.iterdir(), key=lambda path: path.name == last):
            target = folder / made.name
            if target.is_dir():
                shutil.rmtree(target)
            made.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    flush_to_disk(folder)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders that killed processes left in `folder`.

    If a process was killed between the two renames of `atomic_folder`, the old folder is restored.
    """
    for old in folder.glob(f".*{_OLD}"):
        target = old.with_name(old.name[1 : -len(_OLD)])
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for part in folder.glob(f".*{_PART}"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _new_folder(folder: Path) -> Path:
    part = _temporary_path(folder, _unique_part())
    part.mkdir(parents=True)
    return part


def _unique_part() -> str:
    """Return a new suffix for each write. Process ids would not do: two machines or containers may share a folder."""
    return f".{secrets.token_hex(4)}{_PART}"


def _temporary_path(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush_to_disk(path)
    flush_to_disk(folder)


def flush_to_disk(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, survive a power cut."""
    is_windows = os.name == "nt"  # it opens no folders, and flushes only files that are open for writing
    if is_windows and path.is_dir():
        return
    mode = os.O_RDWR if is_windows else os.O_RDONLY
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
