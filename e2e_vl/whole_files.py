"""Checksums of files, and JSON without NaN, beside the functions that write files as a whole."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detector.errors import UserError
from detector.plain_json import read_plain_json
from detector.whole_writer import begin_folder as begin_folder  # modules of this package find them here
from detector.whole_writer import finish_folder as finish_folder
from detector.whole_writer import part_of as part_of
from detector.whole_writer import remove_leftovers as remove_leftovers
from detector.whole_writer import take_place as take_place
from detector.whole_writer import whole_file as whole_file
from detector.whole_writer import whole_folder as whole_folder
from detector.whole_writer import whole_parts as whole_parts
from detector.whole_writer import write_text as write_text
from e2e_vl.file_names import inside

if TYPE_CHECKING:
    from PIL import Image

CHECKSUMS = "checksums.json"


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


def write_png(path: Path, picture: Image.Image) -> None:
    """Write a picture as a PNG file in one step."""
    with whole_file(path) as part:
        picture.save(part, "PNG")


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
            if path.exists() and not path.is_file():  # a pipe would be waited for, a device read, without end
                return f"{name} is not a file"
            if _digest(path) != expected:
                return f"{name} is not as it was written"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error})"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
