"""Keys that an object of a JSON text has twice: Python and msgspec keep the last value and say nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_LARGE = 1 << 20  # characters of a text that is never written again as a whole
_MANY = 1000  # parts of a list or an object that are counted one by one
_COLON, _ESCAPED = {str: ":", bytes: b":"}, {str: "\\u003", bytes: b"\\u003"}  # a colon, if a or A follows
_A = {str: "a", bytes: b"a"}
_encode = msgspec.json.Encoder().encode


def has_each_key_once(text: bytes | str, value: Any, others: int = 0) -> bool:
    """Whether each object of a JSON text has each key once for sure; where not, `repeated_key` looks, which is slow.

    The value, written as JSON again, has the colons of the text (one behind each key, and those within texts) unless a
    key was lost. A call for each object would take longer. An escaped colon or half of a character is never sure.

    Args:
        value: what the text holds.
        others: colons of the text that are not of the value.
    """
    kind = type(text)
    try:
        found = _encode(value).count(b":") if len(text) < _LARGE else _colons(value)
    except (ValueError, OverflowError, RecursionError):
        return False
    if found + others != text.count(_COLON[kind]):
        return False
    return _ESCAPED[kind] not in text or _ESCAPED[kind] + _A[kind] not in text.lower()


def _colons(value: Any, depth: int = 0) -> int:
    """Colons of a large value as JSON."""
    if not isinstance(value, dict | list) or depth > 2 or (depth and len(value) < _MANY):
        return _encode(value).count(b":")
    if isinstance(value, list):
        return sum([_colons(part, depth + 1) for part in value])
    own = len(value) + sum([key.count(":") for key in value])
    return own + sum([_colons(part, depth + 1) for part in value.values()])


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
