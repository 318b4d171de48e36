"""Readers for the JSON files of the official LXMERT code: sentences for pre-training, questions and image pairs.

    pre-training  list of {"img_id", "sentf": {source: [sentence, ...]}, "labelf": {source: [{answer: score}, ...]}}
    VQA, GQA      list of {"question_id", "img_id", "sent", "label": {answer: score}, ...}; test files have no `label`
    NLVR2         list of {"identifier", "img0", "img1", "sent", "label": 0 or 1, "uid"}; test files have no `label`

Sources are named as in the file, such as "mscoco" and "vg" (captions, without labels), "vqa", "gqa" and "visual7w"
(questions of Visual Genome). Image ids are those in the TSV files of features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from msgspec import field
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.config import BoxSource
from e2e_vl.data.base import DataFiles, DataNeeds, JoinedSplit, RecordDataset, TextRecord, split_names
from e2e_vl.data.config import ImageSentenceDatasetConfig, ImageSetsConfig
from e2e_vl.data.features import open_features
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
    number: int  # index among the sentences of the same source about the image
    words: str
    label: dict[str, float] | None = None  # None: not a question

    @property
    def id(self) -> str:
        return f"{self.image_id}_{self.source}_{self.number:03d}"

    @property
    @override
    def truth(self) -> ScoredAnswers | None:
        return None if self.label is None else ScoredAnswers(self.label)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"image_id": self.image_id, "uid": self.id, "source": self.source}


class ScoredQuestion(TextRecord):
    """A question with a score for each answer."""

    id: Id = field(name="question_id")  # an integer in VQA's files, a string in GQA's
    image_id: Name = field(name="img_id")
    words: str = field(name="sent")
    label: dict[str, Score] | None = None  # None: the file has no labels; empty: no answer has a score
    question_type: str | None = None
    answer_type: str | None = None

    @property
    @override
    def truth(self) -> ScoredAnswers | None:
        return None if self.label is None else ScoredAnswers(self.label)

    @property
    def metadata(self) -> dict[str, Any]:
        ids = {"question_id": self.id, "image_id": self.image_id}
        types = {"question_type": self.question_type, "answer_type": self.answer_type}
        return ids | {key: value for key, value in types.items() if value is not None}


class ListedPair(TextRecord):
    """A sentence about a pair of images."""

    id: Name = field(name="identifier")
    img0: Name
    img1: Name
    words: str = field(name="sent")
    label: Literal[0, 1] | None = None  # 1 = true; None: the file has no labels

    @property
    @override
    def image_names(self) -> tuple[str, ...]:
        return self.img0, self.img1

    @property
    @override
    def truth(self) -> CorrectChoice | None:
        return None if self.label is None else CorrectChoice(self.label)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"identifier": self.id}


class LXMERTDataset(RecordDataset):
    """Texts of one split, or of several joined by "+", grouped by image or by image pair."""

    key: ClassVar[str]  # of the text file in `data.files`
    record: ClassVar[type]  # of a text
    needs_labels: ClassVar[bool] = True  # of every text, in training
    box_sources = (BoxSource.ONLINE, BoxSource.DETECTIONS, BoxSource.PRECOMPUTED)

    def __init__(self, files: DataFiles, options: ImageSetsConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.split_values = [options.values(name) for name in split_names(split)]
        self.folders: list[Path] = []  # image folder of each split; empty if no images are read
        sources: list[Path] = []
        splits: list[JoinedSplit] = []
        for values in self.split_values:
            sources.append(files.path(self.key, **values))
            box_file = _selecting_file(options, files, values, needs)
            if box_file is not None:
                sources.append(box_file)
            image_names = None  # only the features say where images come from
            if needs.boxes is not BoxSource.PRECOMPUTED:
                self.folders.append(files.path("images", **values))
                image_names = options.file(self.folders[-1], "ID")
            boxes = self.files_by_image_id(files, needs, values)
            splits.append(JoinedSplit(values["split"], boxes, image_names))

        def texts(joined: JoinedSplit) -> Iterator[Any]:
            values = options.values(joined.name)
            split_texts = self.read(files.path(self.key, **values), options)
            return _select_texts(split_texts, options, values["split"], _selecting_file(options, files, values, needs))

        need_labels = needs.training and self.needs_labels
        where = f"the splits {split}: text"
        options_of_texts = [options.skip_missing_images, options.first_rows, getattr(options, "sources", None)]
        self.tabulate_texts(
            sources, files.index_folder, texts, self.record, where, splits, options_of_texts, need_labels=need_labels
        )

    @classmethod
    def read(cls, path: Path, options: ImageSetsConfig) -> Iterator[Any]:
        return stream_list(path, cls.record)

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: ImageSetsConfig, split: str) -> Iterable[str]:
        return [text.words for text in cls._read_splits(files, options, split)]

    @classmethod
    def _read_splits(cls, files: DataFiles, options: ImageSetsConfig, split: str) -> Iterable[Any]:
        for name in split_names(split):
            yield from cls.read(files.path(cls.key, **options.values(name)), options)

    @override
    def image(self, name: str, text: int) -> SampleImage:
        folder = self.folders[self.split_index(text)] if self.folders else Path()
        return SampleImage(name, self.options.file(folder, name), image_aliases=aliases_of_id(name))


class ImageSentenceDataset(LXMERTDataset):
    """Sentences about images from several sources, for pre-training."""

    file_keys = ("images", "sentences", "detections", "features")
    key = "sentences"
    record = SourcedSentence
    needs_labels = False
    is_pool = True

    @classmethod
    @override
    def read(cls, path: Path, options: ImageSentenceDatasetConfig) -> Iterator[SourcedSentence]:
        """Read the sentences about each image, with sources in file order."""
        for row in stream_list(path, _SentencesRow):
            for source, sentences in row.sentf.items():
                labels = row.labelf.get(source) or [None] * len(sentences)
                if len(labels) != len(sentences):
                    raise UserError(
                        f"{path}: {row.img_id} has {len(sentences)} sentences of {source}, but {len(labels)} labels; "
                        "download the file again."
                    )
                if options.sources is not None and source not in options.sources:
                    continue
                for number, (sentence, label) in enumerate(zip(sentences, labels, strict=True)):
                    yield SourcedSentence(row.img_id, source, number, sentence, label)


class ScoredQuestionDataset(LXMERTDataset):
    """Questions with scored answers: LXMERT's files for VQA and GQA."""

    file_keys = ("images", "questions", "answers", "detections", "features")
    key = "questions"
    record = ScoredQuestion

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: ImageSetsConfig, split: str) -> Iterable[str]:
        return [*super().texts_of(files, options, split), *cls.answers_of(files, options, split).values()]

    @classmethod
    @override
    def answers_of(cls, files: DataFiles, options: ImageSetsConfig, split: str) -> dict[Any, str]:
        questions = cls._read_splits(files, options, split)
        return {question.id: max(question.label, key=question.label.get) for question in questions if question.label}


