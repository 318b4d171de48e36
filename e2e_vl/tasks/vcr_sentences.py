"""VCR's sentences as wordpieces that know which object they name, as the official codes of VL-BERT and VisualBERT do.

["Why", "is", [0, 2], "smiling", "?"]  ->  why is casey and riley smiling ?
                                                  0          2

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from e2e_vl.layout import LaidText
from e2e_vl.samples import Sentence

PERSON = "person"
_TAG = re.compile(r"\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]")
NEUTRAL_NAMES = (
    *("Casey", "Riley", "Jessie", "Jackie", "Avery", "Jaime", "Peyton", "Kerry"),
    *("Jody", "Kendall", "Frankie", "Pat", "Quinn"),
)


class Piece(NamedTuple):
    """One wordpiece."""

    id: int
    row: int  # of the candidate box that it names; -1 = none
    word: int  # which word of the sentence it belongs to; "and" between two objects is a word of its own


def names_of(objects: Sequence[str], names: Sequence[str] = NEUTRAL_NAMES, start: int = 0) -> list[str]:
    """What the text calls each object: people get the neutral names in turn, from `start` on; others their class."""
    result, person = [], start
    for name in objects:
        result.append(names[person % len(names)] if name == PERSON else name)
        person += name == PERSON
    return result


def names_by_mention(
    sentence: Sentence,
    objects: Sequence[str],
    names: Sequence[str],
    known: Mapping[int, str],
    *,
    restarts: bool = False,
) -> dict[int, str]:
    """What the text calls each object that is `known` or that a sentence names: people get the names in turn.

    The turn goes on behind the known people. With `restarts` it begins with the first name, whoever is known already,
    so two people may share a name (R2C's code, which VisualBERT uses).
    """
    called = dict(known)
    person = 0 if restarts else sum(objects[number] == PERSON for number in known)
    for number in (one for token in sentence if isinstance(token, list) for one in token):
        if number not in called:
            is_person = objects[number] == PERSON
            called[number] = names[person % len(names)] if is_person else objects[number]
            person += is_person
    return called


def said_words(sentence: Sentence, names: Sequence[str], join_word: str | None = "and") -> list[tuple[str, int]]:
    """The words of the sentence, objects replaced by their names, each with the object that it names (-1 = none)."""
    words: list[tuple[str, int]] = []
    for token in sentence:
        if isinstance(token, str):
            words.append((token, -1))
            continue
        for position, index in enumerate(token):
            if position and join_word:
                words.append((join_word, -1))
            words.append((names[index], index))
    return words


def plain_text(sentence: Sentence, names: Sequence[str], join_word: str | None = "and") -> str:
    """The sentence in words, objects replaced by their names."""
    return " ".join(word for word, _ in said_words(sentence, names, join_word))


def encode_sentence(
    sentence: Sentence,
    names: Sequence[str],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    join_word: str | None = "and",
    first_word: int = 0,
) -> list[Piece]:
    """Split every token into wordpieces; pieces of an object's name carry the row of its box.

    Args:
        names: what each object is called.
        rows: candidate box of each object.
        join_word: between several objects, naming none; None leaves it out (R2C).
        first_word: number of the sentence's first word.
    """
    pieces = []
    for number, (word, named) in enumerate(said_words(sentence, names, join_word), start=first_word):
        ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))
        pieces += [Piece(piece, rows[named] if named >= 0 else -1, number) for piece in ids]
    return pieces


def number_of_words(sentence: Sentence, join_word: str | None = "and") -> int:
    """Words of a sentence as `encode_sentence` counts them, those without a wordpiece included."""
    joints = int(bool(join_word))
    return sum(1 if isinstance(token, str) else len(token) + joints * (len(token) - 1) for token in sentence)


def rows_by_word_number(laid: LaidText, *texts: Sequence[Piece]) -> Int64[np.ndarray, " L"]:
    """The row of each named object at the position that its word would have if no word were split; -1 elsewhere.

    The number of a word counts from the start of its own text. So behind a split word, positions are too small, and at
    a text whose front was cut off they are too large; what lies behind the end is left out (official VisualBERT code,
    which mixes up words and wordpieces).
    """
    rows, first = np.full(len(laid.input_ids), -1, dtype=np.int64), 0
    for pieces in texts:
        for piece in pieces:
            position = int(np.flatnonzero(laid.source == first)[0]) + piece.word
            if piece.row >= 0 and position < len(rows):
                rows[position] = piece.row
        first += len(pieces)
    return rows


def cut_choices(front: Sequence[Piece], choices: list[list[Piece]], limit: int) -> None:
    """Cut what stands in front + choice to `limit` wordpieces, in place: the choice loses its first pieces.

    (A mistake of the official VisualBERT code, which means to cut the front too, as `e2e_vl.layout.cut_fronts` does,
    but takes the length of a pair for its length.)

    Raises:
        ValueError: what stands in front is too long by itself.
    """
    if len(front) > limit:
        raise UserError(f"The {len(front)} wordpieces in front of the choices are more than the limit, {limit}.")
    for choice in choices:
        del choice[: max(len(front) + len(choice) - limit, 0)]


def cut_answers(question: list[Piece], answers: list[list[Piece]], limit: int) -> None:
    """Cut question + answer to `limit` wordpieces, in place: the longer loses its last piece, on a tie the question.

    The four choices share the question, so what one of them takes away is gone for all (official code).
    """
    for answer in answers:
        while len(question) + len(answer) > limit:
            (answer if len(answer) > len(question) else question).pop()


def cut_rationales(question: list[Piece], answer: list[Piece], rationales: list[list[Piece]], limit: int) -> None:
    """Cut question + answer + rationale to `limit` wordpieces, in place.

    The rationale is cut while it is longer than question and answer together; else the question down to one piece, then
    the answer (official code).
    """
    for rationale in rationales:
        while len(question) + len(answer) + len(rationale) > limit:
            if len(rationale) > len(question) + len(answer):
                rationale.pop()
            elif len(question) > 1:
                question.pop()
            else:
                answer.pop()


def read_sentence(text: str, num_objects: int) -> Sentence:
    """Words and lists of objects of a text such as "Why is [0] smiling at [1,2]?".

    Raises:
        ValueError: a tag of an object that is not given, or no word at all.
    """
    sentence: Sentence = []
    for position, part in enumerate(_TAG.split(text)):  # text, tag, text, tag, ...
        if position % 2 == 0:
            sentence += part.split()
            continue
        objects = [int(number) for number in part.split(",")]
        if max(objects) >= num_objects:
            raise UserError(
                f"'{text}' names the object [{max(objects)}], but {num_objects} boxes are given (counted from 0); give "
                "its box too."
            )
        sentence.append(objects)
    if not sentence:
        raise UserError("The question or one of the choices is empty.")
    return sentence
