"""Reading files so that a bad one gives one clear sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import convert

from detector.errors import MissingFileError, UserError, reading, user_path
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.shared_reads import collection_paused
from e2e_vl.records import MISFITS, REMEDY, FourNumbers, as_written, checked, cut_text, parsed_json

Found = TypeVar("Found")
_LONGEST = 500  # characters of a name in an error
_NAMES = frozenset((int, str))


def require_file(path: str | Path, what: str) -> Path:
    """Return the path if it is a file; `what` names its content in the error."""
    path = user_path(path)
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise MissingFileError(f"{path}: cannot read the {what}, {found}; check the path in the data config")
    return path


def read_text(path: str | Path, what: str) -> str:
    """The content of a UTF-8 text file, without the mark of UTF-8 that some editors put before it.

    Args:
        what: names the content in errors.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is not UTF-8, or holds zero bytes, as files do that were cut off or are no text.
    """
    path = require_file(path, what)
    try:
        with reading(path):
            text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the file of the {what} is not a UTF-8 text file; copy or download it again"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{path}: the file of the {what} is not a text file, as it holds zero bytes; copy or download it again"
        )
    return text


def read_json(path: str | Path, what: str, kind: type[Found] = Any) -> Found:
    """Read a JSON file; a missing or broken one is named in the error, and one that is not of this kind.

    Args:
        what: names the content in errors.
        kind: a `Record`, or any type that msgspec knows.
    """
    path = require_file(path, what)
    with reading(path), collection_paused():
        content = parsed_json(path.read_bytes(), f"{path}: the {what} are")
    return content if kind is Any else checked(kind, content, str(path))


def checked_records(
    kind: type[Found],
    values: Iterable[Any],
    what: str,
    key: str = "",
    *,
    unique: str = "",
    errors: RecordErrors = RAISE,
) -> Iterator[tuple[str, Found]]:
    """Records of a list, each with its name for errors and as an instance of `kind`.

    Args:
        what: names file and kind of record; the record's `key` is added to it, or its number where it has none.
        unique: what `key` is, such as "image ids", if two records may not share it.
        errors: what becomes of a record that is not as it should be; the work on a record belongs within `with errors`,
            which names the record.

    Raises:
        UserError: no list; a record that is not of this kind, or that is there twice.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict):
        raise UserError(f"{what}: expected a list of records, found a {type(values).__name__}; {REMEDY}")
    seen = set()
    for number, value in enumerate(values):
        name = value.get(key) if key and isinstance(value, dict) else None
        is_shown = type(name) in _NAMES and str(name).isprintable() and len(f"{what} {name}") <= _LONGEST
        where = f"{what} {name}" if is_shown else f"{what} number {number}"
        with errors.about(where):
            try:
                record = convert(value, kind)
            except MISFITS:
                record = checked(kind, value, where)  # names what is wrong with it
            if unique:
                if name in seen:
                    raise UserError(f"{where} is listed twice; {unique} must be unique")
                seen.add(name)
            yield where, record


def corners_of(box: FourNumbers, where: str) -> FourNumbers:
    """Turn [x, y, width, height] into continuous corners (x, y, x + width, y + height), in the same pixels.

    Raises:
        UserError: the box has no area; `where` names file and record.
    """
    x, y, width, height = box
    right, bottom = x + width, y + height
    if right <= x or bottom <= y:  # also a width that is lost beside x
        raise UserError(
            f"{where}: the box [x, y, width, height] = {cut_text(as_written(box))} is empty or inverted; "
            "correct or remove the record"
        )
    return x, y, right, bottom
