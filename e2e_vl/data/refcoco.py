"""RefCOCO, RefCOCO+ and RefCOCOg: expressions that refer to one annotated object of an image; gRefCOCO: to any number.

Files (`data.files`, relative to `data.root`)
    images        folder of the image files listed in the instances file
    instances     COCO instances with all annotated objects of the images
    refs          REFER's file of expressions, such as `refs(unc).p`, or the same contents as `.json`, or gRefCOCO's
                  `grefs(unc).json`
    phrases       (optional) folder of the expressions' noun phrases, <image id>.txt as in Flickr30K Entities
    phrase_boxes  (with phrases) folder of their boxes, <image id>.xml, pixels counted from 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from typing_extensions import override

from detector.errors import UserError, user_path
from detector.io import convert, read_json, read_pickle
from e2e_vl.data.base import DataFiles, DataNeeds, RecordDataset, TextRecord
from e2e_vl.data.coco import CocoInstances, CocoObject
from e2e_vl.data.coco_masks import CocoMasks
from e2e_vl.data.config import NoDatasetConfig
from e2e_vl.data.flickr30k import AnnotatedImage, EntitySentence, read_annotation, read_sentences
from e2e_vl.data.tables import SkippedRecords, drop_repeats
from e2e_vl.io import FourNumbers, Id, Record
from e2e_vl.samples import PhraseBoxes, ReferredBoxes, SampleImage, SampleText


class Sentence(Record):
    """One sentence of a ref."""

    sent_id: Id
    sent: str
    family: str | None = None


class Ref(Record):
    """One annotated object and the sentences about it; in gRefCOCO a list of objects, [-1] for none.

    gRefCOCO's file has refs without sentences.
    """

    ref_id: Id
    ann_id: Id | list[Id]
    image_id: Id
    split: str
    sentences: list[Sentence] | None
    family: str | None = None

    @property
    def ann_ids(self) -> list[Id]:
        """The annotations that it refers to."""
        ids = self.ann_id if isinstance(self.ann_id, list) else [self.ann_id]
        if ids == [-1]:  # it refers to nothing
            return []
        return ids

    @property
    def expressions(self) -> list[Sentence]:
        """The sentences that are not blank."""
        return [sentence for sentence in self.sentences or () if sentence.sent.strip()]


class Expression(TextRecord, array_like=True):
    """One sentence about the annotated objects that it refers to."""

    ref_id: Id
    sent_id: Id
    ann_ids: tuple[Id, ...]
    image_id: Id
    split: str
    words: str
    category: str | None  # of the annotated object, where it is one
    boxes: tuple[FourNumbers, ...]  # xyxy, pixels of the original image
    family: str | None = None  # kind of expression, in synthetic data only

    @property
    def id(self) -> Id:
        return self.sent_id

    @property
    @override
    def truth(self) -> ReferredBoxes:
        return ReferredBoxes(self.boxes, self.ann_ids, self.category)

    @property
    def metadata(self) -> dict[str, Any]:
        """The ids, and the kind of expression."""
        metadata = {"ref_id": self.ref_id, "sent_id": self.sent_id, "image_id": self.image_id}
        if self.family is not None:
            metadata["family"] = self.family
        return metadata


def read_refs(path: str | Path) -> list[Ref]:
    """Read the list in a refs file (`.p` or `.json`)."""
    path = user_path(path)
    if path.suffix.lower() == ".json":
        return read_json(path, list[Ref])
    try:
        content = read_pickle(path, encoding="utf-8")
    except UserError:  # byte strings of Python 2 in an older encoding
        content = read_pickle(path, encoding="latin1")
    try:
        return convert(content, list[Ref])
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}; correct the file or download it again") from error


def read_expressions(path: str | Path, instances: CocoInstances) -> list[Expression]:
    """Read all expressions of a refs file in file order, with the annotations they refer to.

    Refs without a sentence, blank sentences, refs to annotations with empty boxes and exact repeats are skipped, and
    their numbers are logged.
    """
    # 12 and "12" are the same id, as in `CocoInstances`
    targets: dict[str, tuple[str, CocoObject]] = {}  # annotation id -> image id and annotation
    for image in instances.images:
        for annotation in image.objects:
            targets[str(annotation.id)] = (str(image.id), annotation)
    expressions: list[Expression] = []
    skipped = SkippedRecords(path)
    for ref in read_refs(path):
        if not ref.sentences:
            skipped.add("refs without a sentence", ref.ref_id)
            continue
        if not instances.empty_boxes.isdisjoint(map(str, ref.ann_ids)):
            skipped.add("refs to annotations with empty boxes", ref.ref_id)
            continue
        for sentence in ref.sentences:
            if not sentence.sent.strip():
                skipped.add("blank sentences", sentence.sent_id)
        if ref.image_id not in instances:
            raise UserError(
                f"{path}: ref {ref.ref_id} is about image {ref.image_id}, which {instances.path} does not list; use "
                "the instances.json of this refs file"
            )
        for ann_id in ref.ann_ids:
            if targets.get(str(ann_id), (None,))[0] != str(ref.image_id):
                raise UserError(
                    f"{path}: ref {ref.ref_id} refers to annotation {ann_id} of image {ref.image_id}, but in "
                    f"{instances.path} it is missing or belongs to another image; use the "
                    "instances.json of this refs file"
                )
        objects = [targets[str(ann_id)][1] for ann_id in ref.ann_ids]
        image_id = instances[ref.image_id].id
        category = instances.class_names[objects[0].class_index] if len(objects) == 1 else None
        for sentence in ref.expressions:
            expression = Expression(
                ref.ref_id,
                sentence.sent_id,
                ann_ids=tuple(annotation.id for annotation in objects),
                image_id=image_id,
                split=ref.split,
                words=sentence.sent,
                category=category,
                boxes=tuple(annotation.box for annotation in objects),
                family=sentence.family or ref.family,
            )
            expressions.append(expression)
    distinct = list(drop_repeats(expressions, skipped, "sentences"))
    skipped.log()
    return distinct


def split_contains(split: str, name: str) -> bool:
    """Return whether a ref of the split `name` belongs to a split, as in the REFER API.

    testA, testB and testC contain every split with that letter in its name ("testAB" is in testA and testB), "test"
    every split with "test" in its name; other names must be equal.
    """
    if split in ("testA", "testB", "testC"):
        return split[-1] in name
    if split == "test":
        return "test" in name
    return split == name


class RefCOCODataset(RecordDataset):
    """Expressions of one split (see `split_contains`), grouped by image.

    `phrases`: the noun phrases of all expressions; None: each expression is one phrase.
    """

    file_keys = ("images", "instances", "refs", "phrases", "phrase_boxes", "detections", "features")
    has_phrases = True

    def __init__(self, files: DataFiles, options: NoDatasetConfig, split: str, needs: DataNeeds) -> None:
        self.folder = files.path("images")
        self.instances = CocoInstances(files.path("instances"), files.index_folder)
        self.masks = CocoMasks(files.path("instances"), files.index_folder) if needs.masks else None
        path = files.path("refs")
        all_expressions = read_expressions(path, self.instances)
        expressions = [expression for expression in all_expressions if split_contains(split, expression.split)]
        if not expressions:
            splits = ", ".join(sorted({expression.split for expression in all_expressions}))
            contents = f"the file has {splits}" if splits else "all its refs are skipped, see the log"
            raise UserError(f"{path}: no split {split!r}; {contents}")
        if self.masks is not None:
            for expression in expressions:
                self.masks.require(expression.ann_ids)
        self.set_texts(expressions, f"{path}: sentence")
        self.phrases = None
        if "phrases" in files and needs.phrases:
            self.phrases = NounPhrases(files.path("phrases"), files.path("phrase_boxes"))
        self.split_values = [{"split": split}]
        self.class_names = self.instances.class_names

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: NoDatasetConfig, split: str) -> Iterable[str]:
        """Yield all expressions of a split."""
        for ref in read_refs(files.path("refs")):
            if split_contains(split, ref.split):
                for sentence in ref.expressions:
                    yield sentence.sent

    @classmethod
    @override
    def reads_masks(cls, options: NoDatasetConfig) -> bool:
        return True

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        yield from map(self.instances.encoded, self.image_ids())
        if self.masks is not None:
            for expression in self.texts:
                yield from map(self.masks.encoded, expression.ann_ids)

    @override
    def image(self, name: str, text: int) -> SampleImage:
        return self.instances.sample_image(name, self.folder / self.instances[name].file_name)

    @override
    def text(self, index: int) -> SampleText:
        expression = self.texts[index]
        if self.phrases is None:
            boxes = np.array(expression.boxes).reshape(-1, 4)
            phrases = PhraseBoxes(((0, len(expression.words)),), (boxes,))
        else:
            phrases = self.phrases.of(expression.image_id, expression.words)
        text = dataclasses.replace(super().text(index), phrases=phrases)
        if self.masks is None:
            return text
        masks = tuple(self.masks.of(expression.ann_ids))
        return dataclasses.replace(text, truth=dataclasses.replace(expression.truth, masks=masks))


class NounPhrases:
    """The noun phrases of expressions, read on demand from files in the format of Flickr30K Entities.

    The last image is cached, because the expressions of an image are read one after the other.
    """

    def __init__(self, sentences: Path, annotations: Path) -> None:
        self.sentences = sentences
        self.annotations = annotations
        self._image_id: Id | None = None  # of the cached image
        self._sentences: dict[str, EntitySentence] = {}  # of that image, by their words
        self._annotated: AnnotatedImage | None = None

    def of(self, image_id: Id, words: str) -> PhraseBoxes:
        """Return all phrases of an expression about an image."""
        file = self.sentences / f"{image_id}.txt"
        if self._image_id != image_id:
            sentences = read_sentences(file)
            self._annotated = read_annotation(self.annotations / f"{file.stem}.xml")
            # the first one of equal sentences counts
            self._sentences = {sentence.words: sentence for sentence in reversed(sentences)}
            self._image_id = image_id
        if words not in self._sentences:
            raise UserError(f"{file}: no line has the expression '{words}'; use the phrases of the same expressions.")
        phrases = self._sentences[words].phrases
        # pixels are counted from 1, and the last one is inclusive
        boxes = [self._annotated.boxes_of(phrase.chain) - (1, 1, 0, 0) for phrase in phrases]
        return PhraseBoxes(tuple(phrase.span for phrase in phrases), tuple(boxes), is_complete=True)
