"""VQA v2: questions about images, with human answers.

Files (`data.files`, relative to `data.root`; {split} is the split and {images} its COCO image set, such as test2015 for
test-dev2015)
    questions    v2_OpenEnded_mscoco_{split}_questions.json
    annotations  v2_mscoco_{split}_annotations.json; optional for splits with "test" in their name
    images       folder of the images
    answers      answer vocabulary
    instances    COCO instances of the same images: boxes "gt" and detection losses
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from typing_extensions import override

from detector.errors import UserError
from detector.io import decode_json, map_file
from detector.logs import OnceFilter
from e2e_vl.data.base import (
    DataFiles,
    DataNeeds,
    JoinedSplit,
    RecordDataset,
    TextRecord,
    coco_image_set,
    split_names,
)
from e2e_vl.data.coco import CocoInstances, encoded_objects, open_instances
from e2e_vl.data.config import VQADatasetConfig
from e2e_vl.data.tables import SkippedRecords, drop_repeats, stream_list
from e2e_vl.io import Id, Record, Words
from e2e_vl.samples import HumanAnswers, SampleImage

logger = logging.getLogger(__name__)
logger.addFilter(OnceFilter())  # a split is opened for each of its box sources

NUM_ANSWERS = 10  # human answers to a question, which the official accuracy expects


class _Question(Record):
    question_id: Id
    image_id: Id
    question: Words


class _Header(Record):
    """What a file has beside its questions."""

    data_subtype: str | None = None


class _Answer(Record):
    answer: str


class _Annotation(Record):
    question_id: Id
    image_id: Id
    answers: Annotated[list[_Answer | str], Meta(min_length=1)]  # ST-VQA and TextVQA list strings
    multiple_choice_answer: str | None = None  # OK-VQA's files lack it
    answer_type: str | None = None
    question_type: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The answers, as written."""
        texts: list[str] = []
        for answer in self.answers:
            texts.append(answer if isinstance(answer, str) else answer.answer)
        return tuple(texts)


class VQAQuestion(TextRecord, array_like=True):
    """One question, with human answers if the split is annotated."""

    id: Id
    image_id: Id
    image_set: str  # COCO's image set, such as "train2014"
    words: str
    answers: tuple[str, ...] | None = None  # human answers, unprocessed, usually ten; None without annotations
    most_frequent: str | None = None  # `multiple_choice_answer`, or else the most frequent of `answers`
    answer_type: str | None = None  # yes/no, number or other
    question_type: str | None = None  # one of 65 prefixes, such as "how many"

    @property
    @override
    def truth(self) -> HumanAnswers | None:
        return None if self.answers is None else HumanAnswers(self.answers, self.most_frequent)

    @property
    def metadata(self) -> dict[str, Any]:
        """The ids, and the types of annotated questions, with the keys of the official files."""
        ids = {"question_id": self.id, "image_id": self.image_id}
        if self.answers is None:
            return ids
        return ids | {"answer_type": self.answer_type, "question_type": self.question_type}


def read_image_set(questions: Path, split: str = "") -> str:
    """Return COCO's image set of a file of questions, or of its split; for other images, the split."""
    header = decode_json(map_file(questions), str(questions), _Header)
    return coco_image_set(header.data_subtype) or coco_image_set(split) or split


def read_questions(questions: Path, annotations: Path | None = None, split: str = "") -> Iterator[VQAQuestion]:
    """Yield the questions of a file in file order, joined with the annotations on `question_id`.

    Args:
        annotations: None for a split without answers (test).
        split: gives the image set if the question file does not, such as "test2015".
    """
    skipped = SkippedRecords(questions)
    yield from drop_repeats(_join_answers(questions, annotations, split), skipped, "questions")
    skipped.log()


def _join_answers(questions: Path, annotations: Path | None, split: str) -> Iterator[VQAQuestion]:
    """Yield the questions of a file with their answers, which are serialised until their question comes."""
    image_set = read_image_set(questions, split)
    answered: dict[str, bytes] = {}  # by question; 12 and "12" are the same id
    if annotations is not None:
        answered = _encode_annotations(annotations)
    decoder = msgspec.msgpack.Decoder(_Annotation)
    number = 0
    for row in stream_list(questions, _Question, "questions"):
        number += 1
        question = VQAQuestion(row.question_id, row.image_id, image_set, row.question)
        if annotations is not None:
            encoded = answered.get(str(row.question_id))
            answer = None if encoded is None else decoder.decode(encoded)
            if answer is None or str(answer.image_id) != str(row.image_id):
                raise UserError(
                    f"{annotations} has no annotation for question {row.question_id} about image {row.image_id} of "
                    f"{questions}; use the files of the same split"
                )
            question.answers = answer.texts
            question.most_frequent = answer.multiple_choice_answer
            if question.most_frequent is None:
                question.most_frequent = Counter(question.answers).most_common(1)[0][0]
            question.answer_type = answer.answer_type
            question.question_type = answer.question_type
        yield question
    if not number:
        raise UserError(f"{questions} has no questions; use another file")


