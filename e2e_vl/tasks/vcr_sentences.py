"""VCR's sentences as wordpieces that know which object they name, as the official VL-BERT code makes them.

["Why", "is", [0, 2], "smiling", "?"]  ->  why is casey and riley smiling ?
                                                  0          2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

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


def plain_text(sentence: Sentence, names: Sequence[str], join_word: str | None = "and") -> str:
    """The sentence in words, objects replaced by their names."""
    joint = f" {join_word} " if join_word else " "
    return " ".join(t if isinstance(t, str) else joint.join(names[o] for o in t) for t in sentence)


def encode_sentence(
    sentence: Sentence,
    names: Sequence[str],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    join_word: str | None = "and",
) -> list[Piece]:
    """Split every token into wordpieces; pieces of an object's name carry the row of its box.

    Args:
        names: what each object is called.
        rows: candidate box of each object.
        join_word: between several objects, naming none; None leaves it out (R2C).
    """
    words: list[tuple[str, int]] = []
    for token in sentence:
        if isinstance(token, str):
            words.append((token, -1))
            continue
        for position, index in enumerate(token):
            if position and join_word:
                words.append((join_word, -1))
            words.append((names[index], rows[index]))
    pieces = []
    for number, (word, row) in enumerate(words):
        ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))
        pieces += [Piece(piece, row, number) for piece in ids]
    return pieces


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
            raise ValueError(
                f"'{text}' names the object [{max(objects)}], but {num_objects} boxes are given (counted from 0); give "
                "its box too."
            )
        sentence.append(objects)
    if not sentence:
        raise ValueError("The question or one of the choices is empty.")
    return sentence
