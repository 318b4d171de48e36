"""The writer of files and folders: each is there as a whole or not at all. Everything that is kept is written by it.

What is written goes beside its place first, reaches the disk, and only then takes its name. A process that is killed,
or a disk that is full, therefore never leaves half of something under the name of the whole. What a killed process
left beside it has a name that begins with a dot and ends with `.part` or `.old`; `remove_leftovers` takes it away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

_PART, _OLD = ".part", ".old"
_STREAMS = (Path("/dev"), Path("/dev/fd"))


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the path to write to; at the end of the block the file takes its name. After an error nothing is left.

    Several may write it at once: each writes a file of its own, and who reads finds one of them, whole. A pipe or a
    device, such as `/dev/stdout`, is written as it is.
    """
    if _is_stream(path):
        yield path
        return
    part = _beside(path, f".{os.getpid()}.{threading.get_native_id()}{_PART}")
    try:
        yield part
        take_place(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def take_place(part: Path, path: Path) -> None:
    """Give a file that is complete its name, once it has reached the disk; both lie in one folder."""
    _reach_disk(part)
    part.replace(path)
    _reach_disk(path.parent)


def _is_stream(path: Path) -> bool:
    return path.parent in _STREAMS or (path.exists() and not path.is_file() and not path.is_dir())


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write to; at the end of the block it takes the place of `folder`.

    After an error nothing is left of it, and the earlier folder is as it was.
    """
    part = begin_folder(folder)
    try:
        yield part
        finish_folder(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextlib.contextmanager
def whole_parts(folder: Path, last: str) -> Iterator[Path]:
    """Gives an empty folder to write to; at the end of the block what is in it takes its place in `folder`.

    What `folder` holds besides stays. Until all is in place it does not hold `last`, so that nobody takes a mixture of
    new and earlier files for the whole.

    Args:
        last: name of the file without which a folder of this kind is not read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = begin_folder(folder / last)
    try:
        yield part
        _reach_disk_all(part)
        (folder / last).unlink(missing_ok=True)
        for made in sorted(part.iterdir(), key=lambda path: path.name == last):
            place = folder / made.name
            if place.is_dir():
                shutil.rmtree(place)
            made.replace(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _reach_disk(folder)


def begin_folder(folder: Path) -> Path:
    """The empty folder beside `folder` in which it is written, for processes that write together; one of them calls."""
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def part_of(folder: Path) -> Path:
    """The folder that `begin_folder` makes."""
    return _beside(folder, _PART)


def finish_folder(folder: Path) -> None:
    """Give the folder that `begin_folder` made its name, once everything in it has reached the disk."""
    part, old = part_of(folder), _beside(folder, _OLD)
    _reach_disk_all(part)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    part.rename(folder)
    _reach_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of files and folders that they were writing into `folder`.

    Where only the old one of two folders is left under its other name, it gets its name back.
    """
    for old in folder.glob(f".*{_OLD}"):
        place = old.with_name(old.name[1 : -len(_OLD)])
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(place)
    for part in folder.glob(f".*{_PART}"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _reach_disk_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        _reach_disk(path)
    _reach_disk(folder)


def _reach_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
