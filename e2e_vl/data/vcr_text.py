"""VCR's sentences as wordpieces that know which object they name, as the official VL-BERT code makes them.

["Why", "is", [0, 2], "smiling", "?"]  ->  why is casey and riley smiling ?
                                                  0          2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from e2e_vl.data.vcr_files import Sentence

PERSON = "person"
EVERYONE = ("everyone", "everyones")  # name all people under R2C's rule
NEUTRAL_NAMES = (
    "Casey",
    "Riley",
    "Jessie",
    "Jackie",
    "Avery",
    "Jaime",
    "Peyton",
    "Kerry",
    "Jody",
    "Kendall",
    "Frankie",
    "Pat",
    "Quinn",
)
# The 80 classes of COCO as VCR spells them, in COCO's order. Their numbers are 1 to 80; 0 is the whole image.
# fmt: off
CLASS_NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "trafficlight",
    "firehydrant", "stopsign", "parkingmeter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sportsball", "kite", "baseballbat", "baseballglove", "skateboard", "surfboard", "tennisracket", "bottle",
    "wineglass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hotdog", "pizza", "donut", "cake", "chair", "couch", "pottedplant", "bed", "diningtable", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cellphone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddybear", "hairdrier", "toothbrush",
)
# fmt: on


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


def mentioned_objects(sentences: Iterable[Sentence]) -> list[int]:
    """Objects that the sentences name, in the order of first mention (VL-BERT's rule)."""
    return list(
        dict.fromkeys(o for sentence in sentences for token in sentence if isinstance(token, list) for o in token)
    )


def relevant_objects(objects: Sequence[str], sentences: Sequence[Sentence]) -> list[int]:
    """Objects that R2C keeps, ascending: those named; all people if a sentence says "everyone" or nothing is named."""
    people = {index for index, name in enumerate(objects) if name == PERSON}
    kept = set(mentioned_objects(sentences))
    says_everyone = any(isinstance(t, str) and t.lower() in EVERYONE for sentence in sentences for t in sentence)
    return sorted(kept | people if says_everyone or not kept else kept)


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
        sentence: words and lists of objects.
        names: what each object is called.
        rows: candidate box of each object.
        tokenizer: of the encoder.
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


def join_choice(
    query: Sequence[Piece], choice: Sequence[Piece], tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[CLS] query [SEP] choice [SEP]`, segment 1 from the choice on.

    Returns:
        input ids, segment ids and the rows of named candidate boxes (-1 = none), each int64 [L].
    """
    cls, sep = Piece(tokenizer.cls_token_id, -1, -1), Piece(tokenizer.sep_token_id, -1, -1)
    first, second = [cls, *query, sep], [*choice, sep]
    pieces = np.array([*first, *second], dtype=np.int64).reshape(-1, len(Piece._fields))
    segments = np.repeat(np.array([0, 1], dtype=np.int64), [len(first), len(second)])
    return pieces[:, 0].copy(), segments, pieces[:, 1].copy()
