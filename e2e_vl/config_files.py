"""Reading and writing a run's settings: YAML files with their bases, and `key=value` arguments.

The command line (`train.lr=1e-5`) overrides the file, the file its `base:` file, and that file the defaults of
`e2e_vl/config.py`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from detector.config import DetectorConfig
from detector.errors import MissingFileError, UserError, user_path
from detector.io import decode_yaml, read_yaml, write_text
from detector.yaml_tree import merge
from detector.zoo import PublishedWeights, resolve_weights
from e2e_vl.config import RunConfig, RunDetectorConfig
from e2e_vl.registry import DATASETS, ENCODERS, TASKS

PACKAGED_CONFIGS = Path(__file__).parent / "configs"  # of an installed package; a clone has them beside the package
CONFIGS = PACKAGED_CONFIGS if PACKAGED_CONFIGS.is_dir() else Path(__file__).resolve().parents[1] / "configs"
INPUTS = (  # keys that name existing files or folders, see `load_config`
    *("detector.config", "detector.weights", "encoder.weights", "encoder.fallback_weights"),
    *("task.weights", "task.fallback_weights", "task.config.answers", "phrases.weights"),
    "box_refinement.weights",
    *("data.vocabulary", "data.root"),
)
COMMON = "common.yaml"  # what the configs of a folder share, see `base:`; on its own it is no run
Tree = dict[str, Any]  # nested settings, as in YAML


def find_config(name: str | Path) -> Path:
    """Find a config file by its path, or by the name of one in the package, such as demo/refcoco.

    The extension `.yaml` may be omitted.
    """
    path = user_path(name, "The config")
    for folder in (Path(), CONFIGS.parent, CONFIGS):
        for candidate in (folder / path, folder / f"{path}.yaml"):
            if candidate.is_file():
                return candidate
    written = str(path.with_suffix("")).removeprefix("configs/")
    files = [file for file in sorted(CONFIGS.glob("*/*.yaml")) if file.name != COMMON]
    names = [file.relative_to(CONFIGS).with_suffix("").as_posix() for file in files]
    names += [str(file) for file in sorted(path.parent.glob("*.yaml"))]
    similar = difflib.get_close_matches(written, names)
    if not similar:
        similar = [other for other in names if Path(other).name == path.stem]
    hint = f"give a path, or the name of a file in {CONFIGS}."
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    raise MissingFileError(f"{name}: there is no such config; {hint}")


def load_config(path: str | Path, overrides: Iterable[str] = (), defaults: Iterable[str] = ()) -> RunConfig:
    """Read a run's settings.

    Relative paths under the keys in `INPUTS` work from any directory: a path in a YAML file that does not exist in the
    working directory is searched for in the folder of that file, then in its parents, then (all but `data.root`) beside
    `CONFIGS`. Paths that are found nowhere, and paths from the command line, do not change.

    Args:
        path: YAML file, see `find_config`; its `base:` key names a file with the settings that it overrides, relative
            to it or as in `find_config`, or a list of them, of which later ones override earlier ones.
        overrides: `key=value` arguments; dots separate the levels (`train.lr=1e-5`).
        defaults: `key=value` arguments that the file overrides.
    """
    path = find_config(path)
    default = _nest("detector.config", RunDetectorConfig().config)
    layers = [(str(path), _with_found_inputs(default, path.parent))]
    layers += [(f"Command line: {word}", parse_override(word)) for word in defaults]
    layers += _read_layers(path)
    layers += [(f"Command line: {word}", parse_override(word)) for word in overrides]
    try:
        config = msgspec.convert(_merge_all(layers), RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(_explain(str(error), layers)) from error
    return msgspec.structs.replace(config, output=str(user_path(config.output, "output")))


def save_config(config: RunConfig, path: str | Path) -> None:
    text = yaml.safe_dump(msgspec.to_builtins(config, str_keys=True), sort_keys=False, allow_unicode=True)
    write_text(Path(path), text)


def parse_override(word: str) -> Tree:
    """Read a `key=value` argument as nested settings."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise UserError(f"Command line: '{word}' is not of the form key=value, such as train.lr=1e-5.")
    return _nest(key, decode_yaml(value, f"Command line: the value in '{word}'"))


