"""Settings as trees: read YAML files with their bases, merge them, and turn trees into dotted keys and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detector.errors import UserError, user_path
from detector.io import read_yaml

LEAVES = ("MODEL.TRANSFORMERS_BACKBONE.CONFIG",)  # mappings with keys of their own


def load_tree(path: Path) -> dict[str, Any]:
    """Read a YAML file and merge it into its `_BASE_` files."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of keys, found {type(tree).__name__}.")
    return merge_bases(tree, path.parent)


def merge_bases(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Merge `tree` into the files listed in its `_BASE_` (a path or a list).

    They are relative to `folder`, or are files of this package, such as detector/published/R_101_C4.yaml.
    """
    bases = tree.get("_BASE_", [])
    merged: dict[str, Any] = {}
    if isinstance(bases, str):
        bases = [bases]
    for base in bases:
        path = folder / user_path(base)
        if not path.exists():
            path = Path(__file__).parents[1] / user_path(base)
        merged = merge(merged, load_tree(path))
    return merge(merged, {key: value for key, value in tree.items() if key != "_BASE_"})


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge nested settings; `above` overrides `below`."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            value = merge(merged[key], value)
        merged[key] = value
    return merged


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"A": {"B": 1}} into {"A.B": 1}; the values of `LEAVES` stay mappings."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in LEAVES:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Turn {"A.B": 1} into {"A": {"B": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
