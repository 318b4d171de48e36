"""Reading somebody's predictions of the phrases of captions.

| format | a record |
| --- | --- |
| a run of this package | a `Flickr30KPrediction`, or an entry of its submission file |
| MDETR | {"image_id", "sentence_id", "boxes"}: of each phrase that has boxes, a list of them, best first |

Boxes are xyxy in pixels unless the user says otherwise.
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
from e2e_vl.scoring.answers import read_rows
from e2e_vl.scoring.truths import TrueText

Boxes = list[list[float]]


@dataclasses.dataclass(frozen=True)
class PhraseAnswer:
    """The boxes predicted for the phrases of one caption, as they are written."""

    where: str  # the record, for error messages
    caption: tuple[str, str]  # id of the image, and number of the caption
    boxes: list[Boxes]  # of each phrase, best first


@dataclasses.dataclass(frozen=True)
class PhraseMatches:
    """The answer to each caption of a split, and the records that are none."""

    answers: list[PhraseAnswer | None]
    repeated: int
    unknown: list[PhraseAnswer]

    @property
    def missing(self) -> int:
        return sum(answer is None for answer in self.answers)


def read_phrase_answers(path: Path) -> tuple[str, list[PhraseAnswer]]:
    """Read a file of predictions of phrases; return its format in words, and the records."""
    rows = read_rows(path)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(f"{path}: it is no list of predictions; see docs/scoring.md for the formats.")
    if any(row.get("type") == Flickr30KPrediction.__name__ for row in rows):
        answers = []
        for number, prediction in enumerate(with_target(read_predictions(path, Flickr30KPrediction))):
            caption = (str(prediction.image_id), str(prediction.sentence))
            boxes = [[] if box is None else [list(box)] for box in prediction.boxes]
            answers.append(PhraseAnswer(f"{path}: record {number}", caption, boxes))
        return "a run of this package", answers
    return "boxes by caption", [_answer_of(row, f"{path}: record {number}") for number, row in enumerate(rows)]


def _answer_of(row: Mapping[str, Any], where: str) -> PhraseAnswer:
    image_id = row.get("image_id", row.get("image"))
    sentence = row.get("sentence_id", row.get("sentence"))
    boxes = row.get("boxes")
    if boxes is None and isinstance(row.get("phrases"), list):
        boxes = [phrase.get("box") for phrase in row["phrases"]]
    if image_id is None or sentence is None or not isinstance(boxes, list):
        raise UserError(f"{where}: it has no image_id, sentence_id and boxes; see docs/scoring.md for the formats.")
    boxes_of_phrases = []
    for phrase_boxes in boxes:
        if phrase_boxes and not isinstance(phrase_boxes[0], list):
            phrase_boxes = [phrase_boxes]
        boxes_of_phrases.append(phrase_boxes or [])
    return PhraseAnswer(where, (str(image_id), str(sentence)), boxes_of_phrases)


def match_phrases(answers: Sequence[PhraseAnswer], texts: Sequence[TrueText]) -> PhraseMatches:
    """Find the caption of each record.

    Raises:
        UserError: two records about one caption differ, or a record has boxes for another number of phrases.
    """
    numbers = {(text.image_id, str(text.ids["sentence"])): number for number, text in enumerate(texts)}
    answers_of_texts: list[PhraseAnswer | None] = [None] * len(texts)
    unknown = []
    repeated = 0
    for answer in answers:
        number = numbers.get(answer.caption)
        if number is None:
            unknown.append(answer)
            continue
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
    return PhraseMatches(answers_of_texts, repeated, unknown)


def boxes_as_array(boxes: Boxes) -> np.ndarray:
    """Return boxes as float64 [n, 4]."""
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)
