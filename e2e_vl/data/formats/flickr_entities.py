"""Reader of Flickr30K Entities: sentences with phrases in brackets, and the boxes of the chains that phrases belong to.

A chain is what several phrases, in the sentences of one image, call the same thing. A phrase is written
`[/EN#283585/people A man]`: chain, one or more types, words. The XML file of an image gives each chain no, one or more
boxes, and a box can belong to several chains.

Coordinates are those of the file, which counts pixels from 1, and they are not shifted: so do BAN and VisualBERT, whose
numbers are the published ones. (The data set's own parser subtracts 1, which changes the results of boxes at the
limit.)

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from detector.errors import UserError
from detector.file_faults import reading
from detector.user_paths import user_path
from e2e_vl.data.storage.files import read_text, require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.records import cut_text, whole_number

_PHRASE = re.compile(r"\[/EN#(\d+)((?:/[^\s/\[\]]+)+)\s([^\[\]]*)\]")
_LONGEST_ID = 64  # characters
_LARGEST = 10**9  # pixels
_SIDES = ("xmin", "ymin", "xmax", "ymax")


@dataclasses.dataclass(frozen=True, slots=True)
class EntityPhrase:
    """One phrase of a sentence."""

    span: tuple[int, int]  # first and last character plus one in the sentence's words
    chain: str  # "0" of what cannot be seen
    types: tuple[str, ...]  # such as people, or instruments and other


@dataclasses.dataclass(frozen=True, slots=True)
class EntitySentence:
    """One caption."""

    words: str  # as written, with single spaces and without brackets
    phrases: tuple[EntityPhrase, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AnnotatedImage:
    """The boxes of one image, in the order of the file."""

    size: tuple[int, int]  # (height, width)
    boxes: np.ndarray  # float64 [G, 4], as written
    names: tuple[tuple[str, ...], ...]  # of each box the chains

    def boxes_of(self, chain: str) -> np.ndarray:
        """float64 [boxes, 4] of a chain; none for what is not in the image, or a scene."""
        return self.boxes[[chain in names for names in self.names]]


def parse_sentence(line: str, where: str = "the sentence") -> EntitySentence:
    """A caption with brackets as words and phrases.

    Raises:
        ValueError: a bracket that is no phrase, or a phrase without words; `where` names it.
    """
    words, phrases, last = "", [], 0
    line = " ".join(line.split())
    for found in _PHRASE.finditer(line):
        words += line[last : found.start()]
        chain, types, own = found.groups()
        own = own.strip()
        if not own:
            raise UserError(f"{where}: the phrase {found[0]} has no words; repair the file")
        phrases.append(EntityPhrase((len(words), len(words) + len(own)), chain, tuple(types[1:].split("/"))))
        words += own
        last = found.end()
    words += line[last:]
    if "[/EN#" in words:
        wrong = words[words.index("[/EN#") :]
        raise UserError(f"{where}: {wrong!r} is no phrase such as [/EN#283585/people A man]; repair the file")
    return EntitySentence(words, tuple(phrases))


def read_sentences(path: str | Path, errors: RecordErrors = RAISE) -> list[EntitySentence]:
    """The captions of one image, a line each; blank lines are left out.

    Args:
        errors: what becomes of an error about one line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no UTF-8 text, a bracket that is no phrase, or no caption. File and line are named.
    """
    path = user_path(path)
    lines = read_text(path, "sentences").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        with errors.about(f"{path}, line {number}"):
            if line.strip():
                found.append(parse_sentence(line, f"{path}, line {number}"))
    if not found:
        raise UserError(f"{path}: there is no sentence in the file; copy or download it again")
    return found


def read_annotation(path: str | Path) -> AnnotatedImage:
    """The size and the boxes of one image.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no XML, no size, or an object without a name, with half a box or with one that is inverted. File and
            object are named.
    """
    path = require_file(path, "annotation")
    try:
        with reading(path):
            content = path.read_text(encoding="utf-8-sig")  # whatever encoding the file claims to have
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the annotation is not a UTF-8 text file; copy or download it again") from error
    if "<!DOCTYPE" in content or "<!ENTITY" in content:  # could make the parser expand a small file to a huge one
        raise UserError(f"{path}: the annotation declares a document type or entities; copy or download it again")
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise UserError(f"{path}: the annotation is not valid XML ({error}); copy or download it again") from error
    sides = ("width", "height")
    width, height = (_whole(root.findtext(f"size/{side}"), f"{path}: the {side}", least=1) for side in sides)
    boxes, names = [], []
    for number, element in enumerate(root.iter("object")):
        where = f"{path}: object {number}"
        chains = tuple((name.text or "").strip() for name in element.findall("name"))
        if not chains or not all(chains):
            raise UserError(f"{where} has no name; repair the file")
        box = element.find("bndbox")
        if box is None:  # a scene, or something that has no box
            continue
        x1, y1, x2, y2 = (_whole(box.findtext(side), f"{where}: {side}") for side in _SIDES)
        if x2 < x1 or y2 < y1:
            raise UserError(f"{where}: the box {[x1, y1, x2, y2]} is inverted; correct or remove it")
        boxes.append((x1, y1, x2, y2))
        names.append(chains)
    return AnnotatedImage((height, width), np.array(boxes, dtype=np.float64).reshape(-1, 4), tuple(names))


def _whole(text: str | None, where: str, least: int = -_LARGEST) -> int:
    try:
        number = whole_number(text or "")
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} is {cut_text(text)}; it must be a whole number, repair the file") from error
    if not least <= number <= _LARGEST:
        raise UserError(f"{where} is {cut_text(number)}; it must be from {least} to {_LARGEST}, repair the file")
    return number


def read_image_ids(path: str | Path, errors: RecordErrors = RAISE) -> list[str]:
    """The image ids of a split file, one per line; blank lines are left out.

    Args:
        errors: what becomes of an error about one line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no id, an id that is there twice, or one that is no number.
    """
    path = require_file(path, "image ids")
    ids: dict[str, int] = {}
    with reading(path):
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name:
            continue
        with errors.about(f"{path}, line {number}"):
            if not (name.isascii() and name.isdecimal()) or len(name) > _LONGEST_ID:
                raise UserError(
                    f"{path}, line {number}: {cut_text(name)} is no image id such as 1000092795; one per line is "
                    "expected"
                )
            if name in ids:
                raise UserError(
                    f"{path}, line {number}: image {name} is there twice, first on line {ids[name]}; remove one"
                )
            ids[name] = number
    if not ids:
        raise UserError(f"{path}: there is no image id in the file; copy or download it again")
    return list(ids)
