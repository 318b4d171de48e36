"""What the readers of exports give, and what is said about records that cannot be kept or are changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np

from detector.errors import UserError
from e2e_vl.data.tables import list_examples
from e2e_vl.io import FourNumbers, Id, Name, Record

SPLITS = {"training": "train", "valid": "val", "validation": "val", "validate": "val", "dev": "val", "testing": "test"}
_SPLIT_AT_END = re.compile(r"(?:.*[_-])?(train|training|val|valid|validation|test)(?:20\d\d)?")


class Row(Record):
    """A box, an expression about a box, or both."""

    image: Name  # of `read_boxes`: the image, relative to the folder of images
    label: str = ""
    # [x, y, width, height], pixels, after the EXIF rotation; or the id of a box. Not `Id`, whose integers are limited:
    # msgspec 0.22 crashes where they may stand in the place of a tuple.
    box: FourNumbers | int | str | None = None
    text: str | None = None
    split: str = ""
    id: Id | None = None  # in COCO JSON; elsewhere the number of the shape, line or row in its file, from 1
    is_crowd: bool = False
    where: str = ""  # file and line, for messages


class Annotation(NamedTuple):
    """A box as its file states it, before it is placed in an image."""

    where: str  # file and line or number, for messages
    image: str  # the name in the file, maybe with folders, maybe without suffix
    label: str
    corners: FourNumbers  # x1, y1, x2, y2
    id: Id
    in_shares: bool = False  # the corners are shares of the image's sides, not pixels
    states_corners: bool = False  # the file has both corners, not one corner and the box's width and height
    image_size: tuple[int, int] | None = None  # (width, height) that the file states
    other_name: str = ""  # of the image, where `image` is missing: the name of the annotation file
    text: str | None = None
    split: str = ""
    folder_split: str = ""  # of the folders of its file; it counts if there are train and val
    is_crowd: bool = False


class Remarks:
    """Errors, which end the conversion, and notes, which do not; each with all records that it is about.

    Args:
        source: the file or folder that is read, which begins the error messages.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.errors: dict[tuple[str, str], list[str]] = {}  # (what is wrong, what to do) -> records
        self.notes: dict[str, list[str]] = {}

    def refuse(self, problem: str, record: str, remedy: str = "correct or remove them") -> None:
        self.errors.setdefault((problem, remedy), []).append(record)

    def note(self, remark: str, record: str) -> None:
        self.notes.setdefault(remark, []).append(record)

    def raise_errors(self) -> None:
        """Raise one UserError with a sentence per kind of problem, unless there are no problems."""
        sentences = []
        for (problem, remedy), records in self.errors.items():
            advice = f"{remedy[0].upper()}{remedy[1:]}."
            sentences.append(f"{self.source} has {problem} ({len(records)}): {list_examples(records)}. {advice}")
        if sentences:
            raise UserError("\n".join(sentences))


def enclosing_corners(points: np.ndarray) -> FourNumbers:
    """Return the axis-aligned box around points, float [points, 2] (x, y) in pixels of the image."""
    x1, y1 = points.min(axis=0).tolist()
    x2, y2 = points.max(axis=0).tolist()
    return x1, y1, x2, y2


def split_name(word: str) -> str:
    """Return the split that a column names: "Valid" and "validation" are val; other names stay as they are."""
    word = word.strip()
    name = SPLITS.get(word.casefold(), word.casefold())
    if name in ("train", "val", "test"):
        return name
    return word


def split_of_path(path: str) -> str:
    """Return the split that a file's folders or the end of its name state, as in `labels/val/a.txt`; "" if unclear."""
    return _only_split([*PureWindowsPath(path).parts[:-1], PureWindowsPath(path).stem])


def split_of_folders(path: str) -> str:
    """Return the split that the folders of a file state, as `split_of_path` does."""
    return _only_split(PureWindowsPath(path).parts[:-1])


def _only_split(names: Sequence[str]) -> str:
    """Return the split that names of folders and files state; "" if they state none or several."""
    splits = set()
    for name in names:
        match = _SPLIT_AT_END.fullmatch(name.casefold())
        if match:
            splits.add(split_name(match[1]))
    if len(splits) != 1:
        return ""
    return splits.pop()


def beside(file: str, image: str) -> str:
    """Put the file's folders before the image name that it states; they tell images of equal names apart."""
    return f"{PurePosixPath(file).parent}/{image}"
