"""Reader of the official NLVR2 files: one JSON object per line, although they end in .json.

train.json has the folder of each pair of images (`directory`), dev.json and the test files have `extra_validations`; a
test file without labels has no `label`. What was judged, by whom, and the addresses of the images are not read.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from detector.errors import UserError
from detector.file_faults import reading
from e2e_vl.data.storage.files import require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import RecordTable
from e2e_vl.records import Number, Record, Words, decoded

LABELS = ("False", "True")  # as they are written; the index is the class
_IDENTIFIER = re.compile(r"\w+-[0-9]+-[0-9]+-[0-9]+")  # it names files of images


class _PairLine(Record):
    identifier: Words
    sentence: Words
    label: Annotated[Literal["True", "False"] | None, Meta(description='the text "True" or "False"')] = None
    directory: Number | str | None = None
    synset: str | None = None
    family: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PairStatement:
    """A sentence about a pair of images."""

    identifier: str  # split-set-pair-sentence
    sentence: str
    label: str | None = None  # "True" or "False"; None in a test file without labels
    directory: str | None = None  # folder of the images, of the training split
    synset: str | None = None  # what was searched for to find the images
    family: str | None = None  # kind of statement, where the file says it (drawn scenes do)

    @property
    def pair(self) -> str:
        """The identifier without its sentence: the pair of images."""
        return self.identifier.rpartition("-")[0]

    @property
    def images(self) -> tuple[str, str]:
        """Names of the left and the right image, without suffix."""
        return f"{self.pair}-img0", f"{self.pair}-img1"


def read_examples(path: str | Path, errors: RecordErrors = RAISE) -> RecordTable[PairStatement]:
    """The examples of a file, in its order.

    Args:
        errors: what becomes of an error about one line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no JSON object with the keys, an identifier of another form or one that is there
            twice, a label other than "True" and "False", labels in some lines only, or no line at all. File, line and
            identifier are named.
    """
    path = require_file(path, "NLVR2 examples")
    examples = RecordTable(PairStatement, _examples(path, errors))
    if not examples:
        raise UserError(f"{path}: there is no example in the file; copy or download it again")
    return examples


def _examples(path: Path, errors: RecordErrors) -> Iterator[PairStatement]:
    seen: set[str] = set()
    has_labels: bool | None = None
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            one = None
            with errors.about(f"{path}, line {number}"):
                example = _parse(line, f"{path}, line {number}")
                where = f"{path}, line {number} ({example.identifier})"
                if example.identifier in seen:
                    raise UserError(f"{where}: the identifier is there twice; remove one of the lines")
                if has_labels not in (None, example.label is not None):
                    raise UserError(
                        f"{where} has {'no' if example.label is None else 'a'} label, unlike the lines before; do not "
                        "mix splits with and without labels"
                    )
                seen.add(example.identifier)
                one, has_labels = example, example.label is not None
            if one is not None:
                yield one


def _parse(line: bytes, where: str) -> PairStatement:
    record = decoded(_PairLine, line, where, key="identifier", form="one object per line is expected")
    where = f"{where} ({record.identifier})"
    if not _IDENTIFIER.fullmatch(record.identifier):
        raise UserError(f"{where}: the identifier is not split-set-pair-sentence, such as dev-850-2-0; repair the line")
    directory = None if record.directory is None else str(record.directory)
    if directory is not None and not (directory.isascii() and directory.isdecimal()):
        raise UserError(f"{where}: directory is {directory!r}; it must be a number")
    synset, family = (None if text is None else sys.intern(text) for text in (record.synset, record.family))
    return PairStatement(record.identifier, record.sentence, record.label, directory, synset, family)
