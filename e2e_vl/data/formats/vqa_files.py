"""Reader of the official VQA v2 files: questions and annotations."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import field

from detector.errors import UserError
from detector.user_paths import user_path
from e2e_vl.data.storage.files import checked_records, require_file
from e2e_vl.data.storage.json_entries import json_members
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.data.storage.record_table import RecordTable
from e2e_vl.data.storage.shared_reads import collection_paused
from e2e_vl.records import Id, Record, checked


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
    is_asked = bytearray(len(row_of))
    rows = array("q")
    head: dict[str, Any] = {}

    def asked() -> Iterator[_AskedRow]:
        what, unique = f"{path}: question", "question ids"
        found = _rows_of(path, "questions", head, lambda row: _mark(is_asked, row_of, row))
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
    extra = [number for number, row in row_of.items() if not is_asked[row]]
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


def _mark(is_asked: bytearray, row_of: dict[Any, int], row: Any) -> None:
    number = row.get("question_id") if isinstance(row, dict) else None
    if isinstance(number, int | str) and number in row_of:
        is_asked[row_of[number]] = True


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
