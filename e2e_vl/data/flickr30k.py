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

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from detector.errors import MissingFileError, UserError
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset, split_names
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import Flickr30KOptions
from e2e_vl.data.tables import SerializedDict, SerializedList, TextGroups, require_unique
from e2e_vl.io import Record, read_text
from e2e_vl.samples import AnnotatedObjects, PhraseBoxes, Sample, SampleImage, SampleText

logger = logging.getLogger(__name__)

_PHRASE = re.compile(r"\[/EN#(\d+)((?:/[^\s/\[\]]+)+)\s([^\[\]]*)\]")


class EntityPhrase(Record, array_like=True):
    """One phrase of a sentence."""

    span: tuple[int, int]  # first and last character plus one in the sentence's words
    chain: str  # "0" of what cannot be seen
    types: tuple[str, ...]  # such as people, or instruments and other


class EntitySentence(Record, array_like=True):
    """One caption."""

    words: str  # as written, with single spaces and without brackets
    phrases: tuple[EntityPhrase, ...]


class AnnotatedImage(Record, array_like=True):
    """The boxes of one image, in the order of the file."""

    size: tuple[int, int]  # (height, width)
    boxes: list[tuple[int, int, int, int]]  # as written
    names: list[tuple[str, ...]]  # of each box the chains

    def boxes_of(self, chain: str) -> np.ndarray:
        """float64 [boxes, 4] of a chain; none for what is not in the image, or a scene."""
        found = [box for box, names in zip(self.boxes, self.names, strict=True) if chain in names]
        return np.array(found, dtype=np.float64).reshape(-1, 4)


def parse_sentence(line: str, where: str = "the sentence") -> EntitySentence:
    """A caption with brackets as words and phrases; `where` names it in errors."""
    words, phrases, last = "", [], 0
    line = " ".join(line.split())
    for found in _PHRASE.finditer(line):
        words += line[last : found.start()]
        chain, types, own = found.groups()
        own = own.strip()
        span = (len(words), len(words) + len(own))
        phrases.append(EntityPhrase(span, chain, tuple(types[1:].split("/"))))
        words += own
        last = found.end()
    words += line[last:]
    if "[/EN#" in words or any(start == end for start, end in (phrase.span for phrase in phrases)):
        raise UserError(f"{where}: {line!r} has a bracket that is no phrase such as [/EN#283585/people A man]")
    return EntitySentence(words, tuple(phrases))


