"""What the descriptions of Visual Genome's regions name: the objects of its region graphs, or the region itself.

    region_graphs.json         list of {"image_id", "regions": [{"region_id", "phrase", "synsets", "objects", ...}]}
        synsets    list of {"entity_idx_start", "entity_idx_end", "entity_name", "synset_name"}: its words
        objects    list of {"x", "y", "w", "h", "name", "synsets": [names], ...}: what it is about
    region_descriptions.json   list of {"id", "regions": [{"region_id", "phrase", "x", "y", "width", "height"}]}

Words and places are compared and kept without white space: descriptions of the two files may differ in it, and then the
places of one file are not those of the other.

The words of an entity name all objects of the region with the entity's synset or, where none has it, with its name.
Nothing else says which object is which, so of two people in a region each word for a person names both.

The official file of region graphs is about 1 GB. It is read image by image, and only arrays of spans and boxes stay in
memory, which data workers share (`tools/benchmarks/phrase_files.py` measures it).

Shape legend: see `detector/structures.py`; and here
    P   phrases of all regions
"""

from __future__ import annotations

import dataclasses
import logging
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm.auto import tqdm

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.storage.files import checked_records
from e2e_vl.data.storage.json_entries import json_items
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.records import Number, Pixel, Record
from e2e_vl.samples import PhraseBoxes

logger = logging.getLogger(__name__)

Corners = tuple[float, float, float, float]
_Row = TypeVar("_Row", bound=Record)


class _RegionsOfImage(Record):
    regions: list[Any]
    image_id: Number | None = None
    id: Number | None = None


class _Entity(Record):
    entity_idx_start: Number
    entity_idx_end: Number
    entity_name: str | None = None
    synset_name: str | None = None


class _RegionObject(Record):
    x: Pixel
    y: Pixel
    w: Pixel
    h: Pixel
    name: str | None = None
    names: list[str] | None = None
    synsets: list[str] | None = None


class _RegionGraph(Record):
    region_id: Number
    phrase: str
    synsets: list[_Entity]
    objects: list[_RegionObject]


class _Description(Record):
    region_id: Number
    phrase: str
    x: Pixel
    y: Pixel
    width: Pixel
    height: Pixel


NamedBoxes = Mapping[tuple[int, int], Sequence[Corners]]  # characters of a description -> boxes that they name


@dataclasses.dataclass(frozen=True)
class DescribedRegion:
    """One region of a file."""

    number: int  # its id
    words: str
    named: NamedBoxes


