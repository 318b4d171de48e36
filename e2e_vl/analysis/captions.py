"""Captions as encoder input, aligned with their phrases and parses.

Captions are plain texts without masked words, whatever task the run was trained for.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.io import read_text
from e2e_vl.predictions import Prediction
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import Sample, SampleText
from e2e_vl.transforms import LoadedImage


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedWord:
    """One word of a parsed sentence."""

    form: str  # as written; the words of a contraction share one form
    governor: int  # row of the governing word from 0; -1: the root
    relation: str  # to the governor, in the labels of the file
    is_joined: bool = False  # it continues the contraction of the previous word


def read_conllu(path: str | Path) -> Iterator[list[ParsedWord]]:
    """Read the sentences of a CoNLL-U file."""
    lines = enumerate(read_text(path).splitlines(), start=1)
    for has_text, group in itertools.groupby(lines, key=lambda row: bool(row[1].strip())):
        if not has_text:  # the empty lines between two sentences
            continue
        rows = [(number, line.split("\t")) for number, line in group if not line.startswith("#")]
        if rows:
            yield _parse_sentence(path, rows)


def _parse_sentence(path: str | Path, rows: list[tuple[int, list[str]]]) -> list[ParsedWord]:
    """Return the words of a sentence, from the numbers and the cells of its lines."""
    words: list[ParsedWord] = []
    contraction = ""
    first, last = 0, -1  # the words first .. last are written as the contraction
    for line, cells in rows:
        try:
            number, form, _, _, _, _, governor, relation, _, _ = cells
            if "." in number:  # an empty node, which is not part of the text
                continue
            if "-" in number:
                contraction = form
                first, last = map(int, number.split("-"))
                continue
            position = int(number)
            if position != len(words) + 1:
                raise ValueError
            if first <= position <= last:
                form = contraction
            is_joined = first < position <= last
            words.append(ParsedWord(form, int(governor) - 1, relation, is_joined))
        except ValueError as error:
            raise UserError(
                f"{path}, line {line}: not a word of CoNLL-U (10 columns divided by tabs, words numbered from 1); "
                "parse the sentence again."
            ) from error
    return words


# Parses of captions, looked up by the characters of the caption and aligned with it.


_SYMBOLS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}", "``": '"', "''": '"'}
_CHARACTER = re.compile("|".join([*map(re.escape, _SYMBOLS), r"\S"]))  # a Penn Treebank symbol counts as one character


@dataclasses.dataclass(frozen=True)
class PlacedWord:
    """A parsed word with its position in the caption."""

    span: tuple[int, int]  # first character, last character plus one
    governor: int = -1  # row of the governing word; -1: the root
    relation: str = ""


@dataclasses.dataclass(frozen=True)
class Parses:
    """The parses of captions; pickled for data workers."""

    by_text: Mapping[str, tuple[ParsedWord, ...]]  # keys are `plain_characters` of the text
    origin: str  # file or spaCy model, for messages

    @classmethod
    def from_sentences(cls, sentences: Iterable[Sequence[ParsedWord]], origin: str) -> Parses:
        """Index parsed sentences by text; the first of duplicate texts wins."""
        by_text: dict[str, tuple[ParsedWord, ...]] = {}
        for words in sentences:
            text = "".join(plain_characters(word.form) for word in words if not word.is_joined)
            by_text.setdefault(text, tuple(words))
        return cls(by_text, origin)

    def find(self, words: str) -> list[PlacedWord] | None:
        """Return the parse of a caption, with the position of each word in the text; None if there is none."""
        parsed_words = self.by_text.get(plain_characters(words))
        if parsed_words is None:
            return None
        character_spans = [match.span() for match in _CHARACTER.finditer(words)]
        placed_words = []
        end = 0  # number of characters up to the end of the word
        for word in parsed_words:
            length = len(plain_characters(word.form))
            if not word.is_joined:
                end += length
            first_character = character_spans[end - length]
            last_character = character_spans[end - 1]
            span = (first_character[0], last_character[1])
            placed_words.append(PlacedWord(span, word.governor, word.relation))
        return placed_words


def plain_characters(text: str) -> str:
    """Remove whitespace, and replace Penn Treebank symbols such as -LRB- by the characters they stand for."""
    return "".join(_SYMBOLS.get(character, character) for character in _CHARACTER.findall(text))


def read_parses(path: str | Path) -> Parses:
    """Read the parses of a CoNLL-U file."""
    return Parses.from_sentences(read_conllu(path), str(path))


def parse_with_spacy(texts: Iterable[str], model: str) -> Parses:
    """Parse each distinct text with a spaCy model; whitespace tokens are dropped."""
    try:
        import spacy

        pipeline = spacy.load(model, exclude=["ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise UserError(
            f"spaCy or its model '{model}' is not installed; install them (pip install 'e2e-vl[parse]', python -m "
            f"spacy download {model}), or give a CoNLL-U file of parses."
        ) from error
    sentences = []
    for document in pipeline.pipe(dict.fromkeys(texts)):
        tokens = [token for token in document if not token.is_space]
        rows = {token.i: row for row, token in enumerate(tokens)}
        words = []
        for token in tokens:
            is_root = token.head.i == token.i
            governor = -1 if is_root else rows.get(token.head.i, -1)
            words.append(ParsedWord(token.text, governor, token.dep_))
        sentences.append(words)
    return Parses.from_sentences(sentences, f"spaCy, {model}")


CAPTION_KEY = "caption"  # key of the `CaptionAnnotations` in a record


@dataclasses.dataclass(frozen=True)
class Relation:
    """A relation of a parse; both words have wordpieces."""

    governor: int  # row among the words of the caption
    dependent: int
    label: str


@dataclasses.dataclass(frozen=True)
class CaptionAnnotations:
    """The phrases and words of one caption. Spans are half-open ranges of wordpieces."""

    words: str  # as written
    phrases: list[str]
    phrase_spans: Int64[np.ndarray, "phrases 2"]
    boxes: list[np.ndarray]  # of each phrase float64 [boxes, 4], xyxy in pixels of the original image; maybe none
    forms: list[str]  # words of the parse, or without a parse the words between whitespace
    word_spans: Int64[np.ndarray, "words 2"]
    phrase_of: list[int]  # row of each word's phrase; -1 outside of phrases
    is_head: list[bool]  # the word governs the others of its phrase
    relations: list[Relation]
    is_word: Bool[np.ndarray, " L"]  # wordpieces other than special tokens
    is_parsed: bool = False
    truncated_phrases: int = 0  # phrases lost by truncation
    truncated_words: int = 0


@dataclasses.dataclass(frozen=True)
class CaptionPreprocessor(Preprocessor):
    """The preprocessor of texts with annotated phrases; with `needs_parses`, a text without a parse is an error."""

    parses: Parses | None = None
    needs_parses: bool = True
    prediction_class = Prediction
    learns_from = (object,)

    @override
    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        return {}  # only phrases matter

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        pieces, all_offsets, _ = self.text_tokenizer.encode(text.words)
        encoding = self.text_tokenizer.single(pieces)
        is_word = encoding.source >= 0
        offsets = np.zeros((len(is_word), 2), np.int64)
        offsets[is_word] = all_offsets[encoding.source[is_word]]
        record = self.record(text, images, encoding)
        record = {**record, CAPTION_KEY: self.caption(text, offsets, is_word, all_offsets)}
        yield EncodedText(encoding, text.image_index, record)

    def caption(
        self,
        text: SampleText,
        offsets: Int64[np.ndarray, "L 2"],
        is_word: Bool[np.ndarray, " L"],
        all_offsets: Int64[np.ndarray, "pieces 2"],
    ) -> CaptionAnnotations:
        """Align the phrases and words of a text with its wordpieces.

        Args:
            offsets: first character and last character plus one of each wordpiece.
            is_word: wordpieces other than special tokens.
            all_offsets: the offsets before truncation.
        """
        phrases = text.phrases
        if phrases is None or phrases.boxes is None or not text.image_index:
            raise UserError(f"text {text.index} ('{text.words}') has no phrases with boxes; give data with phrases.")
        parsed = None if self.parses is None else self.parses.find(text.words)
        if parsed is None and self.parses is not None and self.needs_parses:
            raise UserError(
                f"{self.parses.origin}: the caption '{text.words}' has no parse; give one, or --missing-parse skip."
            )
        # without a parse, split at whitespace
        words = parsed or [PlacedWord(match.span()) for match in re.finditer(r"\S+", text.words)]

        # phrases and words of which nothing was truncated
        phrase_pieces = [covered_pieces(offsets, is_word, all_offsets, span) for span in phrases.spans]
        whole_phrases = [row for row, pieces in enumerate(phrase_pieces) if pieces is not None]
        word_pieces = [covered_pieces(offsets, is_word, all_offsets, word.span) for word in words]
        whole_words = [row for row, pieces in enumerate(word_pieces) if pieces is not None]

        phrase_spans = [phrases.spans[row] for row in whole_phrases]
        phrase_of = [_phrase_of(word.span, phrase_spans) for word in words]
        is_head = []
        for word, phrase in zip(words, phrase_of, strict=True):
            # the governor of a head word is outside its phrase
            is_governed_inside = word.governor >= 0 and phrase_of[word.governor] == phrase
            is_head.append(phrase >= 0 and not is_governed_inside)
        relations = []
        if parsed is not None:
            new_row = {row: new for new, row in enumerate(whole_words)}
            for row in whole_words:
                word = words[row]
                if word.governor in new_row:
                    relations.append(Relation(new_row[word.governor], new_row[row], word.relation))
        return CaptionAnnotations(
            words=text.words,
            phrases=[text.words[first:end] for first, end in phrase_spans],
            phrase_spans=np.array([phrase_pieces[row] for row in whole_phrases], dtype=np.int64).reshape(-1, 2),
            boxes=[np.asarray(phrases.boxes[row], dtype=np.float64).reshape(-1, 4) for row in whole_phrases],
            forms=[text.words[slice(*words[row].span)] for row in whole_words],
            word_spans=np.array([word_pieces[row] for row in whole_words], dtype=np.int64).reshape(-1, 2),
            phrase_of=[phrase_of[row] for row in whole_words],
            is_head=[is_head[row] for row in whole_words],
            relations=relations,
            is_word=is_word,
            is_parsed=parsed is not None,
            truncated_phrases=len(phrase_pieces) - len(whole_phrases),
            truncated_words=len(words) - len(whole_words),
        )


def covered_pieces(
    offsets: Int64[np.ndarray, "L 2"],
    is_word: Bool[np.ndarray, " L"],
    all_offsets: Int64[np.ndarray, "pieces 2"],
    span: tuple[int, int],
) -> tuple[int, int] | None:
    """Return the wordpieces that overlap a span of characters; None if any of them was truncated."""
    inside = np.flatnonzero(is_word & _overlaps(offsets, span))
    number_before_truncation = np.count_nonzero(_overlaps(all_offsets, span))
    if len(inside) == 0 or len(inside) != number_before_truncation:
        return None
    return int(inside[0]), int(inside[-1]) + 1


def _overlaps(offsets: Int64[np.ndarray, "pieces 2"], span: tuple[int, int]) -> Bool[np.ndarray, " pieces"]:
    return (offsets[:, 0] < span[1]) & (offsets[:, 1] > span[0])


def _phrase_of(span: tuple[int, int], phrases: Sequence[tuple[int, int]]) -> int:
    """Return the row of the shortest phrase in which a word begins; -1: there is none."""
    begin = span[0]
    around = [row for row, (first, end) in enumerate(phrases) if first <= begin < end]

    def length(row: int) -> int:
        first, end = phrases[row]
        return end - first

    return min(around, key=length, default=-1)
