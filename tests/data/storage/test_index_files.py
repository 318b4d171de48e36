"""Reading at random from files that stay open."""

from __future__ import annotations

import io
import multiprocessing
import time

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.data.storage import index_files
from e2e_vl.data.storage.index_files import ArrayFile, OpenFiles, cached_index


class Slow(io.BytesIO):
    """Gives three bytes at a time, as a network disk may give less than asked for."""

    def read(self, size: int = -1) -> bytes:
        return super().read(min(size, 3))


def test_reads_that_give_less_than_asked_for_go_on(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    files = OpenFiles()
    assert files.read(path, 2, 5) == b"23456"
    files._files[path] = Slow(b"0123456789")
    assert files.read(path, 2, 5) == b"23456"
    assert files.read(path, 8, 5) == b"89"
    assert files.read(path, 20, 5) == b""


def test_only_the_latest_files_stay_open(tmp_path):
    files = OpenFiles(limit=2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    opened = [files[path] for path in paths]
    assert [file.closed for file in opened] == [True, False, False]
    assert files.read(paths[0], 0, 1) == b"a" and opened[1].closed


def make_index(source, folder, log):
    """An index that takes a while; each time that it is made is a line in the log."""

    def rows():
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        yield np.arange(5)

    path = cached_index([source], folder, "test", rows)
    assert np.load(path).tolist() == [0, 1, 2, 3, 4]


def test_of_several_processes_one_makes_an_index_and_the_others_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(index_files, "_PATIENCE", 0.05)  # so that waiting is told of, too
    source, folder, log = tmp_path / "source", tmp_path / "cache", tmp_path / "log"
    source.write_text("x")
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=make_index, args=(source, folder, log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "made\n"
    assert [path.suffix for path in folder.iterdir()] == [".npy"], "no lock and nothing unfinished stays"


@pytest.mark.parametrize("columns", [0, 3])
def test_rows_are_as_they_were_written_or_refused(tmp_path, columns):
    source = tmp_path / "source"
    source.write_text("x")
    values = np.random.default_rng(0).integers(-(2**62), 2**62, (200, columns) if columns else 200)
    path = cached_index([source], tmp_path, "test", lambda: iter(np.array_split(values, [1, 70, 70, 140])), columns)
    assert np.array_equal(np.load(path), values)
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            rows = ArrayFile(path, OpenFiles())
            found = np.array([rows[number] for number in range(len(rows))])
            assert np.array_equal(found, values), place  # white space in the header
        except UserError as error:
            assert str(error) == f"{path}: not an index as it was written; remove the file, it is made again"
            refused += 1
    assert refused > len(whole) / 7 - 20
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="remove the file"):
        ArrayFile(path, OpenFiles())


def test_an_index_may_be_empty(tmp_path):
    (tmp_path / "source").write_text("x")
    path = cached_index([tmp_path / "source"], tmp_path, "test", lambda: iter([]))
    assert len(ArrayFile(path, OpenFiles())) == 0
