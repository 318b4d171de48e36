"""Reader of the official NLVR2 files: one JSON object per line, although they end in .json.

train.json has the folder of each pair of images (`directory`), dev.json and the test files have `extra_validations`; a
test file without labels has no `label`. What was judged, by whom, and the addresses of the images are not read.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from e2e_vl.data.storage.files import require_file, require_keys
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import RecordTable

LABELS = ("False", "True")  # as they are written; the index is the class
_KEYS = ("identifier", "sentence")
_IDENTIFIER = re.compile(r"\w+-\d+-\d+-\d+")  # it names files of images


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
        raise ValueError(f"{path}: there is no example in the file; copy or download it again")
    return examples


def _examples(path: Path, errors: RecordErrors) -> Iterator[PairStatement]:
    seen: set[str] = set()
    has_labels: bool | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            one = None
            with errors.about(f"{path}, line {number}"):
                example = _parse(line, f"{path}, line {number}")
                where = f"{path}, line {number} ({example.identifier})"
                if example.identifier in seen:
                    raise ValueError(f"{where}: the identifier is there twice; remove one of the lines")
                if has_labels not in (None, example.label is not None):
                    raise ValueError(
                        f"{where} has {'no' if example.label is None else 'a'} label, unlike the lines before; do not "
                        "mix splits with and without labels"
                    )
                seen.add(example.identifier)
                one, has_labels = example, example.label is not None
            if one is not None:
                yield one


def _parse(line: bytes, where: str) -> PairStatement:
    try:
        record = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{where} is not valid JSON ({error}); one object per line is expected, copy or download the file again"
        ) from error
    require_keys(record, _KEYS, where)
    identifier = record["identifier"]
    for key in _KEYS:
        if not isinstance(record[key], str) or not record[key].strip():
            raise ValueError(f"{where}: {key} is {record[key]!r}; it must be a text")
    where = f"{where} ({identifier})"
    if not _IDENTIFIER.fullmatch(identifier):
        raise ValueError(
            f"{where}: the identifier is not split-set-pair-sentence, such as dev-850-2-0; repair the line"
        )
    label = record.get("label")
    if label not in (None, *LABELS):
        raise ValueError(f'{where}: the label is {label!r}; it must be the text "True" or "False"')
    directory = record.get("directory")
    if directory is not None and not str(directory).isdigit():
        raise ValueError(f"{where}: directory is {directory!r}; it must be a number")
    synset, family = (record.get(key) for key in ("synset", "family"))
    return PairStatement(
        identifier,
        record["sentence"],
        label,
        None if directory is None else str(directory),
        sys.intern(synset) if isinstance(synset, str) else None,
        sys.intern(family) if isinstance(family, str) else None,
    )
