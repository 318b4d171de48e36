"""Reading somebody's predictions of the phrases of captions.

| format | a record |
| --- | --- |
| a run of this package | a `Flickr30KPrediction`, or an entry of its submission file |
| boxes | {"image_id", "sentence_id", "boxes"}: of each phrase that has a true box, its boxes, best first |
| texts | {"image_id", "sentence_id", "answers"}: of each phrase that has a true box, an answer in words |
| by phrase | {"image_id", "sentence_id", "phrase", "box" or "answer"}: one phrase, by its words |

Boxes are xyxy in pixels unless the user says otherwise; nothing says what the boxes in a text are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from e2e_vl.metrics.flickr30k import Flickr30KPrediction
from e2e_vl.predictions import read_predictions, with_target
from e2e_vl.scoring.answers import boxes_of, find_answer_key, is_text, read_rows
from e2e_vl.scoring.matching import normalise_words
from e2e_vl.scoring.truths import TrueText

Boxes = list[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class PhraseAnswer:
    """The boxes predicted for the phrases of one caption, as they are written."""

    where: str  # the record, for error messages
    caption: tuple[str, str]  # id of the image, and number of the caption
    boxes: list[Boxes]  # of each phrase, best first
    phrases: tuple[str, ...] | None = None  # their words; None: those with a true box, in their order


@dataclasses.dataclass(frozen=True)
class PhraseAnswerFile:
    """All predictions of a file, with what its format says of the boxes."""

    kind: str  # the format in words
    answers: list[PhraseAnswer]
    is_pixels: bool = True  # the format says so; False: it says nothing of the scale


@dataclasses.dataclass(frozen=True)
class PhraseMatches:
    """The answer to each caption of a split, and the records that are none."""

    answers: list[PhraseAnswer | None]
    repeated: int
    unknown: list[PhraseAnswer]
    other_phrases: int  # records about phrases of these captions that have no true box

    @property
    def missing(self) -> int:
        return sum(answer is None for answer in self.answers)


def read_phrase_answers(path: Path, answer_key: str | None = None) -> PhraseAnswerFile:
    """Read a file of predictions of phrases.

    Args:
        answer_key: the key of the prediction in each record; None: the one that is there.
    """
    rows = read_rows(path)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(f"{path}: it is no list of predictions; see docs/scoring.md for the formats.")
    if any(row.get("type") == Flickr30KPrediction.__name__ for row in rows):
        return PhraseAnswerFile("a run of this package", _answers_of_run(path))
    if "phrase" in rows[0]:
        key = answer_key or find_answer_key(path, rows[0])
        answers = _answers_by_phrase(path, rows, key)
        has_texts = _has_texts(rows, key)
        kind = f"{'texts' if has_texts else 'boxes'} under {key!r} by phrase"
        return PhraseAnswerFile(kind, answers, is_pixels=not has_texts)
    key = answer_key or ("answers" if "answers" in rows[0] else "boxes")
    answers = [_answer_of(row, key, f"{path}: record {number}") for number, row in enumerate(rows)]
    has_texts = _has_texts(rows, key)
    return PhraseAnswerFile("texts by caption" if has_texts else "boxes by caption", answers, is_pixels=not has_texts)


def _has_texts(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Return whether any record has an answer in words."""
    for row in rows:
        values = row.get(key)
        if not isinstance(values, list):
            values = [values]
        if any(is_text(value) for value in values):
            return True
    return False


def _answers_of_run(path: Path) -> list[PhraseAnswer]:
    answers = []
    for number, prediction in enumerate(with_target(read_predictions(path, Flickr30KPrediction))):
        caption = (str(prediction.image_id), str(prediction.sentence))
        boxes = [[] if box is None else [list(box)] for box in prediction.boxes]
        answers.append(PhraseAnswer(f"{path}: record {number}", caption, boxes))
    return answers


def _answer_of(row: Mapping[str, Any], key: str, where: str) -> PhraseAnswer:
    """Read a record about all phrases of a caption."""
    values = row.get(key)
    if values is None and isinstance(row.get("phrases"), list):
        values = [phrase.get("box") for phrase in row["phrases"]]
    caption = _caption_of(row, where)
    if not isinstance(values, list):
        raise UserError(f"{where}: it has no list of {key}, one for each phrase; see docs/scoring.md for the formats.")
    return PhraseAnswer(where, caption, [boxes_of(value, where) for value in values])