class RegionPhrases:
    """The phrases of many descriptions and the boxes that they name, as arrays. It can be shared, nobody changes it.

    Args:
        path: names the file in errors.
        regions: with an id of its own each; those that name nothing are left out.

    Raises:
        ValueError: two regions with the same id.
    """

    def __init__(self, path: Path, regions: Iterator[DescribedRegion]) -> None:
        self.path = path
        numbers, sums, first_phrase = array("q"), array("I"), array("q")
        spans, first_box, boxes = array("i"), array("q", [0]), array("f")
        for region in regions:
            if not region.named:
                continue
            numbers.append(region.number)
            sums.append(_checksum(region.words))
            first_phrase.append(len(spans) // 2)
            named: dict[tuple[int, ...], Sequence[Corners]] = {}
            for span, own in region.named.items():
                named.setdefault(tuple(len(_without_space(region.words[:end])) for end in span), own)
            for span, own in named.items():
                spans.extend(span)
                for box in own:
                    boxes.extend(box)
                first_box.append(len(boxes) // 4)
        order = np.argsort(np.asarray(numbers), kind="stable")
        self._numbers = np.asarray(numbers)[order]
        twice = np.flatnonzero(self._numbers[1:] == self._numbers[:-1])
        if len(twice):
            raise UserError(f"{path}: region {self._numbers[twice[0]]} is listed twice; ids of regions must be unique")
        self._sums = np.asarray(sums)[order]
        first = np.asarray([*first_phrase, len(spans) // 2], dtype=np.int64)
        self._phrases = np.stack([first[:-1], first[1:]], axis=1)[
            order
        ]  # of each region the first and the last plus one
        self._spans = np.asarray(spans).reshape(-1, 2)  # [P, 2]
        self._first_box = np.asarray(first_box)  # [P + 1]
        self._boxes = np.asarray(boxes).reshape(-1, 4)

    def __len__(self) -> int:
        """Number of regions that name anything."""
        return len(self._numbers)

    def of(self, number: int, words: str) -> PhraseBoxes | None:
        """The phrases of one region; None where it names nothing, or is described in other words (see `compare`)."""
        row = int(np.searchsorted(self._numbers, number))
        if row == len(self) or self._numbers[row] != number or self._sums[row] != _checksum(words):
            return None
        first, end = self._phrases[row].tolist()
        bounds = self._first_box[first : end + 1].tolist()
        boxes = (self._boxes[bounds[i] : bounds[i + 1]].astype(np.float64) for i in range(end - first))
        place = [at for at, character in enumerate(words) if not character.isspace()]
        spans = ((place[start], place[stop - 1] + 1) for start, stop in self._spans[first:end].tolist())
        return PhraseBoxes(tuple(spans), tuple(boxes))

    def compare(self, described: Iterable[tuple[int, str]], errors: RecordErrors = RAISE) -> None:
        """Say how many regions are described in other words than these, which leaves them without phrases.

        Args:
            described: number and words of regions, each once.
            errors: is told.

        Raises:
            ValueError: all of them are, so that the files do not belong together.
        """
        numbers, sums = array("q"), array("I")
        for number, words in described:
            numbers.append(number)
            sums.append(_checksum(words))
        rows = np.searchsorted(self._numbers, numbers).clip(max=max(len(self) - 1, 0))
        is_here = self._numbers[rows] == numbers if len(self) else np.zeros(len(numbers), dtype=bool)
        is_other = is_here & (self._sums[rows] != sums) if len(self) else is_here
        if not is_other.any():
            return
        first = numbers[int(is_other.argmax())]
        sentence = (
            f"{self.path}: {is_other.sum():,} of {is_here.sum():,} regions, region {first} the first of them, have "
            "other descriptions than in data.files.regions"
        )
        if is_other.sum() == is_here.sum():
            raise UserError(f"{sentence}; use files of the same release")
        errors.warn(f"{sentence}; these have no phrases")


def read_region_graphs(path: str | Path, errors: RecordErrors = RAISE) -> RegionPhrases:
    """What the words of each description name.

    Words and objects that cannot be used (no characters of the description, no area) are counted in the log.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, a record that lacks something, or a region that is there twice.
    """
    path, lost = user_path(path), Counter()
    name = partial(_named_by_words, lost=lost)
    found = RegionPhrases(path, _described(_RegionGraph, path, "region graphs", name, errors))
    if lost:
        counts = " and ".join(f"{lost[what]:,} {what}" for what in sorted(lost))
        logger.warning("%s: left out are %s.", path, counts)
    return found


def read_region_boxes(path: str | Path, errors: RecordErrors = RAISE) -> RegionPhrases:
    """Each description as one phrase that names the box of its region.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, a record that lacks something, or a region that is there twice.
    """
    path = user_path(path)
    return RegionPhrases(path, _described(_Description, path, "region descriptions", _named_as_a_whole, errors))


def _described(
    kind: type[_Row], path: Path, what: str, name: Callable[[_Row], NamedBoxes], errors: RecordErrors
) -> Iterator[DescribedRegion]:
    """All regions of a file; `name` says what a record names."""
    bar = tqdm(json_items(path, what), desc=f"reading {path.name}", unit=" images", delay=2, leave=False, disable=None)
    for _, row in checked_records(_RegionsOfImage, bar, f"{path}: image", errors=errors):
        regions = f"{path}: image {row.id if row.image_id is None else row.image_id}: region"
        for _, one in checked_records(kind, row.regions, regions, "region_id", errors=errors):
            yield DescribedRegion(one.region_id, one.phrase, name(one))


def _named_as_a_whole(region: _Description) -> NamedBoxes:
    """The box of the region, for all characters of its description."""
    box = _corners(region.x, region.y, region.width, region.height)
    return {(0, len(region.phrase)): [box]} if box is not None and region.phrase.strip() else {}


def _named_by_words(region: _RegionGraph, lost: Counter[str]) -> NamedBoxes:
    """The boxes of objects that each word of a description names."""
    objects = []
    for one in region.objects:
        box = _corners(one.x, one.y, one.w, one.h)
        if box is None:
            lost["objects without an area"] += 1
        else:
            objects.append((box, one))
    named: dict[tuple[int, int], list[Corners]] = {}
    for one in region.synsets:
        start, end = one.entity_idx_start, one.entity_idx_end
        words = region.phrase[start:end] if 0 <= start < end <= len(region.phrase) else ""
        if not words or words.isspace():
            lost["words that are no characters of their description"] += 1
        elif objects and (boxes := _named_by(one, objects, words)):
            named.setdefault((start, end), boxes)
    return named


def _named_by(entity: _Entity, objects: Sequence[tuple[Corners, _RegionObject]], words: str) -> list[Corners]:
    """Different boxes of the objects that have the synset of an entity, or else its name."""
    synset = entity.synset_name
    boxes = [box for box, one in objects if synset is not None and synset in (one.synsets or ())]
    if not boxes:
        called = (entity.entity_name or words).lower()
        names = (one.name or next(iter(one.names or ()), "") for _, one in objects)
        boxes = [box for (box, _), name in zip(objects, names, strict=True) if name.lower() == called]
    return list(dict.fromkeys(boxes))


def _corners(x: float, y: float, width: float, height: float) -> Corners | None:
    """A box as corners; None without an area."""
    return (x, y, x + width, y + height) if width > 0 and height > 0 else None


def _checksum(words: str) -> int:
    return zlib.crc32(_without_space(words).encode("utf-8", "surrogatepass"))


def _without_space(words: str) -> str:
    return "".join(words.split())
