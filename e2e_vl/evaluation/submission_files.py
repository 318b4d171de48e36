"""Files of predictions that are one JSON list, an entry a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_list(path: str | Path, entries: Iterable[Any]) -> None:
    """Write the entries; folders that are missing are made."""
    path = Path(path)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_list(path: str | Path) -> list[Any]:
    """Read the entries.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON list.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of predictions; check the path.")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); write it again.") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of predictions.")
    return entries
