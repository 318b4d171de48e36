"""Keys that an object of a JSON text has twice: Python and msgspec keep the last value and say nothing.

A value that is written as JSON again has the colons of its text, one behind each key and those within texts, unless a
key was lost. Counting them takes a tenth of the time of reading; a call for each object would take a third of it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

_LARGE = 1 << 20  # characters of a text that is never written again as a whole
_MANY, _DEPTH = 1000, 3  # parts of a list or an object that are written one by one, and how deep these may lie
_SMALL = 1 << 16  # bytes that bytes.count counts as fast as numpy does
_ENCODER = msgspec.json.Encoder()
write_again = _ENCODER.encode_into  # a value into a bytearray, whose content is replaced
UNSURE = (ValueError, OverflowError, RecursionError)  # of a value that cannot be written: half of a character


def count_byte(sign: bytes, text: bytes | bytearray) -> int:
    """How often a byte is in a text."""
    if len(text) < _SMALL:
        return text.count(sign)
    values = np.frombuffer(text, dtype=np.uint8)
    return sum(int(np.count_nonzero(values[at : at + _LARGE] == sign[0])) for at in range(0, len(values), _LARGE))


def may_escape_colons(text: bytes | str) -> bool:
    """Whether a colon may be written as an escape in a JSON text, as nobody does; then colons cannot be counted."""
    if isinstance(text, str):
        return "\\u003" in text and "\\u003a" in text.lower()
    has_escapes = len(text) < _SMALL or count_byte(b"\\", text) > 0  # `in` is slower for a long text without any
    return has_escapes and b"\\u003" in text and b"\\u003a" in text.lower()


def has_each_key_once(text: bytes | str, value: Any) -> bool:
    """Whether each object of a JSON text has each key once for sure; where not, `repeated_key` looks, which is slow.

    Args:
        value: what the text holds.
    """
    colons = text.count(":") if isinstance(text, str) else count_byte(b":", text)
    try:
        found = _ENCODER.encode(value).count(b":") if len(text) < _LARGE else _colons(value, bytearray())
    except UNSURE:
        return False
    return found == colons and not may_escape_colons(text)


def _colons(value: Any, buffer: bytearray, depth: int = 0) -> int:
    """Colons of a large value as JSON, whose parts are written one by one."""
    if not isinstance(value, dict | list) or depth >= _DEPTH or (depth and len(value) < _MANY):
        write_again(value, buffer)
        return count_byte(b":", buffer)
    is_dict = isinstance(value, dict)
    own = len(value) + sum([key.count(":") for key in value]) if is_dict else 0
    return own + sum([_colons(part, buffer, depth + 1) for part in (value.values() if is_dict else value)])


class _Unclear(dict):
    """An object with a key that is there twice.

    Attributes:
        double: the first such key.
    """

    double: str


def repeated_key(text: bytes | str) -> str | None:
    """The first object of a JSON text that has a key twice, as part of a sentence; None: each has each key once.

    Args:
        text: valid JSON.
    """
    below: list[tuple[str, Any]] = [("", json.loads(text, object_pairs_hook=_noted))]
    while below:
        place, value = below.pop()
        if isinstance(value, _Unclear):
            return f"{place.removeprefix('.')[:200] or 'the object'} has the key {value.double[:100]!r} twice"
        if isinstance(value, dict):
            parts = [(f"{place}.{key}", part) for key, part in value.items()]
        else:
            parts = [(f"{place}[{row}]", part) for row, part in enumerate(value if isinstance(value, list) else ())]
        below += reversed(parts)
    return None


def _noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    unclear = _Unclear(found)
    unclear.double = next(key for key, _ in pairs if key in seen or seen.add(key))
    return unclear
