"""Readers of the JSON files of the official LXMERT code: sentences for pre-training, questions and pairs of images.

    pre-training  list of {"img_id", "sentf": {source: [sentence, ...]}, "labelf": {source: [{answer: score}, ...]}}
    VQA, GQA      list of {"question_id", "img_id", "sent", "label": {answer: score}, ...}; test files have no `label`
    NLVR2         list of {"identifier", "img0", "img1", "sent", "label": 0 or 1, "uid"}; test files have no `label`

Sources are those of the file, such as "mscoco" and "vg" (captions, which have no labels), "vqa", "gqa" and "visual7w"
(questions of Visual Genome). Image ids are those of the TSV files of features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from msgspec import field

from detector.errors import UserError
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, RecordDataset, TextRecord, split_names
from e2e_vl.data.config import ImageSets, SentenceOptions
from e2e_vl.data.features import open_features
from e2e_vl.data.nlvr2 import LABELS
from e2e_vl.data.overlap import aliases_of_id
from e2e_vl.data.tables import stream_list
from e2e_vl.io import Id, Name, Record, Score
from e2e_vl.samples import CorrectChoice, SampleImage, ScoredAnswers

logger = logging.getLogger(__name__)


class _SentencesRow(Record):
    img_id: Name
    sentf: dict[str, list[str]]
    labelf: dict[str, list[dict[str, Score]] | None] = field(default_factory=dict)


class SourcedSentence(TextRecord, array_like=True):
    """One sentence about an image, for pre-training."""

    image_id: str
    source: str
    number: int  # among the sentences of its source about the image
    words: str
    label: dict[str, float] | None = None  # None: it is no question

    @property
    def id(self) -> str:
        """As the official code calls it."""
        return f"{self.image_id}_{self.source}_{self.number:03d}"

    @property
    def truth(self) -> ScoredAnswers | None:
        return None if self.label is None else ScoredAnswers(self.label)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"image_id": self.image_id, "uid": self.id, "source": self.source}


class ScoredQuestion(TextRecord):
    """A question and how good each answer is."""

    id: Id = field(name="question_id")  # a number in VQA's files, a text in GQA's
    image_id: Name = field(name="img_id")
    words: str = field(name="sent")
    label: dict[str, Score] | None = None  # None: the file has no labels; empty: no answer is good
    question_type: str | None = None
    answer_type: str | None = None

    @property
    def truth(self) -> ScoredAnswers | None:
        return None if self.label is None else ScoredAnswers(self.label)

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = {"question_id": self.id, "image_id": self.image_id}
        optional = {"question_type": self.question_type, "answer_type": self.answer_type, "answer_scores": self.label}
        return metadata | {key: one for key, one in optional.items() if one is not None}


class ListedPair(TextRecord):
    """A sentence about a pair of images."""

    id: Name = field(name="identifier")
    img0: Name
    img1: Name
    words: str = field(name="sent")
    label: Literal[0, 1] | None = None  # 1 = true; None: the file has no labels

    @property
    def image_names(self) -> tuple[str, ...]:
        return self.img0, self.img1

    @property
    def truth(self) -> CorrectChoice | None:
        return None if self.label is None else CorrectChoice(self.label)

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = {"identifier": self.id}
        return metadata if self.label is None else metadata | {"label": LABELS[self.label]}


class LXMERTDataset(RecordDataset):
    """Texts of one split, or of several joined by "+", grouped by image or by pair of images.

    Attributes:
        key: of `data.files`, the file of the texts.
        record: the class of a text.
        needs_labels: training needs the label of every text.
        folders: of the images of each split; empty: no image is read.
    """

    key: ClassVar[str]
    record: ClassVar[type]
    needs_labels: ClassVar[bool] = True
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(self, files: DataFiles, options: ImageSets, split: str, needs: DataNeeds) -> None:
        self.settings = options
        self.parts = [options.values(name) for name in split_names(split)]
        self.folders: list[Path] = []
        texts: list[Any] = []
        self._ends: list[int] = []
        for values in self.parts:
            own = self.read(files.path(self.key, **values), options)
            texts += _kept(own, options, files, values, needs)
            self._ends.append(len(texts))
            if needs.boxes is not BoxSource.PRECOMPUTED:
                self.folders.append(files.path("images", **values))
        self.set_texts(texts, f"the splits {split}: text", need_labels=needs.training and self.needs_labels)

    @classmethod
    def read(cls, path: Path, options: ImageSets) -> list[Any]:
        """The texts of a file, in its order."""
        return list(stream_list(path, cls.record))

    @classmethod
    def texts_of(cls, files: DataFiles, options: ImageSets, split: str) -> Iterable[str]:
        """All texts of a split."""
        return [text.words for text in cls._read_splits(files, options, split)]

    @classmethod
    def _read_splits(cls, files: DataFiles, options: ImageSets, split: str) -> Iterable[Any]:
        for name in split_names(split):
            yield from cls.read(files.path(cls.key, **options.values(name)), options)

    def image(self, name: str, text: int) -> SampleImage:
        part = next(number for number, end in enumerate(self._ends) if text < end)
        folder = self.folders[part] if self.folders else Path()
        return SampleImage(name, self.settings.file(folder, name), photo_aliases=aliases_of_id(name))


class ImageSentenceDataset(LXMERTDataset):
    """Sentences of several sources about images, for pre-training."""

    file_keys = ("images", "sentences", "detections", "features")
    key = "sentences"
    record = SourcedSentence
    needs_labels = False
    is_pool = True

    @classmethod
    def read(cls, path: Path, options: SentenceOptions) -> list[SourcedSentence]:
        """The sentences about each image, sources in the order of the file."""
        found = []
        for row in stream_list(path, _SentencesRow):
            for source, sentences in row.sentf.items():
                labels = row.labelf.get(source) or [None] * len(sentences)
                pairs = enumerate(zip(sentences, labels, strict=True))
                if options.sources is None or source in options.sources:
                    found += [SourcedSentence(row.img_id, source, number, *pair) for number, pair in pairs]
        return found


class ScoredQuestionDataset(LXMERTDataset):
    """Questions whose answers have scores: the files of VQA and GQA."""

    file_keys = ("images", "questions", "answers", "detections", "features")
    key = "questions"
    record = ScoredQuestion

    @classmethod
    def texts_of(cls, files: DataFiles, options: ImageSets, split: str) -> Iterable[str]:
        """All questions of a split and the best answer to each."""
        return [*super().texts_of(files, options, split), *cls.answers_of(files, options, split).values()]

    @classmethod
    def answers_of(cls, files: DataFiles, options: ImageSets, split: str) -> dict[Any, str]:
        """The best answer to each question that has one."""
        questions = cls._read_splits(files, options, split)
        return {one.id: max(one.label, key=one.label.get) for one in questions if one.label}


class ListedPairDataset(LXMERTDataset):
    """Sentences about pairs of images that are named one by one: the files of NLVR2."""

    file_keys = ("images", "examples", "detections", "features")
    key = "examples"
    record = ListedPair


def _kept(
    texts: list[Any], options: ImageSets, files: DataFiles, values: dict[str, str], needs: DataNeeds
) -> list[Any]:
    """The texts of a split that `leave_out_unseen` and `first_rows` leave."""
    split, rows = values["split"], options.first_rows.get(values["split"])
    store = None
    if needs.boxes in (BoxSource.PRECOMPUTED, BoxSource.DETECTIONS) and (rows is not None or options.leave_out_unseen):
        store = open_features(files.path(needs.boxes.needs[-1], **values))
    if rows is not None and (store is None or store.path.is_dir()):
        raise UserError(
            f"data.config.first_rows.{split} counts rows of one file of boxes; take boxes from such a file, not "
            f"'{needs.boxes}' or a folder, or leave first_rows out."
        )
    if store is None:
        return texts
    kept = texts
    if options.leave_out_unseen:
        kept = [text for text in texts if all(image in store for image in text.image_names)]
    if rows is not None:
        behind = set(store.ids[rows:])
        kept = [text for text in kept if behind.isdisjoint(text.image_names)]
    if len(kept) < len(texts):
        number = len(texts) - len(kept)
        logger.warning("%s: left out are %d of %d texts of %s.", store.path, number, len(texts), split)
    return kept
