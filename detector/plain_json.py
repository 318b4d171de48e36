"""Reading the JSON files of runs and saved models, wherever they come from, in bounded time and memory.

(The JSON of annotation files, which may be much larger, is read in `e2e_vl/data/`.)
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from detector.errors import MissingFileError, UserError
from detector.file_faults import reading

MAX_BYTES = 1 << 24  # of a file of settings or numbers
MAX_DEPTH = 50  # lists and objects in each other
LARGEST = 1 << 128  # transformers writes 1e30 for a length without a limit
_KINDS = {dict: "an object of names and values", list: "a list"}


def read_plain_json(
    path: str | Path, kind: type | None = dict, keys: tuple[str, ...] = (), *, max_bytes: int = MAX_BYTES
) -> Any:
    """The content of a JSON file.

    Args:
        path: the file.
        kind: dict or list, which the content must be; None: it may be anything.
        keys: an object must have these.
        max_bytes: a larger file is refused.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is too large, not UTF-8 or not JSON, has lists or objects too deep in each other, NaN, infinity or
            a number beyond 128 bits, is of another kind, or lacks a key.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; get the whole folder again.")
    with reading(path), path.open("rb") as file:
        # `read` takes as much memory as it is asked for, before it knows how much there is
        content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes} bytes, too many for such a file; get the file again.")
    found = parse_plain_json(content, f"{path}")
    if kind is not None and not isinstance(found, kind):
        raise UserError(f"{path} does not hold {_KINDS[kind]}; get the file again.")
    missing = [key for key in keys if key not in found]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; get the file again.")
    return found


def parse_plain_json(text: str | bytes, name: str) -> Any:
    """The content of a JSON text; `name` begins the message.

    Raises:
        UserError: as for `read_plain_json`.
    """
    try:
        found = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            parse_constant=_refused,
            object_pairs_hook=_each_key_once,
        )
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not JSON: byte {error.start} is not utf-8 text; get the file again.") from error
    except json.JSONDecodeError as error:
        place = f"{error.msg.lower()} in line {error.lineno}, column {error.colno}"
        raise UserError(f"{name} is not JSON ({place}); get the file again.") from error
    except RecursionError:
        raise UserError(f"{name}: {_TOO_DEEP}; get the file again.") from None
    except _RefusedError as error:
        raise UserError(f"{name} holds {error}; get the file again.") from None
    except ValueError as error:  # Python reads no number of more than 4,300 digits
        raise UserError(f"{name} holds a number of too many digits; get the file again.") from error
    if has_half_characters(text, found):
        raise UserError(f"{name}: a text holds half of a character (a lone surrogate); get the file again.")
    problem = _out_of_bounds(found)
    if problem is not None:
        raise UserError(f"{name}: {problem}; get the file again.")
    return found


def has_half_characters(text: str | bytes, found: Any) -> bool:
    """Whether a text of a parsed JSON value has half of a character, which no tokenizer takes and no file can hold.

    Args:
        text: what was parsed; most texts hold nothing that may mean such a half, so that the value is not looked at.
        found: the value.
    """
    may_be = _HALVES[type(text) is not str].search(text)
    below = [found] if may_be else []
    while below:
        value = below.pop()
        if isinstance(value, str):
            if _HALF.search(value):
                return True
        elif isinstance(value, dict):
            below += [*value, *value.values()]
        elif isinstance(value, list):
            below += value
    return False


_HALF = re.compile("[\ud800-\udfff]")
# as an escape, or as it is; characters outside the basic plane are escaped as two halves
_HALVES = (re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]"), re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]"))
_TOO_DEEP = f"its lists and objects are more than {MAX_DEPTH} deep in each other"


class _RefusedError(Exception):
    """A constant that JSON does not have, or a name twice in one object."""


def _refused(constant: str) -> None:
    raise _RefusedError(f"{constant}, which is not JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _RefusedError(f"the name {twice[:100]!r} twice")
    return found


def _out_of_bounds(found: Any) -> str | None:
    """What is too deep or too large in a parsed text, if anything."""
    level, depth = [found], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, float):
                if not math.isfinite(value):
                    return "a number is too large"
            elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
                return "a whole number has more than 128 bits"
        depth += any(isinstance(value, dict | list) for value in level)
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        level = below
    return None
