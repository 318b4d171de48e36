"""Records of JSON-like files, checked against what a format declares: types, needed keys and ranges.

A format declares each kind of record as a `msgspec.Struct` whose fields have the types below. Keys that no field names
are allowed, since official files have more of them. A whole number may be written as 640.0 where a whole number is
declared.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Meta

from detector.errors import UserError
from e2e_vl.io import Count as Count
from e2e_vl.io import FourNumbers as FourNumbers
from e2e_vl.io import Id as Id
from e2e_vl.io import Name as Name
from e2e_vl.io import Pixel as Pixel
from e2e_vl.io import Record as Record
from e2e_vl.io import Score as Score
from e2e_vl.io import Side as Side
from e2e_vl.io import Words as Words
from e2e_vl.json_keys import has_each_key_once, repeated_key

Found = TypeVar("Found")

REMEDY = "correct the record, or copy or download the file again"
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_LARGEST = 1e9  # pixels; float32 holds every sum of two such numbers

Number = int
Box = FourNumbers


# what msgspec raises for a value of another kind; UnicodeError: a text with half of a character
MISFITS = (msgspec.ValidationError, RecursionError, UnicodeError)


def checked(kind: type[Found], value: Any, where: str, *, remedy: str = REMEDY) -> Found:
    """The value of a file as an instance of what is declared.

    Args:
        kind: a `Record`, or any type that msgspec knows.
        value: what the file holds: dicts, lists, texts and numbers.
        where: names the file and the record in the error.
        remedy: ends the error.

    Raises:
        UserError: the value is not of this kind; the sentence names the field and what is expected there.
    """
    try:
        return msgspec.convert(value, kind)
    except MISFITS as error:
        return _with_whole_numbers(kind, value, where, remedy, error)


def decoded(
    kind: type[Found],
    data: bytes | str,
    where: str,
    *,
    key: str = "",
    form: str = "",
    remedy: str = REMEDY,
    looks_for_doubles: bool = True,
) -> Found:
    """A JSON text as an instance of what is declared.

    Args:
        data: UTF-8.
        key: of a text that names the record in the error, where it has one.
        form: what is expected where the text is not JSON, such as "one object per line is expected".
        looks_for_doubles: refuse a key that is twice in one object; otherwise its last value counts.

    Raises:
        UserError: the text is not JSON, has a key twice in one object, or is not of this kind; see `checked`.
    """
    try:
        found = msgspec.json.decode(data, type=kind)
        if not looks_for_doubles or has_each_key_once(data, msgspec.json.decode(data)):
            return found
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        pass  # Python's decoder reads more (NaN, halves of characters), and its errors say where
    why = f"{form}, copy or download the file again" if form else "copy or download the file again"
    value = parsed_json(data, f"{where} is", why)
    name = value.get(key) if isinstance(value, dict) else None
    return checked(kind, value, f"{where} ({name})" if isinstance(name, str) and name else where, remedy=remedy)


def parsed_json(data: bytes | str, subject: str, remedy: str = "copy or download the file again") -> Any:
    """The value of a JSON text.

    Args:
        data: UTF-8.
        subject: begins the error, as in "val.jsonl, line 3 is" or "refs.json: the refs are".

    Raises:
        UserError: the text is not JSON, is nested too deeply, holds a number of thousands of digits, or has a key twice
            in one object.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise UserError(f"{subject} not valid JSON (lists within lists, too many to read); {remedy}") from error
    except ValueError as error:
        raise UserError(f"{subject} not valid JSON ({error}); {remedy}") from error
    if not has_each_key_once(data, value) and (double := repeated_key(data)):
        raise UserError(f"{subject} not clear: {double}; {remedy}")
    return value


def as_written(numbers: Iterable[float]) -> list[float]:
    """The numbers as a file would have them: whole ones without a point."""
    return [int(number) if number == int(number) else number for number in numbers]


def whole_number(text: str) -> int:
    """A whole number as files write it; `int` also takes digits of other scripts, and underscores between digits.

    Raises:
        ValueError: the text is something else, or has more than 18 digits.
    """
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(f"{cut_text(text)} is not a whole number")
    return int(text)


