"""Files and folders are there as a whole or not at all, and JSON has no NaN."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from detector.io import atomic_folder
from e2e_vl.io import RunLog, find_damage, read_log, without_nan, write_checksums


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with checksums."""
    with atomic_folder(tmp_path / "made") as part:
        (part / "deep").mkdir()
        (part / "deep" / "a.bin").write_bytes(bytes(range(256)))
        (part / "b.txt").write_text("b")
        write_checksums(part)
    return tmp_path / "made"


def test_a_log_says_what_was_not_finite(tmp_path):
    assert without_nan({"a": math.nan, "b": 1.0, "c": "x"}) == {"a": None, "b": 1.0, "c": "x", "not_finite": ["a"]}
    assert without_nan({"b": 1.0}) == {"b": 1.0}
    RunLog(tmp_path / "log.jsonl", enabled=True).write(3, "eval", {"val/loss": math.inf})
    assert read_log(tmp_path / "log.jsonl") == [
        {"step": 3, "kind": "eval", "val/loss": None, "not_finite": ["val/loss"]}
    ]
    assert "Infinity" not in (tmp_path / "log.jsonl").read_text()


def test_what_is_no_file_is_not_opened(tmp_path):
    for number, make in enumerate((os.mkfifo, Path.mkdir)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "x").write_text("x")
        write_checksums(folder)
        (folder / "x").unlink()
        make(folder / "x")
        assert find_damage(folder) == "x is not a file"


def test_every_kind_of_damage_is_found(folder):
    assert find_damage(folder) is None
    (folder / "later.txt").write_text("not of the checkpoint")
    assert find_damage(folder) is None
    path = folder / "deep" / "a.bin"
    whole = path.read_bytes()
    for position in (0, 100, 255):  # one bit
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert find_damage(folder) == "deep/a.bin is not as it was written"
    path.write_bytes(whole[:-1])
    assert find_damage(folder) == "deep/a.bin is not as it was written"
    path.unlink()
    assert find_damage(folder) == "deep/a.bin is missing"
    path.write_bytes(whole)
    assert find_damage(folder) is None
    sums = folder / "checksums.json"
    for text in (sums.read_text()[:-9], "[1]", json.dumps({"b.txt": "0"})):
        sums.write_text(text)
        assert find_damage(folder) is not None
    sums.unlink()
    assert find_damage(folder) == "its checksums.json is missing or damaged"