def _answers_by_phrase(path: Path, rows: Sequence[Mapping[str, Any]], key: str) -> list[PhraseAnswer]:
    """Join the records about single phrases, which have different answers, to one answer for each caption."""
    wheres: dict[tuple[str, str], str] = {}
    boxes: dict[tuple[str, str], list[Boxes]] = {}
    phrases: dict[tuple[str, str], list[str]] = {}
    for number, row in enumerate(rows):
        where = f"{path}: record {number}"
        caption = _caption_of(row, where)
        if key not in row or not isinstance(row.get("phrase"), str):
            raise UserError(f"{where} has no phrase with {key!r}; give a null if there is no prediction.")
        wheres.setdefault(caption, where)
        boxes.setdefault(caption, []).append(boxes_of(row[key], where))
        phrases.setdefault(caption, []).append(row["phrase"])
    return [PhraseAnswer(wheres[name], name, boxes[name], tuple(phrases[name])) for name in wheres]


def _caption_of(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the id of the image, and the number of the caption among those of the image."""
    image_id = row.get("image_id", row.get("image"))
    sentence = row.get("sentence_id", row.get("sentence"))
    if image_id is None or sentence is None:
        raise UserError(f"{where}: it has no image_id and sentence_id; see docs/scoring.md for the formats.")
    return Path(str(image_id)).stem, str(sentence)


def match_phrases(answers: Sequence[PhraseAnswer], texts: Sequence[TrueText]) -> PhraseMatches:
    """Find the caption of each record.

    Raises:
        UserError: two records about one caption differ, or a record has boxes for other phrases than the caption has.
    """
    numbers = {(text.image_id, str(text.ids["sentence"])): number for number, text in enumerate(texts)}
    answers_of_texts: list[PhraseAnswer | None] = [None] * len(texts)
    unknown = []
    repeated = 0
    other_phrases = 0
    for written in answers:
        number = numbers.get(written.caption)
        if number is None:
            unknown.append(written)
            continue
        answer = written
        if written.phrases is not None:
            answer = _in_order_of_truth(written, texts[number])
            other_phrases += len(written.boxes) - len(answer.boxes)
        earlier = answers_of_texts[number]
        if earlier is not None and earlier.boxes != answer.boxes:
            raise UserError(f"{answer.where} and {earlier.where} are two different predictions for one caption.")
        repeated += earlier is not None
        expected = len(texts[number].truth.boxes)
        if len(answer.boxes) != expected:
            raise UserError(
                f"{answer.where}: it has boxes for {len(answer.boxes)} phrases, but {expected} phrases of the caption "
                "have a true box."
            )
        answers_of_texts[number] = answer
    return PhraseMatches(answers_of_texts, repeated, unknown, other_phrases)


def _in_order_of_truth(answer: PhraseAnswer, text: TrueText) -> PhraseAnswer:
    """Return the boxes of the phrases that have a true box, in their order; those of others do not count.

    Phrases with the same words are answered in their order.

    Raises:
        UserError: such a phrase has no record, or more than one.
    """
    left = [(normalise_words(phrase), boxes) for phrase, boxes in zip(answer.phrases, answer.boxes, strict=True)]
    ordered = []
    for start, end in text.truth.spans:
        phrase = normalise_words(text.words[start:end])
        row = next((row for row, (words, _) in enumerate(left) if words == phrase), None)
        if row is None:
            raise UserError(
                f"{answer.where}: the caption {text.words!r} has no record about its phrase {phrase!r}; give a null if "
                "there is no prediction."
            )
        ordered.append(left.pop(row)[1])
    true_phrases = {normalise_words(text.words[start:end]) for start, end in text.truth.spans}
    for phrase, _ in left:
        if phrase in true_phrases:
            raise UserError(f"{answer.where}: the caption {text.words!r} has too many records about {phrase!r}.")
    return dataclasses.replace(answer, boxes=ordered, phrases=None)


def boxes_as_array(boxes: Boxes) -> np.ndarray:
    """Return boxes as float64 [n, 4]."""
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)