def read_sentences(path: str | Path) -> list[EntitySentence]:
    """The captions of one image, a line each; blank lines are left out."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    found = [parse_sentence(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not found:
        raise UserError(f"{path}: there is no sentence in the file; copy or download it again")
    return found


def read_annotation(path: str | Path) -> AnnotatedImage:
    """The size and the boxes of one image; objects without a box (scenes, or what cannot be seen) are left out."""
    try:
        root = ElementTree.parse(path).getroot()
        size = int(root.findtext("size/height", "")), int(root.findtext("size/width", ""))
        boxes, names = [], []
        for element in root.iter("object"):
            if (box := element.find("bndbox")) is None:
                continue
            x1, y1, x2, y2 = (int(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax"))
            if x2 < x1 or y2 < y1:
                raise ValueError(f"the box {[x1, y1, x2, y2]} is inverted")
            boxes.append((x1, y1, x2, y2))
            names.append(tuple((name.text or "").strip() for name in element.findall("name")))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no such file; check data.files.annotations") from error
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path}: not an annotation of Flickr30K Entities ({error}); correct the file") from error
    return AnnotatedImage(size, boxes, names)


def read_image_ids(path: str | Path) -> list[str]:
    """The image ids of a split file, one per line; blank lines are left out."""
    ids = read_text(path).split()
    if not ids or not all(one.isdecimal() for one in ids):
        raise UserError(f"{path}: holds no list of image ids such as 1000092795, one per line")
    require_unique(ids, f"{path}: image")
    return ids


class Caption(Record, array_like=True):
    """A caption with a phrase that has a box."""

    image_id: str
    line: int  # of the file, from 0
    sentence: EntitySentence


class Flickr30KDataset(VLDataset):
    """Captions of one split, or of several joined by "+"; those of an image stand one after the other."""

    file_keys = (
        *("images", "ids", "sentences", "annotations"),
        *("instances", "detections", "features"),
    )
    annotation_files = ("instances", "annotations")
    id_space = "flickr"
    has_phrases = True

    def __init__(self, files: DataFiles, options: Flickr30KOptions, split: str, needs: DataNeeds) -> None:
        self.settings = options
        self.parts = [{"split": name} for name in split_names(split)]
        self.folder = files.path("images")
        self.annotations_folder = files.path("annotations")
        if needs.objects and "instances" not in files:
            raise UserError(
                "The annotated boxes have no classes of a detector; give an instances file as data.files.instances, or "
                "set detector.loss_weight to 0."
            )
        image_ids = _image_ids(files, split)
        annotated = ((image_id, self._annotation(image_id)) for image_id in image_ids)
        self.annotated = SerializedDict(annotated, AnnotatedImage, str(self.annotations_folder))
        captions = [caption for image_id in image_ids for caption in _captions(files, image_id)]
        boxed = [caption for caption in captions if self._boxed_phrases(caption)]
        self.left_out = len(captions) - len(boxed)
        if self.left_out:
            logger.warning("%s: left out are %d captions without a phrase that has a box.", split, self.left_out)
        if not boxed:
            raise UserError(f"{self.annotations_folder}: no phrase of any caption has a box; use files of one release")
        self.captions = SerializedList(boxed, Caption)
        self.groups = TextGroups.of_images(caption.image_id for caption in boxed)
        self.instances = None
        if needs.annotations and "instances" in files:
            self.instances = CocoInstances(files.path("instances", split=split))
            self.instances.require(self.image_ids())
            self.class_names = self.instances.class_names

    def _annotation(self, image_id: str) -> AnnotatedImage:
        return read_annotation(self.annotations_folder / f"{image_id}.xml")

    @classmethod
    def texts_of(cls, files: DataFiles, options: Flickr30KOptions, split: str) -> Iterable[str]:
        """All captions of a split."""
        for image_id in _image_ids(files, split):
            yield from (caption.sentence.words for caption in _captions(files, image_id))

    def __len__(self) -> int:
        """Number of captions with a phrase that has a box."""
        return len(self.captions)

    def __getitem__(self, text: int) -> str:
        """One caption; the data set is a pool of texts."""
        return self.captions[text].sentence.words

    def image_ids(self) -> Iterable[str]:
        return (self.captions[texts[0]].image_id for texts in self.groups)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some captions of one image."""
        image_id = self.captions[texts[0]].image_id
        file = self.settings.file(self.folder, image_id)
        annotated = self.annotated[image_id]
        if self.instances is not None:
            image = self.instances.sample_image(image_id, file)
        else:
            boxes = self._moved(np.array(annotated.boxes, dtype=np.float64).reshape(-1, 4))
            objects = AnnotatedObjects(boxes, str(self.annotations_folder / f"{image_id}.xml"))
            image = SampleImage(image_id, file, annotated.size, objects)
        own = self.groups[self.groups.group_of(texts[0])]
        return Sample((image,), tuple(self._text(index, annotated) for index in texts), pool=self, own_texts=own)

    def _boxed_phrases(self, caption: Caption) -> list[EntityPhrase]:
        chains = {chain for names in self.annotated[caption.image_id].names for chain in names}
        return [phrase for phrase in caption.sentence.phrases if phrase.chain in chains]

    def _text(self, index: int, annotated: AnnotatedImage) -> SampleText:
        caption = self.captions[index]
        words, phrases = caption.sentence.words, caption.sentence.phrases
        every_box = tuple(self._moved(annotated.boxes_of(phrase.chain)) for phrase in phrases)
        boxed = [(phrase, boxes) for phrase, boxes in zip(phrases, every_box, strict=True) if len(boxes)]
        facts = {
            "image_id": caption.image_id,
            "sentence": caption.line,
            "phrases": [words[slice(*phrase.span)] for phrase, _ in boxed],
            "phrase_ids": [phrase.chain for phrase, _ in boxed],
            "phrase_types": [list(phrase.types) for phrase, _ in boxed],
            "gt_boxes": [boxes.tolist() for _, boxes in boxed],
        }
        truth = PhraseBoxes(tuple(phrase.span for phrase, _ in boxed), tuple(boxes for _, boxes in boxed))
        everything = PhraseBoxes(tuple(phrase.span for phrase in phrases), every_box, is_complete=True)
        return SampleText(index, words, facts, truth, phrases=everything)

    def _moved(self, boxes: np.ndarray) -> np.ndarray:
        return boxes - 1 if self.settings.coordinates == "zero_based" else boxes


def _image_ids(files: DataFiles, split: str) -> list[str]:
    """The images of one or several splits."""
    ids = [one for name in split_names(split) for one in read_image_ids(files.path("ids", split=name))]
    require_unique(ids, f"the splits {split}: image")
    return ids


def _captions(files: DataFiles, image_id: str) -> Iterator[Caption]:
    """All captions of an image."""
    sentences = read_sentences(files.path("sentences") / f"{image_id}.txt")
    return (Caption(image_id, line, sentence) for line, sentence in enumerate(sentences))
