"""References between settings: `${data.root}` in a text stands for the value of that setting, and is all there is.

OmegaConf also knows resolvers, such as one that reads an environment variable. A settings file from somebody else would
copy what it likes into the saved settings and the report, so everything but a reference is refused before anything is
looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from detector.errors import UserError, user_path

LONGEST = 1000  # characters of a text that is referred to
MOST = 1000  # references in all settings of a run
_REFERENCE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def check_references(content: Any, name: str) -> None:
    """Check that the settings of one file or word refer to other settings only.

    Raises:
        UserError: a key or a value has `${` in another use; the message names `name` and the key.
    """
    for key, value in _texts(content):
        if "${" in _REFERENCE.sub("", value):
            raise UserError(
                f"{name}: {key} has '${{' in another use than ${{section.setting}}, the value of another setting; "
                "write the value itself."
            )


def check_targets(content: Mapping[str, Any]) -> None:
    """Check that what the joined settings refer to is short and refers to nothing itself, so that it stays small.

    A name that no setting has is left to OmegaConf.

    Raises:
        UserError: a reference to a section, to a list, to a reference, or to a long text, or too many of them.
    """
    number = 0
    for key, value in _texts(content):
        for reference in _REFERENCE.findall(value):
            number += 1
            target = _value_of(content, reference)
            if isinstance(target, Mapping | list) or (isinstance(target, str) and "${" in target):
                raise UserError(f"{key} refers to {reference}, which is not one plain value; write the value there.")
            if isinstance(target, str) and len(target) > LONGEST:
                raise UserError(
                    f"{key} refers to {reference}, a text of more than {LONGEST} characters; write the value there."
                )
    if number > MOST:
        raise UserError(f"the settings refer to others more than {MOST} times; write values.")


def check_resolved(content: Any) -> None:
    """Check that all resolved texts can be saved, and that none would be taken for a reference when it is read again.

    Raises:
        UserError: some text does, or holds half of a character, or begins with the `~` of nobody.
    """
    for key, value in _texts(content):
        if "\0" in value:
            raise UserError(f"{key} holds a zero byte; rename the file.")
        if value.startswith("~"):
            user_path(value, key)
        if "${" in value:
            raise UserError(f"{key} becomes a text with '${{'; write it without references.")


def _texts(content: Any) -> Iterator[tuple[str, str]]:
    """Dotted key and text of all texts, keys themselves included."""
    left = [("", content)]
    while left:
        key, value = left.pop()
        if isinstance(value, str):
            yield key or "a setting", value
        elif isinstance(value, Mapping):
            for name, one in value.items():
                if isinstance(name, str) and "${" in name:
                    yield f"a key of {key}" if key else "a key", "${"
                left.append((f"{key}.{name}" if key else str(name), one))
        elif isinstance(value, list | tuple):
            left += [(f"{key}[{number}]", one) for number, one in enumerate(value)]


def _value_of(content: Any, reference: str) -> Any:
    for name in reference.split("."):
        if isinstance(content, Mapping):
            content = content.get(name)
        elif isinstance(content, list):
            content = content[int(name)] if name.isdecimal() and int(name) < len(content) else None
        else:
            return None
    return content


def misplaced(values: Any, others: Any, name: str = "") -> tuple[str, str] | None:
    """Name of the first setting that is a list in one and a mapping in the other, and what it must be."""
    if isinstance(values, list) and isinstance(others, dict):
        return name, "a list, [a, b]"
    if not isinstance(values, dict):
        return None
    if isinstance(others, list):
        return name, "a mapping, {key: value}"
    common = [key for key in others if key in values] if isinstance(others, dict) else []
    found = (misplaced(values[key], others[key], f"{name}.{key}" if name else str(key)) for key in common)
    return next((one for one in found if one is not None), None)


def refused_setting(config: DictConfig, content: dict[str, Any], above: str = "") -> str:
    """Name of the first setting that OmegaConf does not merge although it knows it, such as a mapping for a list that
    has no value yet."""
    for key, value in content.items():
        name, layer = f"{above}.{key}" if above else str(key), value
        for part in reversed(name.split(".")):
            layer = {part: layer}
        try:
            OmegaConf.merge(config, layer)
        except TypeError:
            inner = isinstance(value, dict) and OmegaConf.is_dict(OmegaConf.select(config, name))
            return refused_setting(config, value, name) if inner else name
    return above
