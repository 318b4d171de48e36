"""How an encoder lays texts out as wordpieces and segments, and where it keeps the summary of a text.

An encoder declares a `TextLayout`; a task puts its texts into one of the three forms with a `TextWriter` and never asks
which encoder it is for.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int64
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from e2e_vl.text import mirror_words

Pieces = Sequence[int] | np.ndarray  # wordpiece ids, or values of wordpieces
Cut = Literal[
    "ends", "fronts", "fronts_too_much"
]  # how two texts that are too long together become shorter, see `TextWriter.pair`
FIRST_KEPT = 32  # wordpieces of a first text that is not cut at its front
CLS, SEP, MASK = "cls_token_id", "sep_token_id", "mask_token_id"  # attributes of a tokenizer


@dataclasses.dataclass(frozen=True)
class Template:
    """A sequence of special wordpieces and places for texts."""

    # `CLS`, `SEP` or `MASK` for that wordpiece; a number for the text of that number, from 0
    parts: tuple[str | int, ...]
    segments: tuple[int, ...]  # segment id of each part
    # the part whose output state is the summary of text and image; None: the encoder's pooled vector
    summary: int | None = None

    @property
    def extra(self) -> int:
        """Wordpieces that do not belong to a text."""
        return sum(isinstance(part, str) for part in self.parts)


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """The forms of text that an encoder was made for. The defaults are BERT's."""

    single: Template = Template((CLS, 0, SEP), (0, 0, 0))  # one text
    question: Template = Template((CLS, 0, SEP), (0, 0, 0))  # one text whose answer is read at a place of its own
    # two texts, such as a question and one of its answers
    pair: Template = Template((CLS, 0, SEP, 1, SEP), (0, 0, 0, 1, 1))


BARE = Template((0,), (0,))  # wordpieces alone


@dataclasses.dataclass(frozen=True)
class LaidText:
    """One text as wordpieces."""

    input_ids: Int64[np.ndarray, " L"]
    segment_ids: Int64[np.ndarray, " L"]
    source: Int64[np.ndarray, " L"]  # which given piece stands here, all texts counted through; -1: a special one
    summary: int | None = None  # position of the summary; None: the encoder's pooled vector
    num_cut: int = 0  # pieces that were cut off

    def place(self, values: Pieces, fill: int = -1) -> Int64[np.ndarray, " L"]:
        """A value of each given piece at its position, `fill` at special wordpieces."""
        padded = np.array([*values, fill], dtype=np.int64)
        return padded[self.source]


