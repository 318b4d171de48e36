"""A caption as the encoder reads it, with the wordpieces of its phrases and of the words of its parse.

No word is masked and nothing is asked: it is the same for every task that a run was trained for.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int64

from detector.errors import UserError
from e2e_vl.analysis.parses import Parses, PlacedWord
from e2e_vl.examples import ImageExample, TextExample
from e2e_vl.samples import Sample, SampleText
from e2e_vl.wording import Draw, Wording

RECORD = "attention"  # key of a record under which the `CaptionFacts` are


@dataclasses.dataclass(frozen=True)
class Relation:
    """A relation of a parse; both words have wordpieces."""

    governor: int  # row among the words of the caption
    dependent: int
    label: str


@dataclasses.dataclass(frozen=True)
class CaptionFacts:
    """What is known about one caption. Positions are wordpieces: the first and the last plus one."""

    words: str  # as written
    phrases: list[str]
    phrase_spans: Int64[np.ndarray, "phrases 2"]
    boxes: list[np.ndarray]  # of each phrase float64 [boxes, 4], xyxy in pixels of the stored image; maybe none
    forms: list[str]  # words of the parse; without a parse what white space divides
    word_spans: Int64[np.ndarray, "words 2"]
    phrase_of: list[int]  # of each word the row of its phrase; -1: it is in none
    is_head: list[bool]  # the word governs the others of its phrase
    relations: list[Relation]
    is_word: Bool[np.ndarray, " L"]  # wordpieces that are no special ones
    is_parsed: bool = False
    phrases_cut: int = 0  # phrases that were cut off with the end of the text
    words_cut: int = 0


@dataclasses.dataclass(frozen=True)
class CaptionWording(Wording):
    """Texts whose phrases the data state, each as a text of its own.

    Raises:
        ValueError: a text whose phrases are unknown, or (with `needs_parses`) one without a parse.
    """

    parses: Parses | None = None
    needs_parses: bool = True

    def word(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        pieces, places = self.writer.located_pieces(text.words)
        laid = self.writer.single(pieces)
        own = laid.source >= 0
        at = np.where(own[:, None], places[laid.source], 0) if len(places) else np.zeros((len(own), 2), np.int64)
        record = {**self.record(text, images, laid), RECORD: self.facts(text, at, own, places)}
        yield TextExample(laid, text.looks_at, record)

    def facts(
        self,
        text: SampleText,
        places: Int64[np.ndarray, "L 2"],
        own: Bool[np.ndarray, " L"],
        uncut: Int64[np.ndarray, "pieces 2"],
    ) -> CaptionFacts:
        """What the measures need of a text.

        Args:
            places: characters of each wordpiece: the first and the last plus one.
            own: wordpieces of the text, not of the layout.
            uncut: the places of all wordpieces that the text has before it is cut.
        """
        stated = text.phrases
        if stated is None or stated.boxes is None or not text.looks_at:
            raise UserError(
                f"text {text.index} ('{text.words}') has no phrases with boxes; give data that state phrases."
            )
        found = [covered_pieces(places, own, uncut, span) for span in stated.spans]
        kept = [row for row, span in enumerate(found) if span is not None]
        parsed = None if self.parses is None else self.parses.find(text.words)
        if parsed is None and self.parses is not None and self.needs_parses:
            raise UserError(
                f"{self.parses.origin}: the caption '{text.words}' has no parse; parse it, or give --missing-parse "
                "skip."
            )
        words = [(word, covered_pieces(places, own, uncut, word.span)) for word in parsed or plain_words(text.words)]
        new_row = {row: new for new, row in enumerate(row for row, (_, span) in enumerate(words) if span is not None)}
        phrase_of = [_phrase_of(word.span, [stated.spans[row] for row in kept]) for word, _ in words]
        return CaptionFacts(
            words=text.words,
            phrases=[text.words[slice(*stated.spans[row])] for row in kept],
            phrase_spans=np.array([found[row] for row in kept], dtype=np.int64).reshape(-1, 2),
            boxes=[np.asarray(stated.boxes[row], dtype=np.float64).reshape(-1, 4) for row in kept],
            forms=[text.words[slice(*words[row][0].span)] for row in new_row],
            word_spans=np.array([words[row][1] for row in new_row], dtype=np.int64).reshape(-1, 2),
            phrase_of=[phrase_of[row] for row in new_row],
            is_head=[_leaves(row, [word.governor for word, _ in words], phrase_of) for row in new_row],
            relations=[
                Relation(new_row[word.governor], new_row[row], word.relation)
                for row, (word, _) in enumerate(words)
                if parsed is not None and row in new_row and word.governor in new_row
            ],
            is_word=own,
            is_parsed=parsed is not None,
            phrases_cut=len(found) - len(kept),
            words_cut=len(words) - len(new_row),
        )


def plain_words(words: str) -> list[PlacedWord]:
    """What white space divides, without relations."""
    return [PlacedWord(found.span(), -1, "") for found in re.finditer(r"\S+", words)]


def covered_pieces(
    places: Int64[np.ndarray, "L 2"],
    own: Bool[np.ndarray, " L"],
    uncut: Int64[np.ndarray, "pieces 2"],
    span: tuple[int, int],
) -> tuple[int, int] | None:
    """The wordpieces that share characters with a span; None if any of them was cut off."""
    inside = np.flatnonzero(own & _touches(places, span))
    is_whole = 0 < len(inside) == np.count_nonzero(_touches(uncut, span))
    return (int(inside[0]), int(inside[-1]) + 1) if is_whole else None


def _touches(places: Int64[np.ndarray, "pieces 2"], span: tuple[int, int]) -> Bool[np.ndarray, " pieces"]:
    return (places[:, 0] < span[1]) & (places[:, 1] > span[0])


def _phrase_of(span: tuple[int, int], phrases: Sequence[tuple[int, int]]) -> int:
    """The shortest phrase in which a word begins."""
    inside = [row for row, (first, end) in enumerate(phrases) if first <= span[0] < end]
    return min(inside, key=lambda row: phrases[row][1] - phrases[row][0], default=-1)


def _leaves(row: int, governors: Sequence[int], phrase_of: Sequence[int]) -> bool:
    """Whether the governor of a word is outside of its phrase."""
    above = governors[row]
    return phrase_of[row] >= 0 and (above < 0 or phrase_of[above] != phrase_of[row])
