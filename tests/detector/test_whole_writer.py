"""Parts of a folder take their places together, and pipes are written as they are."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from detector import io as whole_writer
from detector.io import atomic_file, atomic_files, write_text


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of a model, with a file of the user beside."""
    folder = tmp_path / "model"
    (folder / "encoder").mkdir(parents=True)
    for name in ("config.yaml", "encoder/weights", "notes.txt"):
        (folder / name).write_text(f"earlier {name}")
    return folder


def write_parts(folder: Path) -> None:
    with atomic_files(folder, "config.yaml") as part:
        (part / "encoder").mkdir()
        (part / "encoder" / "more").write_text("new")
        (part / "config.yaml").write_text("new")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_parts_take_their_places_and_other_files_stay(folder, tmp_path):
    write_parts(folder)
    assert contents(folder) == {"config.yaml": "new", "encoder/more": "new", "notes.txt": "earlier notes.txt"}
    write_parts(tmp_path / "new" / "deep")
    assert contents(tmp_path / "new" / "deep") == {"config.yaml": "new", "encoder/more": "new"}


def test_an_error_leaves_all_parts_as_they_were(folder):
    before = contents(folder)
    with pytest.raises(OSError, match="full"), atomic_files(folder, "config.yaml") as part:
        (part / "config.yaml").write_text("hal")
        raise OSError("full")
    assert contents(folder) == before


@pytest.mark.parametrize("moves", [0, 1])
def test_parts_that_are_not_all_in_place_are_not_taken_for_the_whole(folder, monkeypatch, moves):
    class KilledError(BaseException):
        pass

    replace, done = Path.replace, []

    def dying(path, target):
        if len(done) == moves:
            raise KilledError
        done.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(KilledError):
        write_parts(folder)
    assert not (folder / "config.yaml").exists()
    assert [path.name for path in done] == ["encoder"][:moves]


def test_a_file_reaches_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "a.txt", []
    monkeypatch.setattr(whole_writer, "_reach_disk", lambda one: seen.append((one == tmp_path, path.exists())))
    write_text(path, "a")
    assert seen == [(False, False), (True, True)]


def test_a_pipe_is_written_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "a\n")
    reader.join(10)
    assert read == ["a\n"] and pipe.is_fifo()
    with atomic_file(Path("/dev/null")) as part:
        assert part == Path("/dev/null")
