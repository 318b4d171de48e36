"""Whether the settings of one file have the kinds that their fields name, before OmegaConf turns one into another.

OmegaConf makes a text of every number and truth value, and a truth value of every number: `output: yes` would become a
folder named True, and `skip_broken: -1` would switch something on. It also names no setting where a section is a plain
value.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from detector.errors import UserError
from e2e_vl.io import shown

LONGEST = 4096  # characters of a text: of the longest path that Linux takes


def check_kinds(section: type, content: Mapping[Any, Any], name: str, above: str = "") -> None:
    """Check that sections are mappings, texts are texts, and truth values are truth values.

    Unknown keys, and numbers and lists in the wrong places, are left to OmegaConf.

    Args:
        section: the dataclass of the settings.
        content: what a file or a word of the command line holds of it.
        name: of the file, for messages.
        above: dotted name of the section, with a dot at its end.

    Raises:
        UserError: another kind of value, or a blank or very long text; the message names `name` and the setting.
    """
    kinds = typing.get_type_hints(section)
    for key, value in content.items():
        if key in kinds and value is not None:
            _check(kinds[key], value, f"{name}: setting '{above}{key}'", name, f"{above}{key}")


def _check(kind: Any, value: Any, where: str, name: str, key: str) -> None:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        [kind] = [part for part in parts if part is not types.NoneType]
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(value, list):
        for number, item in enumerate(value):
            _check(parts[0], item, f"{where}, entry {number}", name, key)
    elif origin is dict and isinstance(value, Mapping):
        for inner, item in value.items():
            if item is not None:
                _check(parts[1], item, f"{name}: setting '{key}.{inner}'", name, f"{key}.{inner}")
    elif dataclasses.is_dataclass(kind) or origin is dict:
        if not isinstance(value, Mapping | list):  # a list: see `misplaced` in e2e_vl/setting_references.py
            raise UserError(f"{where} is {shown(value)}; it must be a mapping, {{key: value}}.")
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            check_kinds(kind, value, name, f"{key}.")
    elif kind is bool and not _is_truth_value(value):
        raise UserError(f"{where} is {shown(value)}; it must be true or false.")
    elif kind is str:
        _check_text(value, where)


def _check_text(value: Any, where: str) -> None:
    if isinstance(value, bool | float):
        raise UserError(f"{where} is {value}, which is no text; write it in quotes if it is meant as one.")
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{where} is {value!r}, a blank text; give a value, or leave it out.")
    if isinstance(value, str) and len(value) > LONGEST:
        raise UserError(f"{where} has {len(value)} characters; a text has at most {LONGEST}.")


def _is_truth_value(value: Any) -> bool:
    is_reference = isinstance(value, str) and "${" in value
    return is_reference or isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
