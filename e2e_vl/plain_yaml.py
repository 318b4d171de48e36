"""Settings files that came with a model: a folder from outside names no other file and no environment variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detector.errors import MissingFileError, UserError
from detector.io import read_yaml

BASES = ("base", "_BASE_")  # keys that name another file: of a run's settings, and of a detector's (Detectron2)


def check_plain(path: str | Path) -> None:
    """Check that everything in a YAML file stands in the file itself; a saved model's files are like that.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, names a base file, or refers to other values or to environment variables (`${...}`).
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such settings file; a saved model has one.")
    found = _not_plain(read_yaml(path))
    if found is not None:
        raise UserError(
            f"{path}: has '{found}', but the settings of a saved model stand in the file itself; do not use this "
            "model, or write the values there."
        )


def _not_plain(content: Any) -> str | None:
    """The first base file or reference; base files are named by keys of the outermost mapping."""
    if isinstance(content, dict):
        base = next((key for key in BASES if key in content), None)
        if base is not None:
            return f"{base}:"
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, str) and "${" in value:
            return value
        if isinstance(value, dict | list):
            left += [*value, *value.values()] if isinstance(value, dict) else value
    return None
