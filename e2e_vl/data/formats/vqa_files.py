"""Reader of the official VQA v2 files: questions and annotations."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from e2e_vl.data.storage.files import checked_records, read_json, require_keys
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors


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


def read_questions(
    questions_file: str | Path, annotations_file: str | Path | None = None, errors: RecordErrors = RAISE
) -> list[VQAQuestion]:
    """Read a question file, joined with its annotation file on `question_id`; the questions are in file order.

    Args:
        questions_file: `v2_OpenEnded_mscoco_<split>_questions.json`.
        annotations_file: `v2_mscoco_<split>_annotations.json`; None for a split without answers (test).
        errors: what becomes of an error about one record.

    Raises:
        FileNotFoundError: no such file.
        ValueError: invalid JSON, a missing key, a question listed twice, files of other questions, or answers that are
            no strings; file and question are named.
    """
    path = Path(questions_file).expanduser()
    content = read_json(path, "questions", ("questions",))
    annotations = None
    if annotations_file is not None:
        with errors.about(str(annotations_file)):
            annotations = _read_annotations(Path(annotations_file).expanduser(), errors)
    questions: dict[int, VQAQuestion] = {}
    rows, keys = _list(content["questions"], f"{path}: questions"), ("question_id", "image_id", "question")
    what = f"{path}: question"
    for where, row in checked_records(rows, keys, what, "question_id", unique="question ids", errors=errors):
        with errors:
            if not isinstance(row["question"], str) or not row["question"].strip():
                raise ValueError(f"{where} has the text {row['question']!r}; a question must be a text")
            annotated = {} if annotations is None else _annotated(row, annotations, where, annotations_file)
            number = row["question_id"]
            questions[number] = VQAQuestion(
                number, row["image_id"], row["question"], content.get("data_subtype"), **annotated
            )
    if not questions:
        raise ValueError(f"{path} has no questions")
    asked = {row.get("question_id") for row in rows if isinstance(row, dict)}
    extra = [number for number in annotations or () if number not in asked]
    if extra:
        with errors.about(str(annotations_file)):
            raise ValueError(
                f"{annotations_file}: annotation of question {extra[0]} (and {len(extra) - 1} more), which {path} does "
                "not have; use the two files of the same split"
            )
    return list(questions.values())


def _annotated(
    row: dict[str, Any], annotations: dict[int, dict[str, Any]], where: str, annotations_file: str | Path
) -> dict[str, Any]:
    """Fields of `VQAQuestion` that the annotation of a question gives."""
    annotated = annotations.get(row["question_id"])
    if annotated is None:
        raise ValueError(f"{where} has no annotation in {annotations_file}; use the two files of the same split")
    if annotated.pop("image_id") != row["image_id"]:
        raise ValueError(f"{where} is about image {row['image_id']}, but in {annotations_file} about another")
    return annotated


def _read_annotations(path: Path, errors: RecordErrors) -> dict[int, dict[str, Any]]:
    """Fields of `VQAQuestion` by question id, and `image_id`."""
    rows = _list(read_json(path, "annotations", ("annotations",))["annotations"], f"{path}: annotations")
    found: dict[int, dict[str, Any]] = {}
    texts = ("multiple_choice_answer", "answer_type", "question_type")
    keys = ("question_id", "image_id", "answers", *texts)
    what = f"{path}: annotation of question"
    for where, row in checked_records(rows, keys, what, "question_id", unique="question ids", errors=errors):
        with errors:
            for key in texts:
                if not isinstance(row[key], str):
                    raise ValueError(f"{where}: {key} is {row[key]!r}; it must be a text")
            found[row["question_id"]] = {
                "image_id": row["image_id"],
                "answers": _answers(row["answers"], where),
                "most_frequent": sys.intern(row["multiple_choice_answer"]),
                "answer_type": sys.intern(row["answer_type"]),
                "question_type": sys.intern(row["question_type"]),
            }
    return found


def _answers(rows: Any, where: str) -> tuple[str, ...]:
    """The ten human answers. There are 4.4 million in a file, of which few are different."""
    try:
        answers = tuple([sys.intern(row["answer"]) for row in _list(rows, f"{where}: answers")])
    except (TypeError, KeyError):  # what is wrong is looked for only now
        for number, row in enumerate(rows, start=1):
            require_keys(row, ("answer",), f"{where}: answer {number}")
            if not isinstance(row["answer"], str):
                raise ValueError(f"{where}: answer {number} is {row['answer']!r}; an answer must be a text") from None
        raise
    if not answers:
        raise ValueError(f"{where} has no answers; leave the annotation file out for a split without answers")
    return answers


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is a {type(value).__name__}, expected a list")
    return value
