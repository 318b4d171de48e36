"""From a dict, as YAML has it, to a dataclass: the one way for all settings, with checks that name the key."""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, Literal, TypeVar

from detector.errors import UserError

Settings = TypeVar("Settings")

_NEAR = 0.55  # keys below this likeness are not suggested


def from_dict(cls: type[Settings], values: Mapping[str, Any], where: str) -> Settings:
    """Make a dataclass of a dict.

    Fields may be int, float (an int is taken too), bool, str, None, Any, Literal, lists, tuples (from lists), dicts and
    dataclasses, alone or joined with `|`.

    Args:
        values: field name -> value; a field that is left out has its default.
        where: dotted name of the dict for messages, such as "task.config".

    Raises:
        ValueError: an unknown key, a missing or unfit value, or what the dataclass itself raises; the message names
            the key below `where`.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where} is {values!r}; it must hold settings as `key: value`.")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    check_keys(fields, values, where)
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}.{name} has no value; set it.")
    kinds = typing.get_type_hints(cls)
    return cls(**{name: _converted(kinds[name], value, f"{where}.{name}") for name, value in values.items()})


def check_keys(known: Iterable[str], given: Iterable[str], where: str, *, who: str = "it") -> None:
    """Raise a ValueError for the first given key that is unknown; it lists the known ones that `who` takes."""
    known = list(known)
    for key in given:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"; did you mean '{where}.{near}'?" if near else "."
            raise UserError(f"{where} has the unknown key '{key}'; {who} takes {', '.join(known) or 'nothing'}{hint}")


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ValueError unless the value of a setting is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise UserError(f"{key} is '{value}'; it must be one of {', '.join(choices)}.")


def check_kind(key: str, value: Any, kind: Any) -> None:
    """Raise a ValueError unless the value of a setting is of a kind that `from_dict` takes for fields of this type."""
    _converted(kind, value, key)


def check_numbers(
    settings: object, prefix: str, *, positive: Iterable[str] = (), not_negative: Iterable[str] = ()
) -> None:
    """Raise a ValueError unless the named fields are None or finite numbers above 0 (`not_negative`: from 0 on).

    A field's dotted key, for the message, is `prefix` and its name.
    """
    for names, fits, needed in ((positive, operator.gt, "be positive"), (not_negative, operator.ge, "not be negative")):
        for name in names:
            value = getattr(settings, name)
            if value is not None and not (math.isfinite(value) and fits(value, 0)):
                raise UserError(f"{prefix}{name} is {value}; it must {needed}.")


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that an unknown one probably means: by its spelling, its initials, its words or its section.

    What is in a section with a free `config`, and resembles nothing else, belongs there: `encoder.hidden_size`.
    """
    likeness = {name: _likeness(key, name) for name in known}
    best = max(likeness, key=likeness.__getitem__, default=None)
    if best is not None and likeness[best] >= _NEAR:
        return best
    free = f"{key.rpartition('.')[0]}.config"
    return free if free in likeness else None


def _likeness(key: str, name: str) -> float:
    """How alike the last parts of two dotted keys are, 0 to 1, less where they are in different sections."""
    section, _, last = key.rpartition(".")
    other_section, _, other = name.rpartition(".")
    spelling = SequenceMatcher(None, last, other).ratio()
    words, other_words = last.split("_"), other.split("_")
    initials, other_initials = ("".join(word[:1] for word in part) for part in (words, other_words))
    shared = sum(any(_same_word(one, two) for two in other_words) for one in words)
    meaning = 0.6 + 0.2 * shared / len(words) + 0.1 * spelling if shared else 0.0
    if sorted(last) == sorted(other) or initials == other or last == other_initials:
        meaning = 0.9 + 0.1 * spelling
    if not section:
        return max(spelling, meaning) - 0.01 * name.count(".")
    distance = 1 - SequenceMatcher(None, section, other_section).ratio() if other_section else 0.5
    return max(spelling - 0.5 * distance, meaning - 0.25 * distance)


def _same_word(one: str, two: str) -> bool:
    return min(len(one), len(two)) > 2 and (one.startswith(two[:5]) or two.startswith(one[:5]))


def _converted(kind: Any, value: Any, where: str) -> Any:
    """The value as the wanted type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _converted_to_one_of(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where)
    if origin is Literal and any(value == choice and type(value) is type(choice) for choice in parts):
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        kinds = parts if origin is tuple and ... not in parts else parts[:1] * len(value)
        if len(kinds) == len(value):
            items = enumerate(zip(kinds, value, strict=True))
            return origin(_converted(kind, item, f"{where}[{i}]") for i, (kind, item) in items)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        keys = {key: _converted(parts[0], key, f"a key of {where}") for key in value}
        return {keys[key]: _converted(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{where} is {value!r}; it must be {_with_article(_name_of(kind))}.")


def _converted_to_one_of(union: Any, value: Any, where: str) -> Any:
    kinds = [kind for kind in typing.get_args(union) if kind is not types.NoneType or value is None]
    if len(kinds) == 1 and dataclasses.is_dataclass(kinds[0]):  # its own message says more
        return from_dict(kinds[0], value, where)
    for kind in kinds:
        try:
            return _converted(kind, value, where)
        except ValueError:
            continue
    raise UserError(f"{where} is {value!r}; it must be {_with_article(_name_of(union))}.")


def _name_of(kind: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_name_of, parts))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (list, tuple):
        count = f"{len(parts)} " if origin is tuple and ... not in parts else ""
        return f"list of {count}{_name_of(parts[0])}"
    if origin in (dict, Mapping):
        return f"dict of {_name_of(parts[1])}"
    return "None" if kind is types.NoneType else getattr(kind, "__name__", str(kind))


def _with_article(name: str) -> str:
    return name if name.startswith(("one of", "None")) else f"a {name}"
