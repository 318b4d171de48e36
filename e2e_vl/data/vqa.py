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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from typing_extensions import override

from detector.errors import UserError
from detector.io import read_json
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


class _QuestionsFile(Record):
    questions: Annotated[list[_Question], Meta(min_length=1)]
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


def read_questions(questions: Path, annotations: Path | None = None, split: str = "") -> list[VQAQuestion]:
    """Read the questions of a file in file order, joined with the annotations on `question_id`.

    Args:
        annotations: None for a split without answers (test).
        split: gives the image set if the question file does not, such as "test2015".
    """
    content = read_json(questions, _QuestionsFile)
    skipped = SkippedRecords(questions)
    image_set = coco_image_set(content.data_subtype) or coco_image_set(split) or split
    answered: dict[str, _Annotation] = {}  # by question; 12 and "12" are the same id
    if annotations is not None:
        for row in stream_list(annotations, _Annotation, "annotations"):
            if answered.setdefault(str(row.question_id), row) != row:
                raise UserError(
                    f"{annotations} has two different annotations for question {row.question_id}; remove one of them"
                )
    all_questions: list[VQAQuestion] = []
    for row in content.questions:
        question = VQAQuestion(row.question_id, row.image_id, image_set, row.question)
        if annotations is not None:
            answer = answered.get(str(row.question_id))
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
        all_questions.append(question)
    distinct = list(drop_repeats(all_questions, skipped, "questions"))
    skipped.log()
    return distinct


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
        questions: list[VQAQuestion] = []
        splits: list[JoinedSplit] = []
        for name in split_names(split):
            split_questions = _read_split(files, name, annotated=needs.training)
            _complete_answers(split_questions, files, name, repeat=options.repeat_answers)
            values = {"split": name, "images": split_questions[0].image_set}
            folder = files.path("images", **values)
            image_names = options.file(folder, "ID", images=values["images"])
            boxes = self.files_by_image_id(files, needs, values)
            splits.append(JoinedSplit(name, boxes, image_names, len(split_questions)))
            self.split_values.append(values)
            self.folders.append(folder)
            questions += split_questions
        self.set_texts(questions, f"the splits {split}: question", splits)
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


def _read_split(files: DataFiles, name: str, *, annotated: bool) -> list[VQAQuestion]:
    """Read the questions of one split, with answers if they exist or are needed."""
    annotations = None
    if annotated or "annotations" in files:
        annotations = files.path("annotations", split=name)
        if not annotated and "test" in name and not annotations.is_file():
            annotations = None
    return read_questions(files.path("questions", split=name), annotations, name)


def _complete_answers(questions: Sequence[VQAQuestion], files: DataFiles, split: str, *, repeat: bool) -> None:
    """Repeat the answers of questions with fewer than ten, or warn of them: the official accuracy needs ten answers.

    An answer's score is the mean of min(1, matches / 3) over the *other* people's answers, so a single one scores 0.
    """
    incomplete = [question for question in questions if question.answers and len(question.answers) < NUM_ANSWERS]
    if not incomplete:
        return
    if repeat:
        for question in incomplete:
            question.answers = tuple(itertools.islice(itertools.cycle(question.answers), NUM_ANSWERS))
        return
    annotations = files.path("annotations", split=split)
    fewest = min(incomplete, key=lambda question: len(question.answers))
    logger.warning(
        "%s: %d of %d questions have fewer than ten answers, such as question %s with %d. In the official accuracy and "
        "in training, a single answer scores 0, two equal ones score 0.33, and three 0.67; set "
        "data.config.repeat_answers=true to repeat answers until there are ten.",
        annotations,
        len(incomplete),
        len(questions),
        fewest.id,
        len(fewest.answers),
        extra={"once": str(annotations)},
    )
