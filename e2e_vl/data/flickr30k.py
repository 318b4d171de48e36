"""Flickr30K Entities: captions whose phrases refer to boxes.

Files (`data.files`, relative to `data.root`; {split} is the split)
    ids          {split}.txt: image ids of the split
    images       flickr30k_images: folder of the images
    sentences    Flickr30kEntities/Sentences: folder of the captions
    annotations  Flickr30kEntities/Annotations: folder of the boxes
    instances    COCO instances of the same images: candidate boxes instead of the annotated boxes, and detection losses

As in BAN's and VisualBERT's code, phrases without a box (scenes, non-visual phrases) are skipped, and so are captions
without any phrase with a box; their number is logged. All files except the images are read when a split is opened.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.data.base import DataFiles, DataNeeds, JoinedSplit, RecordDataset, TextRecord, split_names
from e2e_vl.data.coco import CocoInstances, encoded_objects, open_instances
from e2e_vl.data.config import Flickr30KDatasetConfig
from e2e_vl.data.tables import SerializedDict, SkippedRecords
from e2e_vl.io import Record, read_text
from e2e_vl.samples import AnnotatedObjects, EntityPhrases, PhraseBoxes, SampleImage, SampleText

logger = logging.getLogger(__name__)

_PHRASE = re.compile(r"\[/EN#(\d+)((?:/[^\s/\[\]]+)+) ([^ \[\]][^\[\]]*?) ?\]")


class EntityPhrase(Record, array_like=True):
    """One phrase of a sentence."""

    span: tuple[int, int]  # first character, and last character + 1, in the text
    chain: str  # "0" for non-visual phrases
    types: tuple[str, ...]  # such as ("people",) or ("instruments", "other")


class EntitySentence(Record, array_like=True):
    """One caption."""

    words: str  # the text, with single spaces and without brackets
    phrases: tuple[EntityPhrase, ...]


class AnnotatedImage(Record, array_like=True):
    """The boxes of one image, in the order of the file."""

    size: tuple[int, int]  # (height, width)
    boxes: list[tuple[int, int, int, int]]  # as in the file
    names: list[tuple[str, ...]]  # chains of each box

    def boxes_of(self, chain: str) -> np.ndarray:
        """Return the boxes of a chain, float64 [boxes, 4]; empty for scenes and phrases that are not in the image."""
        boxes = [box for box, names in zip(self.boxes, self.names, strict=True) if chain in names]
        return np.array(boxes, dtype=np.float64).reshape(-1, 4)


def parse_sentence(line: str, where: str) -> EntitySentence:
    """Parse a caption with bracketed phrases; `where` names it in error messages."""
    line = " ".join(line.split())
    words = ""
    phrases: list[EntityPhrase] = []
    last_end = 0
    for match in _PHRASE.finditer(line):
        words += line[last_end : match.start()]
        chain, types, phrase_words = match.groups()
        span = (len(words), len(words) + len(phrase_words))
        phrases.append(EntityPhrase(span, chain, tuple(types[1:].split("/"))))
        words += phrase_words
        last_end = match.end()
    words += line[last_end:]
    if "[/EN#" in words:
        raise UserError(f"{where}: {line!r} has a bracket that is not a phrase such as [/EN#283585/people A man]")
    return EntitySentence(words, tuple(phrases))


def read_sentences(path: str | Path) -> list[EntitySentence]:
    """Read the captions of one image, one per line; blank lines are skipped."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [parse_sentence(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def read_annotation(path: str | Path) -> AnnotatedImage:
    """Read the size and the boxes of one image; objects without a box (scenes, non-visual phrases) are skipped."""
    boxes: list[tuple[int, ...]] = []
    names: list[tuple[str, ...]] = []
    try:
        root = ElementTree.parse(path).getroot()
        size = (int(root.findtext("size/height", "")), int(root.findtext("size/width", "")))
        for element in root.iter("object"):
            box = element.find("bndbox")
            if box is None:
                continue
            boxes.append(tuple(int(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax")))
            names.append(tuple((name.text or "").strip() for name in element.findall("name")))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path}: missing, or not of Flickr30K Entities ({error}); download it again") from error
    return AnnotatedImage(size, boxes, names)


def read_image_ids(path: str | Path) -> list[str]:
    """Read a list of image ids; repeats are skipped, and their number is logged."""
    ids = read_text(path).split()
    if not ids or not all(image_id.isdecimal() for image_id in ids):
        raise UserError(f"{path} is not a list of image ids such as 1000092795, one per line")
    skipped = SkippedRecords(path)
    repeats = Counter(ids) - Counter(set(ids))
    for image_id in repeats.elements():
        skipped.add("repeats of image ids", image_id)
    skipped.log()
    return list(dict.fromkeys(ids))


class Caption(TextRecord, array_like=True):
    """A caption with at least one phrase that has a box."""

    image_id: str
    line: int  # of the file, from 0
    sentence: EntitySentence

    @property
    def id(self) -> str:
        return f"{self.image_id}#{self.line}"

    @property
    def words(self) -> str:
        return self.sentence.words


class Flickr30KDataset(RecordDataset):
    """Captions of one split, or of several joined by "+", image by image."""

    file_keys = ("images", "ids", "sentences", "annotations", "instances", "detections", "features")
    annotation_files = ("instances", "annotations")
    id_namespace = "flickr"
    has_phrases = True
    is_pool = True

    def __init__(self, files: DataFiles, options: Flickr30KDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.split_values = [{"split": name} for name in split_names(split)]
        self.folder = files.path("images")
        self.annotations_folder = files.path("annotations")
        self._captions = functools.cache(lambda name: list(_captions(files, name)))  # read once, or never
        splits: list[JoinedSplit] = []
        for values in self.split_values:
            boxes = self.files_by_image_id(files, needs, values)
            splits.append(JoinedSplit(values["split"], boxes, self.folder))
        sources = [files.path("ids", split=joined.name) for joined in splits]
        sources += [files.path("sentences"), self.annotations_folder]
        self.annotated = SerializedDict.tabulate(
            sources,
            files.index_folder,
            lambda: self._read_annotations([joined.name for joined in splits]),
            AnnotatedImage,
            str(self.annotations_folder),
        )
        where = f"the splits {split}: captioned image"
        self.tabulate_texts(sources, files.index_folder, self._boxed_captions, Caption, where, splits)
        del self._captions
        if self.left_out:
            logger.warning("%s: skipped %d captions without a phrase that has a box.", split, self.left_out)
        self.instances: list[CocoInstances] = []  # of each split
        # detection losses need classes, which the annotated boxes lack
        if needs.objects or (needs.annotations and "instances" in files):
            self.instances = open_instances(files, self.split_values, self.image_keys())
            self.class_names = self.instances[0].class_names

    def _read_annotations(self, splits: Sequence[str]) -> Iterator[tuple[str, AnnotatedImage]]:
        """Yield the id and the boxes of each image that has captions."""
        skipped = SkippedRecords(self.annotations_folder)
        captions = itertools.chain.from_iterable(map(self._captions, splits))
        for image_id in dict.fromkeys(caption.image_id for caption in captions):
            image = read_annotation(self.annotations_folder / f"{image_id}.xml")
            yield image_id, self._without_empty_boxes(image, image_id, skipped)
        skipped.log()

    def _boxed_captions(self, split: JoinedSplit) -> Iterator[Caption]:
        """Yield the captions of a split that have a phrase with a box, and count the others in `left_out`."""
        for image_id, captions in itertools.groupby(self._captions(split.name), lambda caption: caption.image_id):
            chains = set(itertools.chain.from_iterable(self.annotated[image_id].names))
            for caption in captions:
                if any(phrase.chain in chains for phrase in caption.sentence.phrases):
                    yield caption
                else:
                    self.left_out += 1

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: Flickr30KDatasetConfig, split: str) -> Iterable[str]:
        return (caption.words for caption in _captions(files, split))

    @override
    def truths(self) -> Iterable[PhraseBoxes]:
        return ()  # they depend on the image annotations

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        yield self.annotated.encoded
        yield from encoded_objects(self.instances, self.image_keys())

    @override
    def image(self, name: str, text: int) -> SampleImage:
        file = self.options.file(self.folder, name)
        annotated = self.annotated[name]
        if self.instances:
            return self.instances[self.split_index(text)].sample_image(name, file)
        boxes = self._shift(np.array(annotated.boxes, dtype=np.float64).reshape(-1, 4))
        objects = AnnotatedObjects(boxes, str(self.annotations_folder / f"{name}.xml"))
        return SampleImage(name, file, annotated.size, objects)

    @override
    def text(self, index: int) -> SampleText:
        caption = self.texts[index]
        annotated = self.annotated[caption.image_id]
        phrases = caption.sentence.phrases
        boxes_of_phrases = tuple(self._shift(annotated.boxes_of(phrase.chain)) for phrase in phrases)
        boxed = [row for row, boxes in enumerate(boxes_of_phrases) if len(boxes)]
        truth = EntityPhrases(
            tuple(phrases[row].span for row in boxed),
            tuple(boxes_of_phrases[row] for row in boxed),
            entities=tuple(phrases[row].chain for row in boxed),
            types=tuple(phrases[row].types for row in boxed),
        )
        all_phrases = PhraseBoxes(tuple(phrase.span for phrase in phrases), boxes_of_phrases, is_complete=True)
        ids = {"image_id": caption.image_id, "sentence": caption.line}
        return SampleText(index, caption.words, ids, truth, phrases=all_phrases)

    def _without_empty_boxes(self, image: AnnotatedImage, image_id: str, skipped: SkippedRecords) -> AnnotatedImage:
        """Skip and count boxes without an area. One outside its image is refused where the image is loaded."""
        boxes = np.array(image.boxes, dtype=np.float64).reshape(-1, 4)
        has_area = (boxes[:, :2] < boxes[:, 2:]).all(axis=1)
        for row in np.flatnonzero(~has_area).tolist():
            skipped.add("empty boxes", f"{list(image.boxes[row])} of {image_id}.xml")
        rows = np.flatnonzero(has_area).tolist()
        return AnnotatedImage(image.size, [image.boxes[row] for row in rows], [image.names[row] for row in rows])

    def _shift(self, boxes: np.ndarray) -> np.ndarray:
        """Return boxes in the configured coordinates; the files count pixels from 1."""
        return boxes - 1 if self.options.coordinates == "zero_based" else boxes


def _captions(files: DataFiles, split: str) -> Iterator[Caption]:
    """Yield all captions of one or several splits, image by image."""
    for name in split_names(split):
        for image_id in read_image_ids(files.path("ids", split=name)):
            sentences = read_sentences(files.path("sentences") / f"{image_id}.txt")
            for line, sentence in enumerate(sentences):
                yield Caption(image_id, line, sentence)
