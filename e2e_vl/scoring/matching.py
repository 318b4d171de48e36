"""Which expression of a split each record of a file of predictions is about.

A record tells it by `sent_id`, by its annotation or image together with the words, or by an id (or its place) in a file
of questions, which tells the same: MDETR's annotations in COCO's format, or the JSON (lines) that a vision-language
model was asked with. Two objects of an image may have the same words; then the annotation or the true box in the record
decides.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from e2e_vl.scoring.answers import BOX_KEYS, ID_KEYS, Answer, AnswerFile, read_rows
from e2e_vl.scoring.truths import TrueText

_COCO_NUMBER = re.compile(r"(?<!\d)\d{12}(?!\d)")  # in the names of COCO's files
_SAME_BOX = 1.5  # pixels: files round coordinates


@dataclasses.dataclass(frozen=True)
class Matches:
    """The answer to each text of a split, and the records that are none."""

    answers: list[Answer | None]  # of each text; None: the file has no record about it
    repeated: int  # records that say again what another one has said
    unknown: list[Answer]  # records about no expression of the split
    told_by: str  # what tells the expressions, in words

    @property
    def missing(self) -> int:
        return sum(answer is None for answer in self.answers)


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Read a file of questions, as rows with keys of `ID_KEYS` and the true "box" where it has one."""
    content = read_rows(path)
    if not isinstance(content, Mapping):
        return [_question_of(row) for row in content]
    annotations = {row["image_id"]: row for row in content.get("annotations", ())}
    questions = []
    for image in content.get("images", ()):  # one per expression
        annotation = annotations.get(image.get("id"), {})
        question = {"id": image.get("id"), "image": image.get("file_name"), "words": image.get("caption")}
        question["ann_id"] = annotation.get("original_id")
        question["box"] = annotation.get("bbox")
        questions.append(question)
    return questions


def _question_of(row: Mapping[str, Any]) -> dict[str, Any]:
    question: dict[str, Any] = {}
    for meaning, names in ID_KEYS.items():
        question[meaning] = next((row[name] for name in names if row.get(name) is not None), None)
    question["box"] = next((row[key] for key in BOX_KEYS if row.get(key) is not None), None)
    return question


def match(file: AnswerFile, texts: Sequence[TrueText], questions: Sequence[Mapping[str, Any]] | None) -> Matches:
    """Find the text of each record.

    Args:
        questions: see `read_questions`; None: the records name their expressions themselves.

    Raises:
        UserError: two records about one expression differ, or a record does not tell its expression.
    """
    index = TextIndex(texts)
    if questions is not None:
        told_by, keys_of_answers = _keys_of_questions(file, questions)
    else:
        told_by, keys_of_answers = _keys_of_records(file, index)
    answers: list[Answer | None] = [None] * len(texts)
    unknown: list[Answer] = []
    repeated = 0
    for answer, keys in zip(file.answers, keys_of_answers, strict=True):
        numbers = index.find(keys, answer.where)
        free = [number for number in numbers if answers[number] is None]
        if free:
            answers[free[0]] = answer
        elif not numbers:
            unknown.append(answer)
        elif any(answer.says_the_same(answers[number]) for number in numbers):
            repeated += 1
        else:
            raise UserError(
                f"{answer.where} and {answers[numbers[0]].where} are two different predictions for one expression, "
                f"{texts[numbers[0]].words!r}; remove one of them."
            )
    return Matches(answers, repeated, unknown, told_by)


