"""Files of predictions that are one JSON list, an entry a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detector.io import write_text


def write_list(path: str | Path, entries: Iterable[Any]) -> None:
    """Write the entries; folders that are missing are made."""
    path = Path(path)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False, allow_nan=False) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"[\n{lines}\n]\n")
