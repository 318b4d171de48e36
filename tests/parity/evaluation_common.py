"""Folders and files of the recorded evaluations; a set need not have those of every data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def folder_of(golden_root: Path, name: str) -> Path:
    """The recorded evaluation of one data set; the check is skipped where the set does not have it."""
    root = golden_root / "evaluation"
    assert any(root.iterdir()), f"{root} is empty"
    if not (root / name).is_dir():
        pytest.skip(f"the set has no evaluation/{name}; it is optional")
    return root / name


def read_optional(folder: Path, name: str) -> Any:
    """The content of a JSON file; the check is skipped where the set does not have the file."""
    if not (folder / name).exists():
        pytest.skip(f"the set has no {folder.name}/{name}; it is optional")
    return json.loads((folder / name).read_text("utf-8"))
