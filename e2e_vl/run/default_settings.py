"""The defaults of the settings whose keys belong to the named parts of a run, for reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from detector.config import DetectorConfig
from detector.io import decode_yaml
from e2e_vl.config import RunConfig
from e2e_vl.run.build import OBJECTIVES, named_parts
from e2e_vl.synthetic import LanguageConfig, SceneConfig


def part_defaults(config: RunConfig) -> dict[str, Any]:
    """Nested as in `RunConfig`: `encoder.config`, `task.config`, `data.config`, `data.synthetic.config` and
    `detector.overrides`, each with the defaults of the classes that a run's settings name. Both detector backends have
    the same keys.
    """
    parts = named_parts(config)
    task = _defaults(parts.task[0])
    if parts.task[1].sums_objectives:
        given = config.task.config.get("objectives") or {}
        own = {name: _defaults(config_class) for name, (config_class, _) in OBJECTIVES.items()}
        # an objective may be given by its weight alone
        task["objectives"] = {
            name: own[name]["weight"] if isinstance(given.get(name), int | float) else own[name] for name in own
        }
    return {
        "detector": {"overrides": decode_yaml(DetectorConfig.from_yaml({}).to_yaml(), "detector")},
        "encoder": {"config": _defaults(parts.encoder[0])},
        "task": {"config": task},
        "data": {
            "config": _defaults(parts.dataset.options),
            "synthetic": {"config": {"scene": _defaults(SceneConfig), "language": _defaults(LanguageConfig)}},
        },
    }


def _defaults(config_class: type) -> dict[str, Any]:
    """The defaults of a dataclass, without fields that have none."""
    defaults = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        for name, value in defaults.items()
    }