def _encode_annotations(path: Path) -> dict[str, bytes]:
    """Return the annotation of each question in MessagePack: as objects, they would take ten times the memory."""
    encoder = msgspec.msgpack.Encoder()
    answered: dict[str, bytes] = {}
    for row in stream_list(path, _Annotation, "annotations"):
        row.answers = list(row.texts)
        encoded = encoder.encode(row)
        if answered.setdefault(str(row.question_id), encoded) != encoded:
            raise UserError(f"{path} has two different annotations for question {row.question_id}; remove one of them")
    return answered


class VQADataset(RecordDataset):
    """Questions of one split, or of several joined by "+" (train2014+val2014), grouped by image.

    Attributes:
        folders, instances: for each split.
    """

    file_keys = ("images", "questions", "annotations", "answers", "instances", "detections", "features")

    def __init__(self, files: DataFiles, options: VQADatasetConfig, split: str, needs: DataNeeds) -> None:
        self.options = options
        self.split_values: list[dict[str, str]] = []
        self.folders: list[Path] = []
        self.instances: list[CocoInstances] = []
        sources: list[Path] = []
        splits: list[JoinedSplit] = []
        for name in split_names(split):
            questions_file, annotations_file = _split_files(files, name, annotated=needs.training)
            sources += filter(None, (questions_file, annotations_file))
            values = {"split": name, "images": read_image_set(questions_file, name)}
            folder = files.path("images", **values)
            image_names = options.file(folder, "ID", images=values["images"])
            splits.append(JoinedSplit(name, self.files_by_image_id(files, needs, values), image_names))
            self.split_values.append(values)
            self.folders.append(folder)

        def questions(joined: JoinedSplit) -> Iterator[VQAQuestion]:
            split_questions = _read_split(files, joined.name, annotated=needs.training)
            return _complete_answers(split_questions, files, joined.name, repeat=options.repeat_answers)

        where = f"the splits {split}: question"
        repeats = [options.repeat_answers]
        self.tabulate_texts(sources, files.index_folder, questions, VQAQuestion, where, splits, repeats)
        if needs.annotations and "instances" in files:
            self.instances = open_instances(files, self.split_values, self.image_keys())
            self.class_names = self.instances[0].class_names

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: VQADatasetConfig, split: str) -> Iterable[str]:
        for name in split_names(split):
            for question in _read_split(files, name, annotated=True):
                yield from (question.words, question.most_frequent)

    @classmethod
    @override
    def answers_of(cls, files: DataFiles, options: VQADatasetConfig, split: str) -> dict[Any, str]:
        answers: dict[Any, str] = {}
        for name in split_names(split):
            for question in _read_split(files, name, annotated=True):
                answers[question.id] = question.most_frequent
        return answers

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        yield from encoded_objects(self.instances, self.image_keys())

    @override
    def image(self, name: str, text: int) -> SampleImage:
        split_index = self.split_index(text)
        file = self.options.file(self.folders[split_index], name, images=self.split_values[split_index]["images"])
        if not self.instances:
            return SampleImage(name, file)
        return self.instances[split_index].sample_image(name, file)


def _split_files(files: DataFiles, name: str, *, annotated: bool) -> tuple[Path, Path | None]:
    """Return the questions and the annotations of one split; None: there are no answers, nor are they needed."""
    questions = files.path("questions", split=name)
    if not annotated and "annotations" not in files:
        return questions, None
    annotations = files.path("annotations", split=name)
    if not annotated and "test" in name and not annotations.is_file():
        return questions, None
    return questions, annotations


def _read_split(files: DataFiles, name: str, *, annotated: bool) -> Iterator[VQAQuestion]:
    """Read the questions of one split, with answers if they exist or are needed."""
    questions, annotations = _split_files(files, name, annotated=annotated)
    return read_questions(questions, annotations, name)


def _complete_answers(
    questions: Iterable[VQAQuestion], files: DataFiles, split: str, *, repeat: bool
) -> Iterator[VQAQuestion]:
    """Repeat the answers of questions with fewer than ten, or warn of them: the official accuracy needs ten answers.

    An answer's score is the mean of min(1, matches / 3) over the *other* people's answers, so a single one scores 0.
    """
    number = 0
    num_incomplete = 0
    fewest: VQAQuestion | None = None  # the first of those with the fewest answers
    for question in questions:
        number += 1
        if question.answers and len(question.answers) < NUM_ANSWERS:
            num_incomplete += 1
            if fewest is None or len(question.answers) < len(fewest.answers):
                fewest = question
            if repeat:
                question.answers = tuple(itertools.islice(itertools.cycle(question.answers), NUM_ANSWERS))
        yield question
    if fewest is None or repeat:
        return
    logger.warning(
        "%s: %d of %d questions have fewer than ten answers, such as question %s with %d. In the official accuracy and "
        "in training, a single answer scores 0, two equal ones score 0.33, and three 0.67; set "
        "data.config.repeat_answers=true to repeat answers until there are ten.",
        files.path("annotations", split=split),
        num_incomplete,
        number,
        fewest.id,
        len(fewest.answers),
        extra={"once": str(files.path("annotations", split=split))},
    )