def _keys_of_questions(
    file: AnswerFile, questions: Sequence[Mapping[str, Any]]
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return what the questions say of the expression of each record."""
    by_id = {str(question["id"]): question for question in questions if question["id"] is not None}
    if len(by_id) == len(questions) and all("id" in answer.keys for answer in file.answers):
        return "the ids of the questions", [by_id.get(str(answer.keys["id"]), {}) for answer in file.answers]
    if len(file.answers) != len(questions):
        raise UserError(
            f"{file.path}: without ids, {len(file.answers):,} records cannot be those of {len(questions):,} questions."
        )
    for answer, question in zip(file.answers, questions, strict=True):
        for meaning in answer.keys.keys() & {"id", "image", "words"}:
            if question[meaning] is not None and question[meaning] != answer.keys[meaning]:
                raise UserError(
                    f"{answer.where}: it is about {answer.keys[meaning]!r}, but the question at its place is about "
                    f"{question[meaning]!r}; give the questions in the order of the records."
                )
    return "their place among the questions", questions


def _keys_of_records(file: AnswerFile, index: TextIndex) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return what the records themselves say of their expressions; an id alone is one of a sentence or of an image."""
    keys_of_answers = [answer.keys for answer in file.answers]
    if any(keys.keys() & {"sent_id", "words"} or "id" not in keys for keys in keys_of_answers):
        return "sent_id" if "sent_id" in keys_of_answers[0] else "the words of the expressions", keys_of_answers
    ids = [str(keys["id"]) for keys in keys_of_answers]
    are_images = index.has_one_text_per_image and all(image_key(name) in index.by_image for name in ids)
    are_sentences = all(name in index.by_sentence for name in ids)
    if are_images and are_sentences:
        raise UserError(
            f"{file.path}: the ids may be of images or of sentences; give sent_ids, or the file of the questions with "
            "--questions."
        )
    if are_images:
        return "ids of images, with one expression each", [{"only_image": name} for name in ids]
    return "ids, read as sent_id", [{"sent_id": name} for name in ids]


class TextIndex:
    """Finds the texts of a split by what records and questions say of them."""

    def __init__(self, texts: Sequence[TrueText]) -> None:
        self.texts = texts
        self.by_sentence: dict[str, list[int]] = defaultdict(list)
        self.by_image: dict[str, list[int]] = defaultdict(list)
        self.by_words: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.by_annotation: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            words = normalise_words(text.words)
            self.by_sentence[str(text.ids.get("sent_id"))].append(number)
            for image in {image_key(text.image_id), image_key(text.file_name)}:
                self.by_image[image].append(number)
                self.by_words[image, words].append(number)
            if len(text.truth.boxes) == 1 and text.truth.ann_ids is not None:
                self.by_annotation[str(text.truth.ann_ids[0]), words].append(number)
        self.has_one_text_per_image = len({text.image for text in texts}) == len(texts)

    def find(self, keys: Mapping[str, Any], where: str) -> list[int]:
        """Return the numbers of the texts that a record can be about: several have the same words and boxes.

        Raises:
            UserError: the record does not tell which of several expressions it is about.
        """
        if keys.get("only_image") is not None:
            return self.by_image.get(image_key(keys["only_image"]), [])
        if keys.get("sent_id") is not None:
            return self.by_sentence.get(str(keys["sent_id"]), [])
        if keys.get("words") is None:
            if not keys:
                return []
            raise UserError(
                f"{where}: it has neither a sent_id nor an image with the expression; give the file of the questions "
                "with --questions."
            )
        words = normalise_words(str(keys["words"]))
        numbers = self.by_annotation.get((str(keys.get("ann_id")), words), [])
        if not numbers and keys.get("image") is not None:
            numbers = self.by_words.get((image_key(keys["image"]), words), [])
        if len({self.texts[number].truth.boxes for number in numbers}) > 1 and keys.get("box") is not None:
            numbers = [number for number in numbers if self._has_box(number, keys["box"])]
        if len({self.texts[number].truth.boxes for number in numbers}) > 1:
            raise UserError(
                f"{where}: {words!r} is said of {len(numbers)} objects of the image; give a sent_id, an ann_id, or the "
                "file of the questions with --questions."
            )
        return numbers

    def _has_box(self, number: int, box: Sequence[float]) -> bool:
        """Return whether a text refers to a box, which is xyxy or xywh."""
        x, y, third, fourth = box
        true_boxes = np.array(self.texts[number].truth.boxes).reshape(-1, 4)
        readings = np.array([[x, y, third, fourth], [x, y, x + third, y + fourth]])
        return bool((np.abs(true_boxes[:, None] - readings).max(axis=2) <= _SAME_BOX).any())


def normalise_words(words: str) -> str:
    """Return an expression in small letters, with single spaces."""
    return " ".join(words.lower().split())


def image_key(name: Any) -> str:
    """Return COCO's number in a file name or path; of other names the stem."""
    text = str(name)
    numbers = _COCO_NUMBER.findall(text)
    if numbers:
        return str(int(numbers[-1]))
    return Path(text).stem
