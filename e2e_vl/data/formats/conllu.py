"""Reader of CoNLL-U: sentences as words with a governor and a relation each.

A line per word has ten columns, divided by tabs; the first is its number, the second its form, the fourth its part of
speech, the seventh the number of its governor (0: none, the root) and the eighth the relation to it. Sentences end with
an empty line; lines with # are comments. Lines of several words (`3-4`) say how these are written; empty nodes (`8.1`)
are left out. The labels are those of the file: Universal Dependencies, Stanford, or others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from detector.errors import UserError
from detector.file_faults import reading
from e2e_vl.data.storage.files import require_file

COLUMNS = 10
# up to nine digits: Python refuses to turn thousands of them into a number
_WORD, _SEVERAL, _EMPTY, _WORD_OR_ROOT = (
    re.compile(form, re.ASCII) for form in (r"[1-9]\d{0,8}", r"([1-9]\d{0,8})-([1-9]\d{0,8})", r"\d+\.\d+", r"\d{1,9}")
)


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedWord:
    """One word of a parsed sentence."""

    form: str  # as written; words that are written as one have the same form
    kind: str  # part of speech, "_" where the file has none
    governor: int  # row of the governing word from 0; -1: the root
    relation: str  # to the governor, in the labels of the file
    joined: int = 0  # words after the first that are written as one count 1, 2, ...


def read_conllu(path: str | Path) -> Iterator[list[ParsedWord]]:
    """The sentences of a file, one after the other.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no UTF-8 text, a line that is no word, numbers out of order, or governors that are no tree (file and
            line are named); or there is no sentence in the file.
    """
    path = require_file(path, "parses")
    rows: list[tuple[int, list[str]]] = []
    number = sentences = 0
    try:
        with reading(path), path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                line = line.rstrip("\r\n")
                if line.strip() and not line.startswith("#"):
                    rows.append((number, line.split("\t")))
                elif rows and not line.strip():
                    sentences += 1
                    yield _sentence(path, rows)
                    rows = []
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file behind line {number}; copy or write it again") from error
    if rows:
        yield _sentence(path, rows)
    elif not sentences:
        raise UserError(f"{path}: there is no sentence in the file; parse the captions first")


def _sentence(path: Path, rows: list[tuple[int, list[str]]]) -> list[ParsedWord]:
    words: list[ParsedWord] = []
    lines: list[int] = []
    several, first, last = "", 0, -1  # the words first .. last are written as one
    for line, cells in rows:
        where = f"{path}, line {line}"
        if len(cells) != COLUMNS:
            raise UserError(f"{where}: {len(cells)} columns; CoNLL-U has {COLUMNS}, divided by tabs, repair the file")
        number, form, _, kind, _, _, governor, relation, _, _ = cells
        if not form.strip():
            raise UserError(f"{where}: the word has no form; repair the file")
        if _EMPTY.fullmatch(number):
            continue
        if found := _SEVERAL.fullmatch(number):
            several, first, last = form, int(found[1]), int(found[2])
            if first != len(words) + 1 or last <= first:
                raise UserError(f"{where}: the words {number} stand behind word {len(words)}; repair the file")
            continue
        if not _WORD.fullmatch(number) or int(number) != len(words) + 1:
            raise UserError(f"{where}: word {number!r} stands where word {len(words) + 1} should; repair the file")
        if not _WORD_OR_ROOT.fullmatch(governor) or relation in ("", "_"):
            raise UserError(
                f"{where}: the governor is {governor!r} and the relation {relation!r}; a number and a label are "
                "expected, parse the sentence again"
            )
        own = int(number)
        is_joined = first <= own <= last
        words.append(
            ParsedWord(
                several if is_joined else form, kind, int(governor) - 1, relation, own - first if is_joined else 0
            )
        )
        lines.append(line)
    if last > len(words):
        raise UserError(f"{path}, line {rows[-1][0]}: the words {first}-{last} are not all there; repair the file")
    if not words:
        raise UserError(f"{path}, line {rows[0][0]}: a sentence without words; repair the file")
    leads: set[int] = {-1}  # words whose governors lead to the root, which is -1
    for row, line in enumerate(lines):
        _require_root(words, row, leads, f"{path}, line {line}")
    return words


def _require_root(words: list[ParsedWord], row: int, leads: set[int], where: str) -> None:
    """Raises ValueError unless the governors of a word lead to the root; adds the words on the way to `leads`."""
    at, way = row, set()
    while at not in leads and at not in way and at < len(words):
        way.add(at)
        at = words[at].governor
    if at in leads:
        leads |= way
        return
    raise UserError(
        f"{where}: the governors of word {row + 1} do not lead to a root among the {len(words)} words of its sentence; "
        "parse the sentence again"
    )
