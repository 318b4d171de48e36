"""Flickr30K Entities: captions whose phrases name boxes.

Files (`data.files`, relative to `data.root`; {split} is the split)
    ids          {split}.txt: the images of the split
    images       flickr30k_images: folder of the images
    sentences    Flickr30kEntities/Sentences: folder of the captions
    annotations  Flickr30kEntities/Annotations: folder of the boxes
    instances    COCO instances of the same images, in place of the annotated boxes as candidates: detection losses

As in BAN's and VisualBERT's code, phrases without a box (scenes, what cannot be seen) are left out, and so are captions
without any phrase that has one, which are counted in the log. All small files of a split are read when it is opened.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import numpy as np

from detector.errors import UserError, reading, user_path
from e2e_vl.data.base import DataFiles, VLDataset, Wants, split_names
from e2e_vl.data.batching import ConsecutiveGroups
from e2e_vl.data.coco import CocoInstances, ImageNames, instances_image, read_instances, require_instances
from e2e_vl.data.storage.files import read_text, require_file
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import JoinedRecords, RecordTable, text_column
from e2e_vl.io import inside
from e2e_vl.records import cut_text, whole_number
from e2e_vl.samples import AnnotatedObjects, PhraseBoxes, Sample, SampleImage, SampleText

# Reader of Flickr30K Entities: sentences with phrases in brackets, and the boxes of the chains that phrases belong to.


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


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flickr30KOptions(ImageNames):
    """Fields of `data.config`, beside `image_name`."""

    # "as_written": the files count pixels from 1, and boxes are taken as they are (BAN, VisualBERT). "zero_based": one
    # less, as the data set's own parser gives them.
    coordinates: Literal["as_written", "zero_based"] = "as_written"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coordinates not in ("as_written", "zero_based"):
            raise UserError(f"data.config.coordinates is '{self.coordinates}'; it must be as_written or zero_based.")


@dataclasses.dataclass(frozen=True, slots=True)
class Caption:
    """A caption with the phrases that have boxes."""

    line: int  # of the file, from 0
    sentence: EntitySentence
    phrases: tuple[EntityPhrase, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EntityImage:
    """An image and its captions with phrases that have boxes."""

    image_id: str
    captions: tuple[Caption, ...]
    annotated: AnnotatedImage


class Flickr30KDataset(VLDataset):
    """Captions of some images, those of an image one after the other.

    Args:
        images: those with captions.
        words: of these captions, image after image.
        folder: of the image files.
        annotations_folder: names the boxes in errors.
        parts: placeholder values of each split, see `VLDataset.parts`.
        left_out: number of captions of the split that are not among them.

    Raises:
        ValueError: no caption has a phrase with a box, or an image that the instances lack.
    """

    known_files = (
        *("images", "ids", "sentences", "annotations"),
        *("instances", "detections", "features"),
    )
    options = Flickr30KOptions
    annotation_files = ("instances", "annotations")
    id_space = "flickr"
    has_phrases = True

    def __init__(
        self,
        images: Sequence[EntityImage],
        words: Sequence[str],
        folder: Path,
        annotations_folder: Path,
        options: Flickr30KOptions,
        parts: Sequence[Mapping[str, str]],
        instances: CocoInstances | None = None,
        left_out: int = 0,
    ) -> None:
        if not images:
            raise UserError(f"{annotations_folder}: no phrase of any caption has a box; use files of one release")
        self.images = images
        self.words = words
        self.folder = folder
        self.annotations_folder = annotations_folder
        self.settings = options
        self.parts = parts
        self.instances = instances
        self.left_out = left_out
        self._ids = text_column(one.image_id for one in images)
        self.groups = ConsecutiveGroups([len(one.captions) for one in images])
        if instances is not None:
            require_instances(instances, self._ids)
            self.class_names = instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: Flickr30KOptions, split: str, wants: Wants) -> Flickr30KDataset:
        """`split` names one split or several joined by "+"; the top of this file says which files there are."""
        parts = [{"split": name} for name in split_names(split)]
        if wants.objects and "instances" not in files:
            raise UserError(
                "The annotated boxes have no classes of a detector; give an instances file as data.files.instances, or "
                "set detector.loss_weight to 0."
            )
        instances = None
        if wants.annotations and "instances" in files:
            path = files.path("instances", split=split)
            instances = files.read(read_instances, path, drop_empty_boxes=True)
        read = _read_splits(files, split)
        images = JoinedRecords([one.images for one in read])
        words = JoinedRecords([one.kept_words for one in read])
        left_out = sum(one.left_out for one in read)
        folders = files.path("images"), files.path("annotations")
        return cls(images, words, *folders, options, parts, instances, left_out)

    @classmethod
    def texts_of(cls, files: DataFiles, options: Flickr30KOptions, split: str) -> Iterable[str]:
        """All captions of a split."""
        return (words for one in _read_splits(files, split) for words in one.words)

    def __len__(self) -> int:
        """Number of captions with a phrase that has a box."""
        return len(self.words)

    def __getitem__(self, text: int) -> str:
        """One caption; the data set is a pool of texts."""
        return self.words[text]

    def image_ids(self) -> Iterable[str]:
        return self._ids

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some captions of one image."""
        group = self.groups.of_text(texts[0])
        own, image = self.groups[group], self.images[group]
        stated = tuple(self._text(index, image, image.captions[index - own[0]]) for index in texts)
        return Sample((self._image(image),), stated, pool=self, own_texts=own)

    def _image(self, image: EntityImage) -> SampleImage:
        image_id, annotated = image.image_id, image.annotated
        file = self.settings.file(self.folder, image_id)
        if self.instances is not None:
            return instances_image(self.instances, image_id, file)
        objects = AnnotatedObjects(self._moved(annotated.boxes), str(self.annotations_folder / f"{image_id}.xml"))
        return SampleImage(image_id, file, annotated.size, objects)

    def _text(self, index: int, image: EntityImage, caption: Caption) -> SampleText:
        boxes = [self._moved(image.annotated.boxes_of(phrase.chain)) for phrase in caption.phrases]
        words = caption.sentence.words
        facts = {
            "image_id": image.image_id,
            "sentence": caption.line,
            "sent": words,
            "phrases": [words[slice(*phrase.span)] for phrase in caption.phrases],
            "phrase_ids": [phrase.chain for phrase in caption.phrases],
            "phrase_types": [list(phrase.types) for phrase in caption.phrases],
            "gt_boxes": [own.tolist() for own in boxes],
        }
        truth = PhraseBoxes(tuple(phrase.span for phrase in caption.phrases), tuple(boxes))
        everything = caption.sentence.phrases  # boxes_of is empty for a phrase without any
        annotated = [self._moved(image.annotated.boxes_of(phrase.chain)) for phrase in everything]
        spans = tuple(phrase.span for phrase in everything)
        phrases = PhraseBoxes(spans, tuple(annotated), is_complete=True)
        return SampleText(index, words, facts, truth, phrases=phrases)

    def _moved(self, boxes: np.ndarray) -> np.ndarray:
        return boxes - 1 if self.settings.coordinates == "zero_based" else boxes


