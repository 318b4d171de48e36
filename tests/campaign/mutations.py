"""Damage to files: bytes that are lost or changed, and values of another kind in what the file says."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 0,
    lambda: -1,
    lambda: 3,
    lambda: 10**400,
    lambda: 2**63,
    lambda: -(2**64),
    lambda: 1.5,
    lambda: 7.0,
    lambda: 1e308,
    lambda: -1e308,
    lambda: 1e-300,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: float("-inf"),
    lambda: "",
    lambda: " ",
    lambda: "x",
    lambda: "3",
    lambda: "nan",
    lambda: "../x",
    lambda: "a\0b",
    lambda: "\ud83d",
    lambda: "long " * 5000,
    list,
    dict,
    lambda: [[]],
    lambda: [[[[[[[[[]]]]]]]]],
    lambda: [None],
    lambda: {"": None},
    lambda: [1, 2, 3, 4],
)
CELLS = (
    "",
    " ",
    "x",
    "-1",
    "0",
    "1e999",
    "nan",
    "9" * 400,
    "3.5",
    "²",
    "\ufeff",
    "\u2028",
    "a\tb",
    "<",
    "&",
    "]",
    "[/EN#",
    "\0",
)


def damaged(path: Path, content: bytes, rng: random.Random) -> bytes:
    """The content of a file with one piece of damage."""
    written = _written(path, content)
    kind = rng.random()
    if kind < 0.03:
        return b""
    if kind < 0.35 or (written is None and kind < 0.6):
        return _bytes(content, rng)
    if written is None:
        return _cells(content, rng)
    value, write = written
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _values(value, rng)
    return write(value)


def _written(path: Path, content: bytes) -> tuple[Any, Callable[[Any], bytes]] | None:
    """What the file says, and how that is written; None for a text of another kind."""
    if path.suffix == ".p":
        return pickle.loads(content), lambda value: pickle.dumps(value, protocol=2)
    try:
        return json.loads(content), lambda value: json.dumps(value).encode()
    except ValueError:
        pass
    try:
        rows = [json.loads(line) for line in content.splitlines()]
    except ValueError:
        return None
    return rows, lambda value: b"".join(json.dumps(row).encode() + b"\n" for row in _as_list(value))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _bytes(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return b"\xff"
    at = rng.randrange(len(content))
    kind = rng.randrange(7)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if kind == 2:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 3:
        return content[:at] + content[at + rng.randrange(1, 50) :]
    if kind == 4:
        return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
    if kind == 5:
        return content[:at] + content[rng.randrange(len(content)) :][:200] + content[at:]
    return content[:at] + b"[" * 100_000 + content[at:]


def _cells(content: bytes, rng: random.Random) -> bytes:
    """Lines that are lost, doubled, swapped or empty, and cells, words or attributes with something else in them."""
    text = content.decode("utf-8", errors="replace")
    lines = text.split("\n")
    row = rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        del lines[row]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[row])
    else:
        mark = rng.choice([mark for mark in ("\t", " ", ">", "/") if mark in lines[row]] or ["\t"])
        cells = lines[row].split(mark)
        column = rng.randrange(len(cells))
        if kind == 2:
            del cells[column]
        elif kind == 3:
            cells.insert(column, rng.choice(cells))
        else:
            cells[column] = rng.choice(CELLS)
        lines[row] = mark.join(cells)
    return "\n".join(lines).encode("utf-8", errors="replace")


def _values(value: Any, rng: random.Random) -> Any:
    """The value with one part lost, doubled or of another kind."""
    places = [None, *_places(value)]
    place = rng.choice(places)
    if place is None:  # rarely of a large file
        return rng.choice(VALUES)()
    holder, key = place
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif kind == 2:
        holder[key] = copy.deepcopy(
            rng.choice([other[at] for other, at in rng.sample(places[1:], min(5, len(places) - 1))])
        )
    elif kind == 3 and isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
        holder[key] = rng.choice(
            (-holder[key], str(holder[key]), holder[key] * 1000, float(holder[key]), [holder[key]])
        )
    else:
        holder[key] = rng.choice(VALUES)()
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (dict or list, key or row) within a value."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
