"""Files and folders that are written as a whole or not at all, their checksums, and JSON without NaN.

What is written goes beside its place first, reaches the disk, and only then takes its name. A process that is killed,
or a disk that is full, therefore never leaves half of something under the name of the whole. What a killed process
left beside it has a name that begins with a dot and ends with `.part` or `.old`; `remove_leftovers` takes it away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detector.errors import UserError
from detector.plain_json import read_plain_json
from e2e_vl.file_names import inside

CHECKSUMS = "checksums.json"
_PART, _OLD = ".part", ".old"


def json_text(value: Any, name: str, *, indent: int | None = None) -> str:
    """JSON as the standard has it, so without NaN and infinities.

    Args:
        name: of the file, for the error.

    Raises:
        ValueError: a number is NaN or infinite; its place in the value is named.
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        places = list(_not_finite(value))
        if not places:
            raise
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        raise UserError(
            f"{name}: {places[0]}{more} is NaN or infinite, so the model has diverged; lower train.lr, or use an "
            "earlier checkpoint."
        ) from error


def _not_finite(value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield place or "the value"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _not_finite(one, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _not_finite(one, f"{place}[{number}]")


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with None in place of NaN and infinities, whose names stand under `not_finite` if there are any."""
    lost = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**values, **dict.fromkeys(lost), **({"not_finite": lost} if lost else {})}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one step.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    write_text(path, json_text(value, str(path), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the path to write to; at the end of the block the file takes its name. After an error nothing is left.

    Several may write it at once: each writes a file of its own, and who reads finds one of them, whole.
    """
    part = _beside(path, f".{os.getpid()}.{threading.get_ident()}{_PART}")
    try:
        yield part
        _reach_disk(part)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)
    _reach_disk(path.parent)


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
    for path in part.rglob("*"):
        _reach_disk(path)
    _reach_disk(part)
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


def _reach_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Checksums


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` with the SHA-256 of every file in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): _digest(path) for path in files})


def find_damage(folder: Path) -> str | None:
    """Compare the files of a folder with its checksums; files that came later are not looked at.

    Returns:
        What is wrong with the first wrong file, in a few words; None if nothing is.
    """
    try:
        sums = read_plain_json(folder / CHECKSUMS)
        items = {name: (inside(folder, name, follows_links=True), str(value)) for name, value in sums.items()}
    except (OSError, ValueError):  # a name may not lead out of the folder, either
        return f"its {CHECKSUMS} is missing or damaged"
    for name, (path, expected) in items.items():
        try:
            if _digest(path) != expected:
                return f"{name} is not as it was written"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error})"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
