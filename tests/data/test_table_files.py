"""Tables beside the data: written once, mapped by all processes, and never silently wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from detector.errors import MissingFileError
from e2e_vl.data import table_files
from e2e_vl.data.table_files import open_table, tabulate
from tests.data.helpers import refused

ARRAYS = [
    np.arange(5),
    np.array([b"12", b"b"]),
    np.zeros((0,), dtype=np.uint8),
    np.arange(6.0).reshape(2, 3),
    np.arange(7, dtype=np.uint8),
]


class Reader:
    """Counts how often the source is read, and warns each time."""

    def __init__(self, arrays: list[np.ndarray] = ARRAYS) -> None:
        self.arrays = arrays
        self.times = 0

    def __call__(self) -> list[np.ndarray]:
        self.times += 1
        logging.getLogger("e2e_vl.data.vqa").warning("skipped %d records", 3)
        return self.arrays


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "a.json"
    path.write_text("[1]")
    return path


@pytest.fixture
def _any_size(monkeypatch):
    """Even small files get a table."""
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 0)


def assert_same(arrays: list[np.ndarray], expected: list[np.ndarray] = ARRAYS) -> None:
    assert len(arrays) == len(expected)
    for array, expected_array in zip(arrays, expected, strict=True):
        assert array.dtype == expected_array.dtype
        assert np.array_equal(array, expected_array)


def find_table(folder: Path) -> Path:
    (path,) = folder.glob("*.table")
    return path


def test_a_table_is_made_once_and_its_warnings_are_logged_at_every_start(source, tmp_path, caplog):
    reader = Reader()
    for number in range(3):
        caplog.clear()
        arrays = open_table([source], tmp_path / "index", ["kind"], reader)
        assert_same(arrays)
        assert not arrays[0].flags.owndata and not arrays[0].flags.writeable
        assert [record.name for record in caplog.records] == ["e2e_vl.data.vqa"], number
        assert caplog.messages == ["skipped 3 records"]
        assert_same(pickle.loads(pickle.dumps(arrays)))
    assert reader.times == 1


def test_a_table_of_a_changed_source_is_made_again_in_its_place(source, tmp_path):
    reader = Reader()
    open_table([source], tmp_path / "index", ["kind"], reader)
    time = source.stat().st_mtime_ns
    source.write_text("[2]")
    os.utime(source, ns=(time + 1, time + 1))
    changed = Reader([np.arange(9)])
    assert_same(open_table([source], tmp_path / "index", ["kind"], changed), [np.arange(9)])
    source.write_text("[22]")
    os.utime(source, ns=(time + 1, time + 1))
    open_table([source], tmp_path / "index", ["kind"], changed)
    assert changed.times == 2, "by its time, and by its size"
    find_table(tmp_path / "index")


@pytest.mark.parametrize("change", ["size", "time", "new", "removed", "nested"])
def test_a_table_of_a_folder_is_made_again_after_any_change_of_its_files(source, tmp_path, change):
    folder = tmp_path / "folder"
    nested = folder / "b" / "c"
    nested.mkdir(parents=True)
    for path in (folder / "1.txt", nested / "2.txt"):
        path.write_text("one")
    reader = Reader()
    for _ in range(2):
        open_table([source, folder], tmp_path / "index", ["kind"], reader)
    assert reader.times == 1
    time = (folder / "1.txt").stat().st_mtime_ns
    if change == "size":
        (folder / "1.txt").write_text("other")
        os.utime(folder / "1.txt", ns=(time, time))
    elif change == "time":
        os.utime(folder / "1.txt", ns=(time, time + 1))
    elif change == "new":
        (nested / "3.txt").touch()
    elif change == "removed":
        (folder / "1.txt").unlink()
    else:
        (nested / "2.txt").write_text("other")
    open_table([source, folder], tmp_path / "index", ["kind"], reader)
    assert reader.times == 2
    find_table(tmp_path / "index")


@pytest.mark.parametrize("change", ["settings", "code"])
def test_other_settings_and_other_code_make_another_table(source, tmp_path, monkeypatch, change):
    open_table([source], tmp_path, ["kind", 1], Reader())
    reader = Reader([np.arange(9)])
    kind = ["kind", 1]
    if change == "settings":
        kind = ["kind", 2]
    else:
        monkeypatch.setattr(table_files, "_hash_readers", lambda: "another")
    for _ in range(2):
        assert_same(open_table([source], tmp_path, kind, reader), [np.arange(9)])
    assert reader.times == 1


@pytest.mark.parametrize("damage", ["empty", "truncated", "tail", "foreign", *range(0, 10, 3)])
def test_a_damaged_table_is_made_again(source, tmp_path, damage, caplog):
    open_table([source], tmp_path, ["kind"], Reader())
    path = find_table(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "empty":
        content = b""
    elif damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "tail":
        content = content[-3:]
    elif damage == "foreign":
        content = b"[1, 2, 3]" * 99
    else:
        content[len(content) * damage // 10] ^= 4
    path.write_bytes(content)
    reader = Reader()
    for _ in range(2):
        assert_same(open_table([source], tmp_path, ["kind"], reader))
    assert reader.times == 1
    assert "damaged or truncated; it is made again" in caplog.text


def make_in_a_process(source: Path, folder: Path, start, results) -> None:
    reader = Reader()
    start.wait()
    arrays = open_table([source], folder, ["kind"], reader)
    results.put((reader.times, arrays[0].tolist()))


def test_two_processes_at_once_make_one_table(source, tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    results = context.Queue()
    arguments = (source, tmp_path / "index", start, results)
    processes = [context.Process(target=make_in_a_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    times, values = zip(*(results.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join()
    assert sorted(times) == [0, 0, 1]
    assert values == ([0, 1, 2, 3, 4],) * 3


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("obstacle", ["file", "read-only", "full"])
def test_without_a_writable_folder_every_process_reads_the_source(source, tmp_path, monkeypatch, caplog, obstacle):
    folder = tmp_path / "index"
    if obstacle == "file":
        folder.write_text("in the way")
    else:
        error = PermissionError(13, "Permission denied") if obstacle == "read-only" else OSError(28, "No space left")

        def fail(path: Path) -> None:
            raise error

        monkeypatch.setattr(table_files, "FileLock" if obstacle == "read-only" else "atomic_file", fail)
    reader = Reader()
    for number in (1, 2):
        assert_same(tabulate([source], folder, ["kind"], reader))
        assert reader.times == number
    assert caplog.text.count("every process reads the file at every start") == 1
    assert not list(tmp_path.glob("**/*.table"))


def test_a_table_is_read_from_a_folder_that_is_not_writable(source, tmp_path, monkeypatch):
    open_table([source], tmp_path, ["kind"], Reader())
    monkeypatch.setattr(table_files, "FileLock", None)
    reader = Reader()
    assert_same(open_table([source], tmp_path, ["kind"], reader))
    assert reader.times == 0


@pytest.mark.usefixtures("_any_size")
def test_a_missing_source_is_named_by_its_reader(tmp_path, caplog):
    def read() -> list[np.ndarray]:
        raise MissingFileError("a.json: no such file")

    with refused("a.json: no such file"):
        tabulate([tmp_path / "a.json"], tmp_path / "index", ["kind"], read)
    assert not caplog.text and not (tmp_path / "index").exists()


def test_small_files_get_no_table(source, tmp_path):
    reader = Reader()
    assert_same(tabulate([source], tmp_path / "index", ["kind"], reader))
    assert_same(tabulate([source], None, ["kind"], reader))
    assert reader.times == 2 and not (tmp_path / "index").exists()