def parse_overrides(words: Iterable[str]) -> Tree:
    """Read `key=value` arguments as nested settings; later ones override earlier ones."""
    return functools.reduce(merge, map(parse_override, words), {})


def differences(first: Any, second: Any, prefix: str = "") -> list[str]:
    """List the differences of two settings, as `key: first -> second` lines."""
    if isinstance(first, msgspec.Struct):
        first = msgspec.to_builtins(first)
    if isinstance(second, msgspec.Struct):
        second = msgspec.to_builtins(second)
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return [] if first == second else [f"{prefix}: {first} -> {second}"]
    lines = []
    for key in sorted({*first, *second}):
        name = f"{prefix}.{key}" if prefix else str(key)
        lines += differences(first.get(key), second.get(key), name)
    return lines


def _read_layers(path: Path) -> list[tuple[str, Tree]]:
    """Return the settings of a file and of its base files, the innermost base first, each with its file name."""
    tree = dict(read_yaml(path) or {})
    bases = tree.pop("base", None) or []
    if isinstance(bases, str):
        bases = [bases]
    layers = []
    for base in bases:
        beside = path.parent / base
        layers += _read_layers(beside if beside.is_file() else find_config(base))
    return [*layers, (str(path), _with_found_inputs(tree, path.parent))]


def _merge_all(layers: list[tuple[str, Tree]]) -> Tree:
    return functools.reduce(merge, (tree for _, tree in layers), {})


def _nest(key: str, value: Any) -> Tree:
    """Turn `a.b` and 1 into {"a": {"b": 1}}."""
    return functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)


def _with_found_inputs(tree: Tree, folder: Path) -> Tree:
    """Return the settings of a file in `folder`, with input paths that can be opened; see `load_config`."""
    exists = os.path.exists  # unlike Path.exists, it returns False in a folder without permission
    above = folder.resolve()
    folders = [above, *above.parents, CONFIGS.parent]
    for key in INPUTS:
        written = _get(tree, key.split("."))
        if not isinstance(written, str) or Path(written).is_absolute() or written.startswith("~"):
            continue
        if exists(written):
            continue
        for candidate in folders:
            if key == "data.root" and candidate == CONFIGS.parent:
                continue  # what lies in a clone may be the synthetic data of another run
            if exists(candidate / written):
                tree = merge(tree, _nest(key, str(candidate / written)))
                break
    return tree


_ABSENT = object()


def _get(tree: Any, names: Sequence[str]) -> Any:
    """Return the setting under a path of keys; `_ABSENT` if it is not set."""
    for name in names:
        tree = tree.get(name, _ABSENT) if isinstance(tree, dict) else _ABSENT
    return tree


_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


def _explain(message: str, layers: list[tuple[str, Tree]]) -> str:
    """Rewrite an error of `msgspec.convert` as a sentence with the file or argument, the key and the problem."""
    section = ".".join(name for name in reversed(_PATH.findall(message)) if name)
    problem = re.sub(r"\barray\b", "list", _PATH.sub("", message).rstrip("."))
    missing = _MISSING.fullmatch(problem)
    if missing is not None:
        key = _join(section, missing[1])
        return f"{layers[0][0]}: {key} has no value; set it in the file or as key=value."
    types = _setting_types(layers)
    unknown = _UNKNOWN.fullmatch(problem)
    if unknown is not None:
        return _explain_unknown(section, unknown[1], types, layers)
    if problem.startswith("Invalid enum value"):
        choices = _list_choices(types.get(section.partition("[")[0]))
        problem += f"; it must be one of {', '.join(choices)}"
    source = _find_source(section, layers)
    name = f"{section}: " if section and f": {section}=" not in source else ""
    ending = "" if problem.endswith("?") else "."
    return f"{source}: {name}{problem}{ending}"


