"""Which settings of a run differ from their defaults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
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


def changed_settings(config: RunConfig, task_config: Any = None) -> list[ChangedSetting]:
    """The settings of a run that differ from the defaults of `e2e_vl/config.py`, in their order there.

    Args:
        config: the run's settings.
        task_config: the dataclass of `task.config`, for the defaults of its fields; None: they are not shown.
    """
    defaults = dataclasses.asdict(RunConfig())
    if dataclasses.is_dataclass(task_config):
        defaults["task"]["config"] = _defaults(task_config)
    return [
        ChangedSetting(name, _text(value), _text(default))
        for name, value, default in _differences(dataclasses.asdict(config), defaults)
    ]


def _defaults(settings: Any) -> Settings:
    """The defaults of a dataclass, without fields that have none."""
    defaults = {}
    for field in dataclasses.fields(settings):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


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
