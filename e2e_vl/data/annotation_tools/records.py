"""What the readers of exports give, and what is said about records that cannot be kept or are changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np

from detector.errors import UserError
from e2e_vl.io import FourNumbers, Id, Name, Record

MOST_EXAMPLES = 12  # records that a message lists
SPLITS = {"training": "train", "valid": "val", "validation": "val", "validate": "val", "dev": "val", "testing": "test"}
_SPLIT_AT_END = re.compile(r"(?:.*[_-])?(train|training|val|valid|validation|test)(?:20\d\d)?")


class Row(Record):
    """A box, an expression about a box, or both."""

    image: Name  # of `read_boxes`: the photo, relative to the folder of photos
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
        sentences = [
            f"{self.source} has {problem} ({len(records)}): {list_examples(records)}. {remedy[0].upper()}{remedy[1:]}."
            for (problem, remedy), records in self.errors.items()
        ]
        if sentences:
            raise UserError("\n".join(sentences))


def list_examples(records: list[str]) -> str:
    """The first records, and the number of the others."""
    hidden = len(records) - MOST_EXAMPLES
    return "; ".join(records[:MOST_EXAMPLES]) + (f" and {hidden} more" if hidden > 0 else "")


def enclosing_corners(points: np.ndarray) -> FourNumbers:
    """The corners of the upright box around points [P, 2]."""
    x1, y1 = points.min(axis=0).tolist()
    x2, y2 = points.max(axis=0).tolist()
    return x1, y1, x2, y2


def split_name(word: str) -> str:
    """The split that a column names: "Valid" and "validation" are val; other names stay as they are."""
    word = word.strip()
    name = SPLITS.get(word.casefold(), word.casefold())
    return name if name in ("train", "val", "test") else word


def split_of_path(path: str) -> str:
    """The split that the folders or the end of a file's name state, as in `labels/val/a.txt`; "" if not exactly one."""
    return _one_split([*PureWindowsPath(path).parts[:-1], PureWindowsPath(path).stem])


def split_of_folders(path: str) -> str:
    """Like `split_of_path`, of the folders only."""
    return _one_split(PureWindowsPath(path).parts[:-1])


def _one_split(names: Sequence[str]) -> str:
    matches = [match for match in (_SPLIT_AT_END.fullmatch(name.casefold()) for name in names) if match]
    splits = {split_name(match[1]) for match in matches}
    return splits.pop() if len(splits) == 1 else ""


def beside(file: str, image: str) -> str:
    """The name of a photo that a file names, with the file's folders, which tell photos of equal names apart."""
    return f"{PurePosixPath(file).parent}/{image}"