@dataclasses.dataclass(frozen=True)
class TextWriter:
    """Puts texts into wordpieces, in the layout that the encoder declares."""

    tokenizer: PreTrainedTokenizerBase  # of the encoder
    layout: TextLayout = dataclasses.field(default_factory=TextLayout)  # of the encoder
    max_length: int | None = None  # longest sequence in wordpieces, special ones included; None: no limit
    is_blank: bool = False  # drop all words: the control that sees no text
    training: bool = False  # random choices are made that only training makes
    marks_phrases: bool = False  # say which wordpieces are phrases

    def pieces(self, text: str, *, mirrored: bool = False) -> list[int]:
        """Wordpiece ids of a text; of a mirrored image "left" and "right" change places (official VL-BERT code)."""
        if self.is_blank:
            return []
        tokens = self.tokenizer.tokenize(text)
        return self.tokenizer.convert_tokens_to_ids(mirror_words(tokens) if mirrored else tokens)

    def located_pieces(self, text: str, *, mirrored: bool = False) -> tuple[list[int], Int64[np.ndarray, "L 2"]]:
        """`pieces`, and of each of them the first character and the last plus one in the text."""
        if self.is_blank:
            return [], np.zeros((0, 2), dtype=np.int64)
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        tokens = mirror_words(encoding.tokens) if mirrored else encoding.tokens
        return self.tokenizer.convert_tokens_to_ids(tokens), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def single(self, pieces: Pieces) -> LaidText:
        """One text; what is too long loses its last pieces."""
        return self._cut(self.layout.single, pieces)

    def question(self, pieces: Pieces) -> LaidText:
        """One text with a place for its answer; what is too long loses its last pieces."""
        return self._cut(self.layout.question, pieces)

    def pair(self, first: Pieces, second: Pieces, cut: Cut = "ends") -> LaidText:
        """Two texts, shortened where they are too long together.

        With "ends" the longer loses its last piece until they fit, of equally long ones the second. With "fronts" and
        "fronts_too_much" both lose their first pieces, see `cut_fronts`; a second text of which nothing is left leaves
        a single one.
        """
        if cut == "ends" or self.max_length is None:
            return self._cut(self.layout.pair, first, second)
        lost = cut_fronts(
            len(first), len(second), self.max_length - self.layout.pair.extra, too_much=cut == "fronts_too_much"
        )
        template = self.layout.single if len(second) and lost[1] == len(second) else self.layout.pair
        return lay(template, (first, second), self.tokenizer, [slice(number, None) for number in lost])

    def bare(self, pieces: Pieces) -> LaidText:
        """Wordpieces without special ones; cutting them is the caller's business."""
        return lay(BARE, (pieces,), self.tokenizer)

    def require_room(self, template: Template) -> None:
        """Raises ValueError unless `max_length` leaves room for the special wordpieces of a form."""
        if self.max_length is not None and self.max_length < template.extra:
            raise UserError(
                f"data.max_text_length is {self.max_length}, but the special wordpieces alone need {template.extra}."
            )

    def _cut(self, template: Template, *texts: Pieces) -> LaidText:
        kept = list(map(len, texts))
        while self.max_length is not None and sum(kept) > max(self.max_length - template.extra, 0):
            longest = max(range(len(kept)), key=lambda number: (kept[number], number))
            kept[longest] -= 1
        return lay(template, texts, self.tokenizer, [slice(number) for number in kept])


def cut_fronts(first: int, second: int, room: int, *, too_much: bool = False) -> tuple[int, int]:
    """How many pieces two texts lose at their fronts, from their lengths and the room for both (VisualBERT).

    Of the surplus the first text loses half, rounded up, but not from its last `FIRST_KEPT` pieces. The second loses
    the rest, and what it is too short for the first loses too. With `too_much` the second loses the surplus and once
    more what the first lost, where the difference would be enough: a wrong sign in the official code.
    """
    over = max(first + second - room, 0)
    lost = min((over + 1) // 2, max(first - FIRST_KEPT, 0))
    if too_much:
        return lost, min(over + lost, second) if over else 0
    from_second = min(over - lost, second)
    return over - from_second, from_second


def lay(
    template: Template, texts: Sequence[Pieces], tokenizer: PreTrainedTokenizerBase, kept: Sequence[slice] | None = None
) -> LaidText:
    """Fill a template with the pieces of its texts, or with the pieces that `kept` selects of each.

    Further texts, for which the template has no place, must lose all of theirs.
    """
    lengths = list(map(len, texts))
    numbers = [range(length) for length in lengths]
    starts, kept = [0, *itertools.accumulate(lengths)], kept or [slice(None)] * len(texts)
    ids: list[int] = []
    segments: list[int] = []
    source: list[int] = []
    summary = None
    for number, (part, segment) in enumerate(zip(template.parts, template.segments, strict=True)):
        if number == template.summary:
            summary = len(ids)
        is_special = isinstance(part, str)
        ids.extend([getattr(tokenizer, part)] if is_special else texts[part][kept[part]])  # `+=` would add an array
        source.extend([-1] if is_special else (starts[part] + number for number in numbers[part][kept[part]]))
        segments += [segment] * (len(ids) - len(segments))
    arrays = (np.array(values, dtype=np.int64) for values in (ids, segments, source))
    return LaidText(*arrays, summary=summary, num_cut=sum(lengths) - sum(place >= 0 for place in source))