class ListedPairDataset(LXMERTDataset):
    """Sentences about image pairs: LXMERT's files for NLVR2."""

    file_keys = ("images", "examples", "detections", "features")
    key = "examples"
    record = ListedPair


def _selecting_file(
    options: ImageSetsConfig, files: DataFiles, values: dict[str, str], needs: DataNeeds
) -> Path | None:
    """Return the box file of a split by whose images `skip_missing_images` and `first_rows` select texts, if any."""
    split = values["split"]
    counts_rows = split in options.first_rows
    path = None
    reads_boxes = needs.boxes in (BoxSource.PRECOMPUTED, BoxSource.DETECTIONS)
    if reads_boxes and (counts_rows or options.skip_missing_images):
        path = files.path(needs.boxes.needs[-1], **values)
    if counts_rows and (path is None or path.is_dir()):
        raise UserError(
            f"data.config.first_rows.{split} counts the rows of a box file; use boxes from a single file, not "
            f"'{needs.boxes}' or a folder, or remove first_rows."
        )
    return path


def _select_texts(texts: Iterable[Any], options: ImageSetsConfig, split: str, box_file: Path | None) -> Iterator[Any]:
    """Yield the texts of a split that `skip_missing_images` and `first_rows` select, and log the number of others."""
    if box_file is None:
        yield from texts
        return
    store = open_features(box_file)
    num_rows = options.first_rows.get(split)
    later_images: set[str] = set()
    if num_rows is not None:
        later_images.update(store.ids[num_rows:])
    num_texts = 0
    num_selected = 0
    for text in texts:
        num_texts += 1
        is_missing = options.skip_missing_images and not all(image in store for image in text.image_names)
        if not is_missing and later_images.isdisjoint(text.image_names):
            num_selected += 1
            yield text
    num_skipped = num_texts - num_selected
    if num_skipped:
        logger.warning("%s: skipped %d of %d texts of %s.", store.path, num_skipped, num_texts, split)
