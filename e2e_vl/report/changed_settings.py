"""Which settings of a run differ from their defaults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import MISSING

from e2e_vl.config import RunConfig

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ChangedSetting:
    """A setting of a run, its value and its default, as they would stand in a YAML file."""

    name: str  # dotted
    value: str
    default: str  # "" where it has no default


def changed_settings(config: RunConfig, part_defaults: Mapping[str, Any] | None = None) -> list[ChangedSetting]:
    """The settings of a run that differ from the defaults of `e2e_vl/config.py`, in their order there.

    Args:
        config: the run's settings.
        part_defaults: defaults of keys that belong to the run's detector, encoder, task and reader, nested as in
            `RunConfig`; None: the defaults of these keys are unknown.
    """
    defaults = _merged(dataclasses.asdict(RunConfig()), part_defaults or {})
    return [
        ChangedSetting(name, _text(value), _text(default))
        for name, value, default in _differences(dataclasses.asdict(config), defaults)
    ]


def _merged(values: Settings, more: Mapping[str, Any]) -> Settings:
    """`values` with `more` on top."""
    return values | {
        key: _merged(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
        for key, value in more.items()
    }


def _differences(values: Settings, defaults: Settings, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in values.items():
        default = defaults.get(key, MISSING)
        if isinstance(value, dict):
            yield from _differences(value, default if isinstance(default, dict) else {}, f"{prefix}{key}.")
        elif json.dumps(value, default=str) != json.dumps(default, default=str):  # a tuple equals a list there
            yield prefix + key, value, default


def _text(value: Any) -> str:
    if isinstance(value, str):
        return "" if value == MISSING else value
    return json.dumps(value, default=str, ensure_ascii=False)
