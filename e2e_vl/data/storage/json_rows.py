"""A JSON file of one object with one long list, whose values become Python objects one by one.

All values of a large annotation file at once, most of which is outlines, take several times the memory of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from detector.errors import reading
from e2e_vl.data.storage.files import require_file
from e2e_vl.data.storage.shared_reads import collection_paused
from e2e_vl.json_keys import count_byte, has_each_key_once, may_escape_colons
from e2e_vl.records import checked, parsed_json

Found = TypeVar("Found")

_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder()


class _Rows(Iterable[Any]):
    """The values of a list, each parsed whenever it is walked over.

    Args:
        texts: JSON of each value, parts of the one text of the file.
    """

    def __init__(self, texts: list[msgspec.Raw]) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[Any]:
        return map(_VALUE.decode, self._texts)


def read_json_rows(path: str | Path, what: str, kind: type[Found], key: str) -> Found:
    """Read a JSON file as `read_json` does, with the same errors, but for the list `key`.

    Args:
        what: names the content in errors.
        kind: a `Record` with a field `key`, which becomes an iterable that can be walked over again and again.

    Raises:
        FileNotFoundError: no such file.
        UserError: invalid JSON, a key that an object has twice, or something else than what is declared.
    """
    path = require_file(path, what)
    with reading(path), collection_paused():
        data = path.read_bytes()
        parts = _parts(data, key)
        if parts is None:
            return checked(kind, parsed_json(data, f"{path}: the {what} are"), str(path))
        others, texts = parts
        content = checked(kind, {**others, key: []}, str(path))
    setattr(content, key, _Rows(texts))
    return content


def _parts(data: bytes, key: str) -> tuple[dict[str, Any], list[msgspec.Raw]] | None:
    """The values of all keys but one, and the texts of the values of that key's list.

    None where anything is wrong, or unusual: Python's decoder reads more, and the errors that come from it say where.
    """
    try:
        parts = _PARTS.decode(data)
        if key not in parts or may_escape_colons(data):
            return None
        colons = len(parts) + sum(one.count(":") for one in parts)
        others = {}
        for name, text in parts.items():
            colons += count_byte(b":", bytes(text))
            if name != key:
                others[name] = _VALUE.decode(text)
                if not has_each_key_once(bytes(text), others[name]):
                    return None
        if colons != count_byte(b":", data):  # a key of the file is there twice
            return None
        texts = _ROWS.decode(parts[key])
        if not all(has_each_key_once(bytes(text), _VALUE.decode(text)) for text in texts):
            return None
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return others, texts
