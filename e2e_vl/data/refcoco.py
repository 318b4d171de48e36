"""RefCOCO, RefCOCO+ and RefCOCOg: expressions that refer to one annotated object of an image.

Files (`data.files`, relative to `data.root`)
    images        folder of the image files that the instances name
    instances     COCO instances with all annotations of the images
    refs          REFER file of the expressions
    phrases       optional: folder of the noun phrases of the expressions, <image id>.txt as in Flickr30K Entities
    phrase_boxes  with it: folder of their boxes, <image id>.xml, pixels counted from 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import MissingFileError, UserError, user_path
from detector.io import read_pickle
from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants, group_texts
from e2e_vl.data.coco import read_instances
from e2e_vl.data.flickr30k import (
    AnnotatedImage,
    EntitySentence,
    read_annotation,
    read_sentences,
)
from e2e_vl.data.storage.files import checked_records, read_json
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import ChosenRecords, RecordTable
from e2e_vl.io import inside
from e2e_vl.records import Id, Record, Words, checked
from e2e_vl.samples import PhraseBoxes, ReferredBox, Sample, SampleText

# Reader of REFER files: `refs(unc).p` and its like, of RefCOCO, RefCOCO+ and RefCOCOg.


class _Ref(Record):
    ref_id: Id
    ann_id: Id
    image_id: Id
    split: str
    sentences: list[Any]
    family: str | None = None


class _Sentence(Record):
    sent_id: Id
    sent: Words
    family: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """One sentence about one annotated object."""

    ref_id: int
    sent_id: int
    ann_id: int
    image_id: int
    split: str
    sentence: str
    family: str | None = None  # kind of expression, in our synthetic files only


class ReferFiles:
    """A refs file joined with its instances file, every reference between the two checked.

    Args:
        refs_file: `refs(...).p` or the same content as `.json`.
        instances_file: holds all annotations of the images. Those with empty boxes are left out and counted in the log,
            unless a ref is about one.
        errors: what becomes of an error about one record.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a pickle that tries to run code, a missing key, a duplicate ref or sentence id, a ref without
            sentences, or a ref whose annotation or image is not in the instances file, or has an empty box.
    """

    def __init__(self, refs_file: str | Path, instances_file: str | Path, errors: RecordErrors = RAISE) -> None:
        self.path = user_path(refs_file)
        self.instances = read_instances(instances_file, drop_empty_boxes=True, errors=errors)
        self.expressions = RecordTable(Expression, self._read(errors))  # in file order

    def _read(self, errors: RecordErrors) -> Iterator[Expression]:
        sent_ids: set[int] = set()
        refs, what = read_refs(self.path), f"{self.path}: ref"
        for where, ref in checked_records(_Ref, refs, what, "ref_id", unique="ref ids", errors=errors):
            sentences: list[Any] = []
            with errors:
                self._check_target(ref, where)
                if not ref.sentences:
                    raise UserError(f"{where} has no sentences; every ref needs at least one")
                sentences = ref.sentences
            for sentence in sentences:
                expression = None
                with errors:
                    expression = self._expression(ref, sentence, where, sent_ids)
                if expression is not None:
                    yield expression

    @staticmethod
    def _expression(ref: _Ref, value: Any, where: str, sent_ids: set[int]) -> Expression:
        sentence = checked(_Sentence, value, f"{where}: a sentence")
        if sentence.sent_id in sent_ids:
            raise UserError(f"{where}: sentence {sentence.sent_id} occurs twice; sentence ids must be unique")
        sent_ids.add(sentence.sent_id)
        family = ref.family if sentence.family is None else sentence.family
        ids = ref.ref_id, sentence.sent_id, ref.ann_id, ref.image_id
        return Expression(*ids, ref.split, sentence.sent, family)

    def _check_target(self, ref: _Ref, where: str) -> None:
        annotation = self.instances.annotations.get(ref.ann_id)
        if ref.image_id not in self.instances.images:
            raise UserError(f"{where} is about image {ref.image_id}, which is not in {self.instances.path}")
        if ref.ann_id in self.instances.dropped:
            raise UserError(f"{self.instances.dropped[ref.ann_id]} ({where} refers to it)")
        if annotation is None:
            raise UserError(
                f"{where} refers to annotation {ref.ann_id}, which is not in {self.instances.path}; "
                "use the instances.json that belongs to this refs file"
            )
        if annotation.image_id != ref.image_id:
            raise UserError(
                f"{where} is about image {ref.image_id}, but its annotation {ref.ann_id} belongs to image "
                f"{annotation.image_id} in {self.instances.path}"
            )

    def in_split(self, split: str) -> ChosenRecords[Expression]:
        """Expressions of a split, in file order; `split_contains` gives the rule for names.

        Raises:
            ValueError: no expression is in the split; the splits of the file are listed.
        """
        names = self.expressions.column("split")
        found = [row for row, name in enumerate(names) if split_contains(split, name)]
        if not found:
            splits = ", ".join(sorted(set(names)))
            raise UserError(f"{self.path}: no split {split!r}; the file has {splits or 'no refs'}")
        return ChosenRecords(self.expressions, found)


def split_contains(asked: str, name: str) -> bool:
    """Whether a ref of split `name` belongs to the split that was asked for, by the rules of the REFER API.

    testA, testB and testC mean every split with that letter ("testAB" is in both), "test" every split whose name
    contains "test"; other names mean themselves.
    """
    if asked in ("testA", "testB", "testC"):
        return asked[-1] in name
    if asked == "test":
        return "test" in name
    return asked == name


def read_refs(path: str | Path) -> list[Any]:
    """Read the list in a refs file (`.p`, `.pkl`, `.pickle` or `.json`) without running anything that is in it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the pickle tries to run code, the file is broken or does not hold a list.
    """
    path = user_path(path)
    content = read_json(path, "refs") if path.suffix == ".json" else _read_refer_pickle(path)
    if not isinstance(content, list):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a list of refs")
    return content


def _read_refer_pickle(path: Path) -> Any:
    try:
        return read_pickle(path, encoding="utf-8")
    except UserError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        return read_pickle(path)  # strings of Python 2 in an older encoding


class RefCOCODataset(VLDataset):
    """Expressions of one split, grouped by image.

    Args:
        images_root: folder of the image files named in the instances file.
        refer: all expressions, with all annotations of the images.
        split: name of a split, by the rules of `refer.split_contains`.
        phrases: of all expressions; None: each expression is one phrase.

    Attributes:
        expressions: the texts, in file order; their indices are text indices.

    Raises:
        ValueError: a split without expressions.
    """

    known_files = ("images", "instances", "refs", "phrases", "phrase_boxes", "detections", "features")
    has_phrases = True

    def __init__(
        self,
        images_root: str | Path,
        refer: ReferFiles,
        split: str,
        phrases: NounPhrases | None = None,
    ) -> None:
        self.images_root = user_path(images_root)
        self.refer = refer
        self.instances = refer.instances
        self.expressions = self.refer.in_split(split)
        self.groups = group_texts(expression.image_id for expression in self.expressions)
        self.phrases = phrases
        self.parts = [{"split": split}]
        self.class_names = self.instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> RefCOCODataset:
        """The top of this file says which files there are."""
        phrases = None
        if "phrases" in files and wants.phrases:
            phrases = NounPhrases(files.path("phrases"), files.path("phrase_boxes"))
        return cls(files.path("images"), _refer(files), split, phrases)

    @classmethod
    def reads(cls, options: NoOptions, split: str, wants: Wants) -> tuple[str, ...]:
        keys = ("instances", *super().reads(options, split, wants))
        return keys if wants.phrases else tuple(key for key in keys if not key.startswith("phrase"))

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        """All expressions of a split."""
        return [expression.sentence for expression in _refer(files).in_split(split)]

    def __len__(self) -> int:
        """Number of expressions."""
        return len(self.expressions)

    def image_ids(self) -> Iterable[str]:
        return (str(self.expressions[texts[0]].image_id) for texts in self.groups)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some expressions about one image."""
        image_id = self.expressions[texts[0]].image_id
        # the `file_name` of a ref is not a file
        name, where = self.instances.images[image_id].file_name, f"{self.instances.path}: image {image_id}"
        image = self.instances.sample_image(image_id, inside(self.images_root, name, where, follows_links=True))
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        expression = self.expressions[index]
        annotation = self.instances.annotations[expression.ann_id]
        facts = {
            "ref_id": expression.ref_id,
            "sent_id": expression.sent_id,
            "image_id": expression.image_id,
            "ann_id": expression.ann_id,
            "sent": expression.sentence,
            "category": self.instances.class_names[annotation.class_index],
            "gt_box": list(annotation.box),
        }
        if expression.family is not None:
            facts["family"] = expression.family
        if self.phrases is None:
            phrases = PhraseBoxes(((0, len(expression.sentence)),), (np.array([annotation.box]),))
        else:
            phrases = self.phrases.of(expression.image_id, expression.sentence)
        return SampleText(index, expression.sentence, facts, ReferredBox(annotation.box), phrases=phrases)