@dataclasses.dataclass(frozen=True)
class _EntitySplit:
    """What the files of one split say."""

    image_ids: Sequence[str]
    words: Sequence[str]  # of all captions
    kept_words: Sequence[str]  # of the captions with a boxed phrase
    images: Sequence[EntityImage]  # those that have such captions
    left_out: int  # captions without a phrase that has a box


def _read_splits(files: DataFiles, split: str) -> list[_EntitySplit]:
    """One or several splits, each read once for all that share it. Raises ValueError for an image in two of them."""
    found: dict[str, str] = {}
    read = []
    for name in split_names(split):
        places = (files.path("ids", split=name), files.path("sentences"), files.path("annotations"))
        read.append(files.read(_read_split, *places))
        for image_id in read[-1].image_ids:
            if image_id in found:
                raise UserError(f"image {image_id} is in the splits {found[image_id]} and {name}; name each split once")
            found[image_id] = name
    return read


def _read_split(ids: Path, sentences: Path, annotations: Path, errors: RecordErrors = RAISE) -> _EntitySplit:
    image_ids = read_image_ids(ids, errors)
    words: list[str] = []

    def read() -> Iterator[EntityImage]:
        for image_id in image_ids:
            with errors.about(f"{sentences}/{image_id}.txt"):
                own = read_sentences(inside(sentences, f"{image_id}.txt", str(ids), follows_links=True), errors)
                annotated = read_annotation(inside(annotations, f"{image_id}.xml", str(ids), follows_links=True))
                words.extend(one.words for one in own)
                known = {chain for names in annotated.names for chain in names}
                phrases = [tuple(phrase for phrase in one.phrases if phrase.chain in known) for one in own]
                kept = [Caption(line, *pair) for line, pair in enumerate(zip(own, phrases, strict=True)) if pair[1]]
                if kept:
                    yield EntityImage(image_id, tuple(kept), annotated)

    images = RecordTable(EntityImage, read())
    kept_words = text_column(caption.sentence.words for image in images for caption in image.captions)
    left_out = len(words) - len(kept_words)
    if left_out:
        logger.warning("%s: left out are %d captions without a phrase that has a box.", ids, left_out)
    return _EntitySplit(text_column(image_ids), text_column(words), kept_words, images, left_out)
