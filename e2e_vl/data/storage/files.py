"""Reading files so that a bad one gives one clear sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.shared_reads import collection_paused


def require_file(path: str | Path, what: str) -> Path:
    """Return the path if it is a file; `what` names its content in the error."""
    path = Path(path).expanduser()
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is no such file"
        raise FileNotFoundError(f"{path}: cannot read the {what}, {found}; check the path in the data config")
    return path


def read_json(path: str | Path, what: str, keys: tuple[str, ...] = ()) -> Any:
    """Read a JSON file; a missing or broken one is named in the error, and one that is no dict with these keys."""
    path = require_file(path, what)
    try:
        with collection_paused():
            content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: the {what} are not valid JSON ({error}); copy or download the file again") from error
    if keys:
        require_keys(content, keys, str(path))
    return content


def require_keys(record: Any, keys: tuple[str, ...], where: str) -> None:
    """Raise a ValueError unless `record` is a dict with all keys; `where` names file and record."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}, expected an object with {', '.join(keys)}")
    for key in keys:
        if key not in record:
            missing = ", ".join(repr(key) for key in keys if key not in record)
            raise ValueError(f"{where} has no {missing}")


def checked_records(
    records: Iterable[Any],
    keys: tuple[str, ...],
    what: str,
    key: str = "",
    *,
    unique: str = "",
    errors: RecordErrors = RAISE,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of a list, each with its name for errors and checked to be a dict with `keys`.

    Args:
        what: names file and kind of record; the record's `key` is added to it, or its number where it has none.
        unique: what `key` is, such as "image ids", if two records may not share it.
        errors: what becomes of a record that is not as it should be; the work on a record belongs within `with errors`,
            which names the record.
    """
    if not isinstance(records, Iterable):
        raise ValueError(f"{what}: expected a list of records, found a {type(records).__name__}")
    seen = set()
    for number, record in enumerate(records):
        has_key = isinstance(record, dict) and key in record
        where = f"{what} {record[key] if has_key else f'number {number}'}"
        with errors.about(where):
            require_keys(record, keys, where)
            if unique:
                if record[key] in seen:
                    raise ValueError(f"{where} is listed twice; {unique} must be unique")
                seen.add(record[key])
            yield where, record


def is_box(value: Any) -> bool:
    """Whether it is a list of four finite numbers."""
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain_boxes(rows: Sequence[Any]) -> np.ndarray | None:
    """float64 [rows, 4] if `is_box` holds for every row, else None; quicker, since all rows are looked at together."""
    try:
        if {*map(type, rows)} - {list} or {*map(len, rows)} - {4} or {*map(type, chain(*rows))} - {int, float}:
            return None
        boxes = np.array(rows, dtype=np.float64).reshape(-1, 4)
    except (TypeError, OverflowError):
        return None
    return boxes if np.isfinite(boxes).all() else None


def corners_of(box: Any, where: str) -> tuple[float, float, float, float]:
    """Turn [x, y, width, height] into continuous corners (x, y, x + width, y + height), in the same pixels.

    Raises:
        ValueError: not four finite numbers, or no area; `where` names file and record.
    """
    if not is_box(box):
        raise ValueError(f"{where}: the box {box} is not four finite numbers [x, y, width, height]")
    x, y, width, height = (float(value) for value in box)
    if width <= 0 or height <= 0:
        raise ValueError(
            f"{where}: the box [x, y, width, height] = {box} is empty or inverted; correct or remove the record"
        )
    return x, y, x + width, y + height
