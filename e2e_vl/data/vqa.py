"""VQA v2: questions about images, with what people answered."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import field

from detector.errors import UserError, user_path
from e2e_vl.data.base import DataFiles, VLDataset, Wants, coco_image_set, group_texts, split_names
from e2e_vl.data.coco import CocoInstances, read_instances
from e2e_vl.data.storage.files import checked_records, require_file
from e2e_vl.data.storage.json_entries import json_members
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import JoinedRecords, RecordTable
from e2e_vl.data.storage.shared_reads import collection_paused
from e2e_vl.io import inside, is_name_pattern, shown
from e2e_vl.records import Id, Record, checked
from e2e_vl.samples import HumanAnswers, Sample, SampleImage, SampleText

# Reader of the official VQA v2 files: questions and annotations.


@dataclasses.dataclass(frozen=True, slots=True)
class VQAQuestion:
    """One question, and what people answered if the split is annotated."""

    question_id: int
    image_id: int
    text: str
    data_subtype: str | None = None  # the question file's, such as "train2014"
    answers: tuple[str, ...] | None = None  # ten human answers, as written; None without annotations
    most_frequent: str | None = None  # `multiple_choice_answer`
    answer_type: str | None = None  # yes/no, number or other
    question_type: str | None = None  # one of 65 prefixes, such as "how many"

    def record(self) -> dict[str, Any]:
        """Plain values under the names of the files, for predictions and metrics."""
        record: dict[str, Any] = {"question_id": self.question_id, "image_id": self.image_id, "question": self.text}
        if self.answers is not None:
            record |= {
                "answers": list(self.answers),
                "multiple_choice_answer": self.most_frequent,
                "answer_type": self.answer_type,
                "question_type": self.question_type,
            }
        return record


class VQAQuestions(Sequence):  # of `VQAQuestion`
    """The questions of a file with their answers, in flat arrays, in the order of the file.

    Attributes:
        image_ids, question_ids: of each question.
    """

    def __init__(
        self,
        asked: RecordTable[_AskedRow],
        annotated: RecordTable[_Annotated] | None,
        rows: Sequence[int],
        data_subtype: str | None,
    ) -> None:
        self._asked, self._annotated, self._rows, self._data_subtype = asked, annotated, rows, data_subtype
        self.image_ids, self.question_ids = asked.column("image_id"), asked.column("question_id")

    @property
    def most_frequent(self) -> Iterator[str | None]:
        """The most frequent answer to each question."""
        if self._annotated is None:
            return iter([None] * len(self))
        return map(self._annotated.column("most_frequent").__getitem__, self._rows)

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, row: int) -> VQAQuestion:
        asked = self._asked[row]
        question = VQAQuestion(asked.question_id, asked.image_id, asked.text, self._data_subtype)
        if self._annotated is None:
            return question
        found = self._annotated[self._rows[row]]
        return dataclasses.replace(
            question,
            answers=found.answers,
            most_frequent=found.most_frequent,
            answer_type=found.answer_type,
            question_type=found.question_type,
        )


class _AskedRow(Record):
    question_id: Id
    image_id: Id
    text: str = field(name="question")


class _Answer(Record):
    answer: str


class _AnsweredRow(Record):
    question_id: Id
    image_id: Id
    answers: list[_Answer]
    multiple_choice_answer: str
    answer_type: str
    question_type: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Annotated:
    question_id: int
    image_id: int
    answers: tuple[str, ...]
    most_frequent: str
    answer_type: str
    question_type: str


def read_questions(
    questions_file: str | Path, annotations_file: str | Path | None = None, errors: RecordErrors = RAISE
) -> VQAQuestions:
    """Read a question file, joined with its annotation file on `question_id`; the questions are in file order.

    The files are read entry by entry, because the annotations of train2014 as Python objects take 3 GiB.

    Args:
        questions_file: `v2_OpenEnded_mscoco_<split>_questions.json`.
        annotations_file: `v2_mscoco_<split>_annotations.json`; None for a split without answers (test).
        errors: what becomes of an error about one record.

    Raises:
        FileNotFoundError: no such file.
        ValueError: invalid JSON, a missing key, a question listed twice, files of other questions, or answers that are
            no strings; file and question are named.
    """
    path = require_file(user_path(questions_file), "questions")
    annotated, row_of = None, {}
    if annotations_file is not None:
        with errors.about(str(annotations_file)):
            annotated = _read_annotations(user_path(annotations_file), errors)
            row_of = {number: row for row, number in enumerate(annotated.column("question_id"))}
    from_user = bytearray(len(row_of))
    rows = array("q")
    head: dict[str, Any] = {}

    def asked() -> Iterator[_AskedRow]:
        what, unique = f"{path}: question", "question ids"
        found = _rows_of(path, "questions", head, lambda row: _mark(from_user, row_of, row))
        for where, row in checked_records(_AskedRow, found, what, "question_id", unique=unique, errors=errors):
            one = None
            with errors:
                if not row.text.strip():
                    raise UserError(f"{where} has the text {row.text!r}; a question must be a text")
                if annotated is not None:
                    rows.append(_annotated_row(row, annotated, row_of, where, annotations_file))
                one = row
            if one is not None:
                yield one

    with collection_paused():
        questions = RecordTable(_AskedRow, asked())
    if not questions:
        raise UserError(f"{path} has no questions")
    extra = [number for number, row in row_of.items() if not from_user[row]]
    if extra:
        with errors.about(str(annotations_file)):
            raise UserError(
                f"{annotations_file}: annotation of question {extra[0]} (and {len(extra) - 1} more), which {path} does "
                "not have; use the two files of the same split"
            )
    data_subtype = checked(str | None, head.get("data_subtype"), f"{path}: data_subtype")
    return VQAQuestions(questions, annotated, rows, data_subtype)


def _rows_of(
    path: Path, key: str, head: dict[str, Any], look: Callable[[Any], None] = lambda row: None
) -> Iterator[Any]:
    """The values of the list `key`; other entries of the file go into `head`, and `look` is shown every value."""
    is_there = False
    for name, value, is_row in json_members(path, key, [key]):
        if is_row:
            look(value)
            yield value
        elif name != key:
            head[name] = value
        elif not isinstance(value, list):
            raise UserError(f"{path}: {key} is a {type(value).__name__}, expected a list")
        is_there = is_there or name == key
    if not is_there:
        raise UserError(f"{path} has no '{key}'")


def _mark(from_user: bytearray, row_of: dict[Any, int], row: Any) -> None:
    number = row.get("question_id") if isinstance(row, dict) else None
    if isinstance(number, int | str) and number in row_of:
        from_user[row_of[number]] = True


def _annotated_row(
    row: _AskedRow,
    annotated: RecordTable[_Annotated],
    row_of: dict[int, int],
    where: str,
    annotations_file: str | Path,
) -> int:
    """The row of the annotation of a question."""
    found = row_of.get(row.question_id)
    if found is None:
        raise UserError(f"{where} has no annotation in {annotations_file}; use the two files of the same split")
    if annotated.column("image_id")[found] != row.image_id:
        raise UserError(f"{where} is about image {row.image_id}, but in {annotations_file} about another")
    return found


def _read_annotations(path: Path, errors: RecordErrors) -> RecordTable[_Annotated]:
    path = require_file(path, "annotations")
    what, unique = f"{path}: annotation of question", "question ids"

    def annotated() -> Iterator[_Annotated]:
        found = _rows_of(path, "annotations", {})
        for where, row in checked_records(_AnsweredRow, found, what, "question_id", unique=unique, errors=errors):
            one = None
            with errors:
                if not row.answers:
                    raise UserError(
                        f"{where} has no answers; leave the annotation file out for a split without answers"
                    )
                texts = row.multiple_choice_answer, row.answer_type, row.question_type
                one = _Annotated(row.question_id, row.image_id, tuple([one.answer for one in row.answers]), *texts)
            if one is not None:
                yield one

    with collection_paused():
        return RecordTable(_Annotated, annotated())


@dataclasses.dataclass(frozen=True)
class VQAOptions:
    """Fields of `data.config`."""

    # file name of an image; {id} is its id, {images} the COCO image set, such as train2014
    image_name: str = "COCO_{images}_{id:012d}.jpg"

    def __post_init__(self) -> None:
        if not is_name_pattern(self.image_name, "id", "images"):
            raise UserError(f"data.config.image_name is {shown(self.image_name)}; it takes {{id}} and {{images}}.")
        try:
            same = self.image_name.format(id=1, images="") == self.image_name.format(id=2, images="")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"data.config.image_name is '{self.image_name}'; it takes {{id}} and {{images}}."
            ) from error
        if same:
            raise UserError(f"data.config.image_name is '{self.image_name}'; it must hold {{id}}, the image's id.")


@dataclasses.dataclass
class VQAPart:
    """Questions of one split, and where their images are."""

    questions: VQAQuestions
    folder: Path  # of the images
    image_name: str  # with {id}
    instances: CocoInstances | None = None

    def image(self, image_id: int) -> SampleImage:
        """The facts about one image."""
        name, where = self.image_name.format(id=image_id), f"image {shown(image_id)}"
        path = inside(self.folder, name, where, follows_links=True)
        if self.instances is None:
            return SampleImage(str(image_id), path)
        return self.instances.sample_image(image_id, path)

    def check_images(self) -> None:
        """Raises ValueError unless the instances file lists all images."""
        if self.instances is None:
            return
        known = set(self.instances.images)
        missing = [image_id for image_id in self.questions.image_ids if image_id not in known]
        if missing:
            raise UserError(
                f"{self.instances.path}: has no image {missing[0]} and {len(set(missing)) - 1} more of the questions; "
                "use the instances file of the same images"
            )


class VQADataset(VLDataset):
    """Questions of one or several splits, grouped by image.

    Args:
        parts: the splits that are joined, such as train2014 and val2014.
        names: placeholder values of each part, see `VLDataset.parts`.

    Attributes:
        questions: the texts, part after part; their indices are text indices.

    Raises:
        ValueError: a question id in two splits, or an image that the instances file lacks.
    """

    known_files = ("images", "questions", "annotations", "answers", "instances", "detections", "features")
    options = VQAOptions

    def __init__(self, parts: Sequence[VQAPart], names: Sequence[Mapping[str, str]]) -> None:
        self.question_parts = list(parts)
        self.parts = names
        self.questions = JoinedRecords([part.questions for part in parts])
        seen: set[int] = set()
        for part in parts:
            double = next((number for number in part.questions.question_ids if number in seen), None)
            if double is not None:
                splits = "+".join(one["split"] for one in names)
                raise UserError(f"question {double} is in two of the splits {splits}; name each split once")
            seen.update(part.questions.question_ids if len(parts) > 1 else ())
        images = ((number, one) for number, part in enumerate(parts) for one in part.questions.image_ids)
        self.groups = group_texts(images)
        for part in parts:
            part.check_images()
        if parts[0].instances is not None:
            self.class_names = parts[0].instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: VQAOptions, split: str, wants: Wants) -> VQADataset:
        """`split` names one split or several joined by "+" (train2014+val2014).

        `data.files` holds `questions`, `annotations`, `images` (a folder) and, where annotated boxes are needed,
        `instances`; in all of them {split} is the split and {images} its COCO image set. Splits with "test" in their
        name need no annotation file.
        """
        parts, names = [], []
        for name in split_names(split):
            questions = _read_split(files, name, annotated=wants.training)
            values = {"split": name, "images": _image_set(questions[0], name)}
            part = VQAPart(
                questions, files.path("images", **values), options.image_name.replace("{images}", values["images"])
            )
            if wants.annotations and "instances" in files:
                part.instances = files.read(read_instances, files.path("instances", **values), drop_empty_boxes=True)
            parts.append(part)
            names.append(values)
        return cls(parts, names)

    @classmethod
    def reads(cls, options: VQAOptions, split: str, wants: Wants) -> tuple[str, ...]:
        keys = super().reads(options, split, wants)
        return tuple(key for key in keys if key != "answers" and (wants.training or key != "annotations"))

    @classmethod
    def texts_of(cls, files: DataFiles, options: VQAOptions, split: str) -> Iterable[str]:
        """All questions of a split and the most frequent answer to each."""
        for name in split_names(split):
            for question in _read_split(files, name, annotated=True):
                yield question.text
                yield question.most_frequent

    @classmethod
    def answers_of(cls, files: DataFiles, options: VQAOptions, split: str) -> dict[Any, str]:
        found: dict[Any, str] = {}
        for name in split_names(split):
            questions = _read_split(files, name, annotated=True)
            found.update(zip(questions.question_ids, questions.most_frequent, strict=True))
        return found

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.questions)

    def image_ids(self) -> Iterable[str]:
        return (str(self._image_id(texts[0])) for texts in self.groups)

    def truths(self) -> Iterable[HumanAnswers | None]:
        return (_truth(question) for question in self.questions)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some questions about one image."""
        part = self.question_parts[self.questions.part_of(texts[0])]
        image = part.image(self._image_id(texts[0]))
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _image_id(self, text: int) -> int:
        number = self.questions.part_of(text)
        return self.question_parts[number].questions.image_ids[text - self.questions.starts[number]]

    def _text(self, index: int) -> SampleText:
        question = self.questions[index]
        return SampleText(index, question.text, question.record(), _truth(question))


def _truth(question: VQAQuestion) -> HumanAnswers | None:
    return None if question.answers is None else HumanAnswers(question.answers)


def _read_split(files: DataFiles, name: str, *, annotated: bool) -> VQAQuestions:
    """Questions of one split, with answers if there are any or they are needed."""
    annotations = None
    if annotated or "annotations" in files:
        annotations = files.path("annotations", split=name)
        if not annotated and "test" in name and not annotations.is_file():
            annotations = None
    return files.read(read_questions, files.path("questions", split=name), annotations)


def _image_set(question: VQAQuestion, split: str) -> str:
    """COCO's image set of a split, or the split itself."""
    return coco_image_set(question.data_subtype) or coco_image_set(split) or split
