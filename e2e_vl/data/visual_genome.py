"""Visual Genome: descriptions of regions as captions, or questions with one answer each, for pre-training.

Files (`data.files`, relative to `data.root`; the release has no splits, so {split} is what you name)
    images      folder that holds VG_100K and VG_100K_2
    image_data  image_data.json
    regions     region_descriptions.json, for `data.config.texts: regions`
    region_graphs  optional, region_graphs.json: what the words of descriptions name, read for `phrases.weight`
    questions   question_answers.json, for `data.config.texts: questions`
    detections, features   boxes of images by their ids

For phrases beside the task, a description without region graphs is one phrase, which names the box of its region. A
description that has other words in the region graphs has no phrases; where only white space differs, it has them.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import numpy as np
from tqdm.auto import tqdm

from detector.errors import UserError, user_path
from e2e_vl.config import BoxSource
from e2e_vl.converter import check_choice
from e2e_vl.data.base import DataFiles, VLDataset, Wants
from e2e_vl.data.batching import ConsecutiveGroups
from e2e_vl.data.overlap import COCO, VISUAL_GENOME
from e2e_vl.data.storage.files import checked_records
from e2e_vl.data.storage.json_entries import json_items
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.io import inside, shown
from e2e_vl.records import Number, Pixel, Record, Side
from e2e_vl.samples import CorrectAnswer, PhraseBoxes, Sample, SampleImage, SampleText

# Readers of the official Visual Genome files: images, region descriptions, and questions with answers.


_Row = TypeVar("_Row", bound=Record)


class _GenomeImageRow(Record):
    image_id: Number
    width: Side
    height: Side
    url: str | None = None
    coco_id: Number | None = None


class _RegionsRow(Record):
    id: Number
    regions: list[Any]


class _RegionRow(Record):
    region_id: Number
    phrase: str


class _QuestionsRow(Record):
    id: Number
    qas: list[Any]


class _GenomeQuestionRow(Record):
    qa_id: Number
    question: str
    answer: str


@dataclasses.dataclass(frozen=True, slots=True)
class GenomeImage:
    """One image of Visual Genome."""

    image_id: int
    size: tuple[int, int]  # (height, width)
    folder: str  # such as VG_100K_2; "" where the file has no address
    coco_id: int | None  # the same image in COCO; None: COCO does not have it


@dataclasses.dataclass(frozen=True, slots=True)
class GenomeText:
    """A description of a region, or a question with its answer."""

    number: int  # id of the region or of the question
    words: str
    answer: str | None = None  # None: it is no question


def read_genome_images(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, GenomeImage]:
    """The images by their ids.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, or an image that is listed twice.
    """
    found = {}
    for _, row in _rows(_GenomeImageRow, path, "images", "image_id", "image", errors):
        folder = PurePosixPath(row.url or "").parent.name
        found[row.image_id] = GenomeImage(row.image_id, (row.height, row.width), sys.intern(folder), row.coco_id)
    return found


def read_region_descriptions(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, list[GenomeText]]:
    """The descriptions of the regions of each image that has any.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, or a description that is no text.
    """
    found = {}
    for where, row in _rows(_RegionsRow, path, "region descriptions", "id", "regions of image", errors):
        regions = checked_records(_RegionRow, row.regions, f"{where}: region", "region_id", errors=errors)
        own = [GenomeText(one.region_id, one.phrase) for _, one in regions]
        if own:
            found[row.id] = own
    return found


def read_genome_questions(path: str | Path, errors: RecordErrors = RAISE) -> dict[int, list[GenomeText]]:
    """The questions about each image that has any.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such JSON, an image that is listed twice, or a question or an answer that is no text.
    """
    found = {}
    for where, row in _rows(_QuestionsRow, path, "questions", "id", "questions of image", errors):
        questions = checked_records(_GenomeQuestionRow, row.qas, f"{where}: question", "qa_id", errors=errors)
        own = [GenomeText(one.qa_id, one.question, sys.intern(one.answer)) for _, one in questions]
        if own:
            found[row.id] = own
    return found


def _rows(
    kind: type[_Row], path: str | Path, what: str, key: str, name: str, errors: RecordErrors
) -> Iterator[tuple[str, _Row]]:
    is_empty = True
    items = json_items(path, what)
    for row in checked_records(kind, items, f"{path}: {name}", key, unique="image ids", errors=errors):
        is_empty = False
        yield row
    if is_empty:
        raise UserError(f"{path}: there are no {what} in it; copy or download the file again")


# What the descriptions of Visual Genome's regions name: the objects of its region graphs, or the region itself.


logger = logging.getLogger(__name__)

Corners = tuple[float, float, float, float]


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


READ = {"regions": read_region_descriptions, "questions": read_genome_questions}
OF_COCO = ("all", "without", "only")


@dataclasses.dataclass(frozen=True)
class GenomeOptions:
    """Fields of `data.config`."""

    texts: Literal["regions", "questions"] = "regions"
    # "without": only images that COCO does not have (LXMERT's vgnococo); "only": only images that it has
    coco: Literal["all", "without", "only"] = "all"
    use_folders: bool = True  # images lie in VG_100K and VG_100K_2; False: all in one folder, as GQA releases them

    def __post_init__(self) -> None:
        check_choice("data.config.texts", self.texts, READ)
        check_choice("data.config.coco", self.coco, OF_COCO)


class VisualGenomeDataset(VLDataset):
    """Texts about images; the texts of an image stand one after the other.

    Args:
        texts: of each image.
        images: the facts about these images.
        parts: see `VLDataset.parts`.
        phrases: what the descriptions name; None: nobody asks for it, or the texts are questions.

    Raises:
        ValueError: a text about an image that is not listed, or no text about the images that are asked for.
    """

    known_files = ("images", "image_data", "regions", "region_graphs", "questions", "detections", "features")
    options = GenomeOptions
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)
    id_space = VISUAL_GENOME

    def __init__(
        self,
        texts: Mapping[int, Sequence[GenomeText]],
        images: Mapping[int, GenomeImage],
        folder: Path,
        options: GenomeOptions,
        parts: Sequence[Mapping[str, str]] = (),
        phrases: RegionPhrases | None = None,
    ) -> None:
        wanted = {"all": (True, False), "without": (False,), "only": (True,)}[options.coco]
        self.images = [images[number] for number in texts if (images[number].coco_id is not None) in wanted]
        if not self.images:
            raise UserError(f"{folder}: no image with {options.texts} is left with data.config.coco={options.coco}")
        self.texts = [text for image in self.images for text in texts[image.image_id]]
        self.groups = ConsecutiveGroups([len(texts[image.image_id]) for image in self.images])
        self.folder = folder
        self.settings = options
        self.parts = parts
        self.phrases = phrases
        self.has_phrases = phrases is not None
        self.has_truths = options.texts == "questions"

    @classmethod
    def open(cls, files: DataFiles, options: GenomeOptions, split: str, wants: Wants) -> VisualGenomeDataset:
        """The top of this file says which files there are."""
        texts = _texts(files, options, split)
        images = files.read(read_genome_images, path := files.path("image_data", split=split))
        unknown = next((number for number in texts if number not in images), None)
        if unknown is not None:
            raise UserError(
                f"{path}: image {unknown} is not among the images of image_data; use files of the same release"
            )
        phrases = None
        if wants.phrases and options.texts == "regions":
            if "region_graphs" in files:
                phrases = files.read(read_region_graphs, files.path("region_graphs", split=split))
                phrases.compare(((one.number, one.words) for own in texts.values() for one in own), files.errors)
            else:
                phrases = files.read(read_region_boxes, files.path("regions", split=split))
        return cls(
            texts,
            images,
            Path() if wants.boxes is BoxSource.PRECOMPUTED else files.path("images", split=split),
            options,
            [{"split": split}],
            phrases,
        )

    @classmethod
    def reads(cls, options: GenomeOptions, split: str, wants: Wants) -> tuple[str, ...]:
        unread = {"regions": {"questions"}, "questions": {"regions", "region_graphs"}}[options.texts]
        if not wants.phrases:
            unread = unread | {"region_graphs"}
        return tuple(key for key in super().reads(options, split, wants) if key not in unread)

    @classmethod
    def texts_of(cls, files: DataFiles, options: GenomeOptions, split: str) -> Iterable[str]:
        """All descriptions, or all questions."""
        return (text.words for own in _texts(files, options, split).values() for text in own)

    @classmethod
    def answers_of(cls, files: DataFiles, options: GenomeOptions, split: str) -> dict[int, str]:
        """The answer to each question."""
        if options.texts != "questions":
            return super().answers_of(files, options, split)
        found = _texts(files, options, split)
        return {text.number: text.answer for own in found.values() for text in own}

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def __getitem__(self, text: int) -> str:
        """One text; the data set is a pool of texts."""
        return self.texts[text].words

    def image_ids(self) -> Iterable[str]:
        return (str(image.image_id) for image in self.images)

    def truths(self) -> Iterable[CorrectAnswer | None]:
        return map(_truth, self.texts)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some texts about one image."""
        group = self.groups.of_text(texts[0])
        image = self.images[group]
        in_coco = () if image.coco_id is None else ((COCO, str(image.coco_id)),)
        name = str(image.image_id)
        place = f"{image.folder}/{name}.jpg" if image.folder and self.settings.use_folders else f"{name}.jpg"
        file = inside(self.folder, place, f"image {shown(name)}", follows_links=True)
        stated = SampleImage(name, file, image.size, photo_aliases=((VISUAL_GENOME, name), *in_coco))
        return Sample((stated,), tuple(self._text(index) for index in texts), pool=self, own_texts=self.groups[group])

    def _text(self, index: int) -> SampleText:
        text = self.texts[index]
        kind = "region_id" if text.answer is None else "qa_id"
        phrases = None if self.phrases is None else self.phrases.of(text.number, text.words)
        facts = {kind: text.number, "sent": text.words}
        return SampleText(index, text.words, facts, _truth(text), phrases=phrases)


def _texts(files: DataFiles, options: GenomeOptions, split: str) -> Mapping[int, Sequence[GenomeText]]:
    """All descriptions, or all questions, of each image; nobody may change it."""
    return files.read(READ[options.texts], files.path(options.texts, split=split))


def _truth(text: GenomeText) -> CorrectAnswer | None:
    return None if text.answer is None else CorrectAnswer(text.answer)
