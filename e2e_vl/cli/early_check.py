"""Finds mistyped names in the settings of parts before torch is imported.

The config classes of tasks, objectives, encoders and data sets stand beside the networks, whose imports take seconds.
Their field names are read from the source instead of from the class. Only names are checked here; building the parts
checks names, types and values with the classes themselves.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from e2e_vl.config import RunConfig
from e2e_vl.converter import check_choice, check_keys

BUILD = "e2e_vl.run.build"  # the module whose dicts name the parts


def check_part_names(config: RunConfig) -> None:
    """Check the names of parts and the keys of their free settings.

    Raises:
        ValueError: an unknown name or key; the message lists the known ones and suggests the nearest.
    """
    for choices, part, section in (("TASKS", config.task, "task"), ("ENCODERS", config.encoder, "encoder")):
        classes = _entries(choices)
        check_choice(f"{section}.name", part.name, classes)
        _check(classes[part.name], part.config, f"{section}.config")
    datasets = _entries("DATASETS")
    check_choice("data.name", config.data.name, datasets)
    reader = _module_of(BUILD, datasets[config.data.name])
    options = _assigned_name(_class(*reader), "options")
    if options is not None:
        check_keys(field_names(*_module_of(reader[0], options)), config.data.config, "data.config")
    objectives = config.task.config.get("objectives")
    if isinstance(objectives, Mapping):
        classes = _entries("OBJECTIVES")
        check_keys(classes, objectives, "task.config.objectives")
        for name, settings in objectives.items():
            _check(classes[name], settings, f"task.config.objectives.{name}")


def _check(class_name: str, settings: Any, where: str) -> None:
    if isinstance(settings, Mapping):
        check_keys(field_names(*_module_of(BUILD, class_name)), settings, where)


def field_names(module: str, class_name: str) -> list[str]:
    """Names of a dataclass's fields, of its bases first, in the order of the source."""
    found = _class(module, class_name)
    if found is None or (not found.decorator_list and not found.bases):
        return []  # of no dataclass, such as a mixin
    names = []
    for base in found.bases:
        if isinstance(base, ast.Name):
            names += field_names(*_module_of(module, base.id))
    return [*names, *(name for name in _annotated(found) if name not in names)]


def _annotated(found: ast.ClassDef) -> Iterator[str]:
    """Fields that a constructor takes; constants of the class are none."""
    for line in found.body:
        is_named = isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if is_named and "ClassVar" not in ast.unparse(line.annotation) and "init=False" not in ast.unparse(line):
            yield line.target.id


def _assigned_name(found: ast.ClassDef, name: str) -> str | None:
    """What a class assigns to a name, where that is a name too; None if it assigns nothing."""
    for line in found.body:
        if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == [name]:
            return ast.unparse(line.value)
    return None


def _entries(choices: str) -> dict[str, str]:
    """A dict of `BUILD`: name of a part -> name of its config class, or of its class if it stands alone."""
    for line in _source(BUILD).body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(target, ast.Name) and target.id == choices:
            values = (value.elts[0] if isinstance(value, ast.Tuple) else value for value in line.value.values)
            return {key.value: value.id for key, value in zip(line.value.keys, values, strict=True)}
    raise LookupError(f"{BUILD} has no dict {choices}")


def _class(module: str, class_name: str) -> ast.ClassDef | None:
    lines = _source(module).body
    return next((line for line in lines if isinstance(line, ast.ClassDef) and line.name == class_name), None)


def _module_of(module: str, name: str) -> tuple[str, str]:
    """The module that a name comes from which this one uses, and the name there."""
    package = module.rpartition(".")[0]
    for line in _source(module).body:
        names = {alias.asname or alias.name: alias.name for alias in getattr(line, "names", ())}
        if isinstance(line, ast.ImportFrom) and name in names:
            return importlib.util.resolve_name("." * line.level + (line.module or ""), package), names[name]
    return module, name


@cache
def _source(module: str) -> ast.Module:
    """A module as a syntax tree. Its package is found, but not imported."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    path = Path(spec.submodule_search_locations[0], *rest)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