def cut_text(value: Any, limit: int = 100) -> str:
    """The value as Python writes it, cut off where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or lists within lists
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= limit else f"{text[:limit]}..."


# ---- What is said of a value that is not as declared.

_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<row>\d+)\]|(?P<any>\[\.\.\.\])")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `(?P<kind>[^`]*)`(?P<more>.*)", re.DOTALL)
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_LIMITS = ((">= ", "from {} on"), ("> ", "above {}"), ("<= ", "up to {}"), ("< ", "below {}"))


def _with_whole_numbers(kind: type[Found], value: Any, where: str, remedy: str, error: Exception) -> Found:
    """The value with whole numbers in the place of floats such as 640.0, if whole numbers are declared.

    Raises:
        UserError: that is not what is wrong with it.
    """
    if isinstance(error, msgspec.ValidationError) and _parts(error)[0].startswith("Expected `int"):
        try:
            value = _whole_numbers(value)
            return msgspec.convert(value, kind)
        except MISFITS as other:
            error = other
    raise UserError(f"{where}{_complaint(kind, value, error, remedy)}") from error


def _whole_numbers(value: Any) -> Any:
    """A copy in which every float that is a whole number is an int; msgspec takes an int where a float is declared."""
    if isinstance(value, dict):
        return {key: _whole_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_numbers(part) for part in value]
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


def _complaint(kind: type, value: Any, error: Exception, remedy: str) -> str:
    """What is wrong, behind the name of file and record."""
    if isinstance(error, RecursionError):
        return f" has lists within lists, too many to read; {remedy}"
    if isinstance(error, UnicodeError):
        return f" has a text with half of a character (a lone surrogate); {remedy}"
    missing = _missing_keys(kind, value)
    if missing:
        return f" has no {', '.join(map(repr, missing))}; {remedy}"
    what, path = _parts(error)
    steps = _steps(kind, value, path)
    place = _written(steps)
    if steps and (expected := _description(kind, steps[0])):
        return f": {steps[0]} is {cut_text(_at(value, steps[:1]))}, expected {expected}; {remedy}"
    if found := _MISSING.fullmatch(what):
        return f": {place} has no {found[1]!r}; {remedy}"
    wrong = _at(value, steps)
    if not steps and (keys := _keys(kind)) and not isinstance(wrong, dict):
        return f" is a {type(wrong).__name__}, expected an object with {', '.join(keys)}; {remedy}"
    expected = _expected(what, wrong)
    if expected is None:  # a rule of the record's own
        return f"{': ' + place if place else ''}: {what}; {remedy}"
    return f"{': ' + place if place else ''} is {cut_text(wrong)}, expected {expected}; {remedy}"


def _parts(error: Exception) -> tuple[str, str]:
    found = _MESSAGE.fullmatch(str(error))
    return (found["what"], found["path"] or "") if found else (str(error), "")


def _steps(kind: type, value: Any, path: str) -> list[str | int]:
    """Keys and rows from the value to its wrong part; msgspec does not name keys of a dict without declared fields."""
    steps: list[str | int] = []
    for found in _STEP.finditer(path):
        if found["any"]:
            key = _wrong_key(kind, value, steps, path)
            if key is None:
                break
            steps.append(key)
        else:
            steps.append(found["key"] or int(found["row"]))
    return steps


def _wrong_key(kind: type, value: Any, steps: list[str | int], path: str) -> Any:
    """The key of the dict at `steps` whose entry alone gives an error at the same place; None where there is none."""
    entries = _at(value, steps)
    if not isinstance(entries, dict):
        return None
    for key, entry in entries.items():
        try:
            msgspec.convert(_replaced(value, steps, {key: entry}), kind)
        except MISFITS as error:
            if _parts(error)[1] == path:
                return key
    return None


def _replaced(value: Any, steps: list[str | int], part: Any) -> Any:
    if not steps:
        return part
    changed = list(value) if isinstance(value, list | tuple) else dict(value)
    changed[steps[0]] = _replaced(value[steps[0]], steps[1:], part)
    return changed


def _at(value: Any, steps: Collection[str | int]) -> Any:
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _written(steps: list[str | int]) -> str:
    """As in `answers[3].answer`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _fields(kind: type) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The declared fields; none of what is not a record."""
    is_record = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return msgspec.structs.fields(kind) if is_record else ()


def _description(kind: type, key: str | int) -> str | None:
    """What a field's type says of itself."""
    for field in _fields(kind):
        if field.encode_name == key:
            told = [one.description for one in getattr(field.type, "__metadata__", ()) if isinstance(one, Meta)]
            return next(filter(None, told), None)
    return None


def _keys(kind: type) -> list[str]:
    """Keys that a record must have."""
    return [field.encode_name for field in _fields(kind) if field.required]


def _missing_keys(kind: type, value: Any) -> list[str]:
    return [key for key in _keys(kind) if key not in value] if isinstance(value, dict) else []


def _expected(what: str, wrong: Any) -> str | None:
    """What msgspec's sentence expects, in plain words; None: it is a sentence of another kind."""
    if "out of range" in what or (isinstance(wrong, float) and (wrong != wrong or abs(wrong) == float("inf"))):
        return "a finite number"
    if what.startswith("Invalid enum value"):
        return "one of the values that the format has"
    found = _EXPECTED.fullmatch(what)
    if found is None:
        return None
    kinds = [_KINDS.get(kind.strip(), kind.strip()) for kind in found["kind"].split("|")]
    expected, more = " or ".join(kinds), found["more"]
    for sign, words in _LIMITS:
        if more.startswith(f" {sign}"):
            return f"{expected} {words.format(more.removeprefix(f' {sign}'))}"
    if length := re.match(r" of length (>= |<= )?(\d+)", more):
        bound = {">= ": "at least ", "<= ": "at most "}.get(length[1] or "", "")
        return f"{expected} of {bound}{length[2]} {'characters' if 'str' in found['kind'] else 'values'}"
    if "matching regex" in more:
        return f"{expected} that is not blank" if more.endswith(r"'\\S'") else f"{expected} of the format's form"
    return expected
