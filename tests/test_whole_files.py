"""Files and folders are there as a whole or not at all, and JSON has no NaN."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from detector import io as whole_writer
from e2e_vl import io as whole_files
from e2e_vl.io import (
    RunLog,
    atomic_folder,
    find_damage,
    json_text,
    read_log,
    remove_leftovers,
    without_nan,
    write_checksums,
    write_json,
    write_text,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with checksums."""
    with atomic_folder(tmp_path / "made") as part:
        (part / "deep").mkdir()
        (part / "deep" / "a.bin").write_bytes(bytes(range(256)))
        (part / "b.txt").write_text("b")
        write_checksums(part)
    return tmp_path / "made"


def test_json_has_no_nan_and_the_place_is_named(tmp_path):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"x.json: boxes\[1\]\.score is NaN or infinite.*lower train\.lr"):
            write_json(tmp_path / "x.json", {"boxes": [{"score": 0.5}, {"score": value}]})
    assert not list(tmp_path.iterdir())
    assert json_text({"a": [1, None, "ä"]}, "x") == '{"a": [1, null, "ä"]}'


def test_a_log_says_what_was_not_finite(tmp_path):
    assert without_nan({"a": math.nan, "b": 1.0, "c": "x"}) == {"a": None, "b": 1.0, "c": "x", "not_finite": ["a"]}
    assert without_nan({"b": 1.0}) == {"b": 1.0}
    RunLog(tmp_path / "log.jsonl", enabled=True).write(3, "eval", {"val/loss": math.inf})
    assert read_log(tmp_path / "log.jsonl") == [
        {"step": 3, "kind": "eval", "val/loss": None, "not_finite": ["val/loss"]}
    ]
    assert "Infinity" not in (tmp_path / "log.jsonl").read_text()


def test_an_error_leaves_the_earlier_file_and_folder(folder):
    path = folder.parent / "a.txt"
    write_text(path, "earlier")
    with pytest.raises(OSError, match="full"), whole_files.atomic_file(path) as part:
        part.write_text("hal")
        raise OSError("full")
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder) as part:
        (part / "b.txt").write_text("other")
        raise KeyboardInterrupt
    assert path.read_text() == "earlier" and (folder / "b.txt").read_text() == "b"
    assert sorted(one.name for one in folder.parent.iterdir()) == ["a.txt", "made"]


def test_a_new_folder_takes_the_place_of_the_earlier_one(folder):
    with atomic_folder(folder) as part:
        assert not list(part.iterdir())
        (part / "c.txt").write_text("c")
    assert [one.name for one in folder.iterdir()] == ["c.txt"]
    assert [one.name for one in folder.parent.iterdir()] == ["made"]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_what_a_killed_process_leaves_is_cleared_away(folder, monkeypatch, moment):
    """Killed before, between and after the two renames that put a folder into the place of another."""

    class KilledError(BaseException):
        pass

    rename, calls = Path.rename, []

    def dying(path, target):
        calls.append(path)
        if len(calls) == {"before": 1, "between": 2, "after": 9}[moment]:
            raise KilledError
        rename(path, target)

    monkeypatch.setattr(Path, "rename", dying)
    monkeypatch.setattr(whole_writer.shutil, "rmtree", lambda *a, **k: None)  # a killed process clears nothing
    try:
        with atomic_folder(folder) as part:
            (part / "c.txt").write_text("c")
    except KilledError:
        pass
    monkeypatch.undo()
    remove_leftovers(folder.parent)
    assert [one.name for one in folder.parent.iterdir()] == ["made"]
    assert sorted(one.name for one in folder.iterdir()) == (
        ["c.txt"] if moment == "after" else ["b.txt", "checksums.json", "deep"]
    )


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