def _refer(files: DataFiles) -> ReferFiles:
    """All splits are in the same two files."""
    return files.read(ReferFiles, files.path("refs"), files.path("instances"))


class NounPhrases:
    """The noun phrases of expressions, from files as in Flickr30K Entities, read image by image when needed.

    The image that was asked for last is kept, because the expressions of an image are asked for one after the other.
    """

    def __init__(self, sentences: Path, annotations: Path) -> None:
        self.sentences, self.annotations = sentences, annotations
        for folder in (sentences, annotations):
            if not folder.is_dir():
                raise MissingFileError(f"{folder}: no such folder; data.files.phrases and phrase_boxes name two.")
        self._last: tuple[int | None, dict[str, EntitySentence], AnnotatedImage | None] = None, {}, None

    def of(self, image_id: int, words: str) -> PhraseBoxes:
        """All phrases of an expression about an image.

        Raises:
            FileNotFoundError, ValueError: a file of the image is missing or malformed, or lacks the expression.
        """
        file = inside(self.sentences, f"{image_id}.txt", follows_links=True)
        if self._last[0] != image_id:
            known = {one.words: one for one in reversed(read_sentences(file))}
            self._last = image_id, known, read_annotation(self.annotations / f"{file.stem}.xml")
        _, known, annotated = self._last
        if words not in known:
            raise UserError(f"{file}: no line has the expression '{words}'; give the phrases of the same expressions.")
        phrases = known[words].phrases
        # pixels are counted from 1 and the last one is included
        boxes = [annotated.boxes_of(phrase.chain) - (1, 1, 0, 0) for phrase in phrases]
        return PhraseBoxes(tuple(phrase.span for phrase in phrases), tuple(boxes), is_complete=True)