def _explain_unknown(section: str, field: str, types: dict[str, Any], layers: list[tuple[str, Tree]]) -> str:
    """Return the sentence about a setting `field` that `section` (a dotted key, or "") does not have."""
    key = _join(section, field)
    source = _find_source(key, layers)
    top = key.partition(".")[0]
    name_source = _find_source(f"{top}.name", layers)
    order = {name: level for level, (name, _) in enumerate(layers)}
    if section.startswith(f"{top}.config") and order[source] < order[name_source]:
        return f"{name_source}: {source} sets '{key}', which this {top} does not have; use a file that fits it."
    siblings = [name.rpartition(".")[2] for name in types if name.rpartition(".")[0] == section]
    suggestions = _suggest(section, field, siblings, types)
    if suggestions:
        hint = f"; did you mean '{suggestions[0]}'?"
    elif siblings:
        hint = f"; {section or 'the top level'} has {', '.join(siblings)}."
    else:
        hint = "; see e2e_vl/config.py."
    return f"{source}: there is no setting '{key}'{hint}"


def _suggest(section: str, field: str, siblings: Sequence[str], types: dict[str, Any]) -> list[str]:
    """List settings with similar names: first those of the section, then of the whole key, then of its last part."""
    key = _join(section, field)
    suggestions = [_join(section, name) for name in difflib.get_close_matches(field, siblings, n=1)]
    near = list(types)
    if section:
        near = [name for name in types if name.startswith(f"{key.partition('.')[0]}.")]
    others = [name for name in near if not key.startswith(name)]
    suggestions += difflib.get_close_matches(key, others, n=1, cutoff=0.85)
    last_names = [name.rpartition(".")[2] for name in near]
    for last_name in difflib.get_close_matches(field, last_names, n=1):
        suggestions += [name for name in near if name.rpartition(".")[2] == last_name]
    return suggestions


def _join(section: str, field: str) -> str:
    return f"{section}.{field}" if section else field


def _list_choices(kind: Any) -> list[str]:
    """List the allowed values of an enum or `Literal` type."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member) for member in kind]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in arguments]
    choices = []
    for argument in arguments:
        choices += _list_choices(argument)
    return choices


def _setting_types(layers: list[tuple[str, Tree]]) -> dict[str, Any]:
    """Return the types of all settings by dotted name, with those of the selected encoder, task and data set."""
    merged = _merge_all(layers)
    types = dict(_types_in(RunConfig, ""))
    for section, registry in (("encoder", ENCODERS), ("task", TASKS), ("data", DATASETS)):
        if not isinstance(merged.get(section), dict):
            continue
        entry = registry.get(merged[section].get("name"))
        if entry is not None:
            types.update(_types_in(entry.config_class, f"{section}.config."))
    return types


def _types_in(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        yield f"{prefix}{field.name}", field.type
        for inner in (field.type, *getattr(field.type, "__args__", ())):  # X, or the X of X | None
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from _types_in(inner, f"{prefix}{field.name}.")


def _find_source(key: str, layers: list[tuple[str, Tree]]) -> str:
    """Find the file or argument that last set a dotted key, or else the section around it."""
    names = key.partition("[")[0].split(".")
    for count in range(len(names), 0, -1):
        for source, tree in reversed(layers):
            if _get(tree, names[:count]) is not _ABSENT:
                return source
    return layers[0][0]


# The detector's settings


def read_detector_config(settings: RunDetectorConfig) -> DetectorConfig:
    """Read the Detectron2 YAML file (or that of published weights), with `detector.overrides`."""
    published = resolve_weights(settings.config)
    path = published.config_path if isinstance(published, PublishedWeights) else find_config(published)
    if not settings.overrides:
        return DetectorConfig.from_yaml(path)
    # not `resolve`: the cache of the Hugging Face hub links to files without an extension
    return DetectorConfig.from_yaml({"_BASE_": str(path.absolute()), **settings.overrides})
