"""A caption as the encoder reads it, with the wordpieces of its phrases and of the words of its parse.

No word is masked and nothing is asked: it is the same for every task that a run was trained for.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from detector.errors import UserError
from e2e_vl.examples import GeneratorFactory, ImageExample, Preprocessor, TextExample
from e2e_vl.io import read_text
from e2e_vl.samples import Sample, SampleText


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedWord:
    """One word of a parsed sentence."""

    form: str  # as written; the words of a contraction have the same form
    kind: str  # part of speech, "_" where the file has none
    governor: int  # row of the governing word from 0; -1: the root
    relation: str  # to the governor, in the labels of the file
    joined: int = 0  # words after the first of a contraction count 1, 2, ...


def read_conllu(path: str | Path) -> Iterator[list[ParsedWord]]:
    """The sentences of a CoNLL-U file, one after the other.

    Raises:
        UserError: a line that is no word, or there is no sentence in the file.
    """
    lines = read_text(path).splitlines()
    sentences = 0
    for is_word, own in itertools.groupby(enumerate(lines, start=1), key=lambda row: bool(row[1].strip())):
        rows = [(number, line.split("\t")) for number, line in own if is_word and not line.startswith("#")]
        if rows:
            sentences += 1
            yield _sentence(path, rows)
    if not sentences:
        raise UserError(f"{path}: there is no sentence in the file; parse the captions first.")


def _sentence(path: str | Path, rows: list[tuple[int, list[str]]]) -> list[ParsedWord]:
    words: list[ParsedWord] = []
    contraction, first, last = "", 0, -1  # the words first .. last are written as one
    count = sum(cells[0].isdecimal() for _, cells in rows)
    for line, cells in rows:
        try:
            number, form, _, kind, _, _, governor, relation, _, _ = cells
            if "." in number:  # an empty word, which the text does not have
                continue
            if "-" in number:
                contraction, (first, last) = form, map(int, number.split("-"))
                continue
            own, above = int(number), int(governor)
            if own != len(words) + 1 or not 0 <= above <= count:
                raise ValueError
        except ValueError as error:
            raise UserError(
                f"{path}, line {line}: not a word of CoNLL-U (10 columns divided by tabs, words numbered from 1, a "
                "governor in the sentence); parse the sentence again."
            ) from error
        is_joined = first <= own <= last
        joined = own - first if is_joined else 0
        words.append(ParsedWord(contraction if is_joined else form, kind, above - 1, relation, joined))
    return words


# Parses of captions, found by the characters of the caption and aligned with it.


_SIGNS = {
    "-LRB-": "(",
    "-RRB-": ")",
    "-LSB-": "[",
    "-RSB-": "]",
    "-LCB-": "{",
    "-RCB-": "}",
    "``": '"',
    "''": '"',
}


@dataclasses.dataclass(frozen=True)
class PlacedWord:
    """A word of a parse in its caption."""

    span: tuple[int, int]  # first character and the last plus one
    governor: int  # row of the governing word; -1: the root
    relation: str


@dataclasses.dataclass(frozen=True)
class Parses:
    """The parses of some captions. It is sent to data workers."""

    by_text: Mapping[str, tuple[ParsedWord, ...]]  # under `plain_characters`
    origin: str  # a file or a model, for messages

    @classmethod
    def of(cls, sentences: Iterable[Sequence[ParsedWord]], origin: str) -> Parses:
        """Raises ValueError for two different parses of one text."""
        found: dict[str, tuple[ParsedWord, ...]] = {}
        for words in sentences:
            forms = [word.form for word in words if not word.joined]
            own = found.setdefault(plain_characters("".join(forms)), tuple(words))
            if own != tuple(words):
                raise UserError(
                    f"{origin}: the sentence '{' '.join(forms)}' is parsed twice, and not alike; remove one of the two"
                )
        return cls(found, origin)

    def find(self, words: str) -> list[PlacedWord] | None:
        """The parse of a caption; None if there is none."""
        found = self.by_text.get(plain_characters(words))
        return None if found is None else place_words(found, words)

    def __len__(self) -> int:
        return len(self.by_text)


def plain_characters(text: str) -> str:
    """The characters of a text without white space, with signs of the Penn Treebank replaced."""
    text = "".join(text.split())
    for sign, meaning in _SIGNS.items():
        text = text.replace(sign, meaning)
    return text


def place_words(parsed: Sequence[ParsedWord], words: str) -> list[PlacedWord]:
    """The characters of each word in the caption that it was parsed from.

    Raises:
        ValueError: the words are not those of the caption.
    """
    placed, end, span = [], 0, (0, 0)
    for word in parsed:
        if not word.joined:  # words that are written as one have the same characters
            start = end + len(words[end:]) - len(words[end:].lstrip())
            end = _end_of(word.form, words, start)
            span = start, end
        placed.append(PlacedWord(span, word.governor, word.relation))
    if words[end:].strip():
        raise UserError(f"The parse of '{words}' ends before '{words[end:].strip()}'; parse the caption again.")
    return placed


def _end_of(form: str, words: str, start: int) -> int:
    """Behind the form at a place of the text."""
    for spelled in (form, plain_characters(form)):
        at = start
        for character in "".join(spelled.split()):
            while at < len(words) and words[at].isspace():
                at += 1
            if at >= len(words) or words[at] != character:
                break
            at += 1
        else:
            return at
    near = words[start : start + 20]
    raise UserError(f"The parse of '{words}' has the word '{form}' where '{near}' stands; parse the caption again.")


def read_parses(path: str | Path) -> Parses:
    """The parses of a CoNLL-U file.

    Raises:
        FileNotFoundError, ValueError: see `read_conllu`.
    """
    return Parses.of(read_conllu(path), str(path))


def parse_with_spacy(texts: Iterable[str], model: str) -> Parses:
    """Parses that a spaCy model makes, one per different text.

    Raises:
        ValueError: spaCy or the model is not installed.
    """
    try:
        import spacy

        pipeline = spacy.load(model, exclude=["ner", "lemmatizer"])
    except ImportError as error:
        raise UserError(
            'Parsing needs spaCy; install it with pip install "e2e-vl[parse]", or give a CoNLL-U file of parses.'
        ) from error
    except OSError as error:
        raise UserError(
            f"spaCy has no model '{model}'; install it (python -m spacy download {model}), or give a CoNLL-U file of "
            "parses."
        ) from error
    return Parses.of(_spacy_sentences(pipeline, texts), f"spaCy, {model}")


def _spacy_sentences(pipeline, texts: Iterable[str]) -> Iterator[list[ParsedWord]]:
    """The words of each different text; words of white space are no words."""
    for document in pipeline.pipe(dict.fromkeys(texts)):
        if not document.has_annotation("DEP"):
            raise UserError("the spaCy model has no parser; choose one that has, such as en_core_web_sm.")
        kept = [token for token in document if not token.is_space]
        rows = {token.i: row for row, token in enumerate(kept)}
        yield [
            ParsedWord(
                token.text, token.pos_, -1 if token.head.i == token.i else rows.get(token.head.i, -1), token.dep_
            )
            for token in kept
        ]


RECORD = "attention"  # key of a record under which the `CaptionAnnotations` are


@dataclasses.dataclass(frozen=True)
class Relation:
    """A relation of a parse; both words have wordpieces."""

    governor: int  # row among the words of the caption
    dependent: int
    label: str


@dataclasses.dataclass(frozen=True)
class CaptionAnnotations:
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
class CaptionPreprocessor(Preprocessor):
    """Texts whose phrases the data state, each as a text of its own.

    Raises:
        ValueError: a text whose phrases are unknown, or (with `needs_parses`) one without a parse.
    """

    parses: Parses | None = None
    needs_parses: bool = True

    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], make_generator: GeneratorFactory
    ) -> Iterable[TextExample]:
        pieces, places, _ = self.text_tokenizer.encode(text.words)
        encoding = self.text_tokenizer.single(pieces)
        own = encoding.source >= 0
        at = np.where(own[:, None], places[encoding.source], 0) if len(places) else np.zeros((len(own), 2), np.int64)
        record = {**self.record(text, images, encoding), RECORD: self.caption(text, at, own, places)}
        yield TextExample(encoding, text.image_index, record)

    def caption(
        self,
        text: SampleText,
        places: Int64[np.ndarray, "L 2"],
        own: Bool[np.ndarray, " L"],
        uncut: Int64[np.ndarray, "pieces 2"],
    ) -> CaptionAnnotations:
        """What the measures need of a text.

        Args:
            places: characters of each wordpiece: the first and the last plus one.
            own: wordpieces of the text, not of the layout.
            uncut: the places of all wordpieces that the text has before it is cut.
        """
        phrases = text.phrases
        if phrases is None or phrases.boxes is None or not text.image_index:
            raise UserError(
                f"text {text.index} ('{text.words}') has no phrases with boxes; give data that state phrases."
            )
        found = [covered_pieces(places, own, uncut, span) for span in phrases.spans]
        kept = [row for row, span in enumerate(found) if span is not None]
        parsed = None if self.parses is None else self.parses.find(text.words)
        if parsed is None and self.parses is not None and self.needs_parses:
            raise UserError(
                f"{self.parses.origin}: the caption '{text.words}' has no parse; parse it, or give --missing-parse "
                "skip."
            )
        words = [(word, covered_pieces(places, own, uncut, word.span)) for word in parsed or plain_words(text.words)]
        new_row = {row: new for new, row in enumerate(row for row, (_, span) in enumerate(words) if span is not None)}
        phrase_of = [_phrase_of(word.span, [phrases.spans[row] for row in kept]) for word, _ in words]
        return CaptionAnnotations(
            words=text.words,
            phrases=[text.words[slice(*phrases.spans[row])] for row in kept],
            phrase_spans=np.array([found[row] for row in kept], dtype=np.int64).reshape(-1, 2),
            boxes=[np.asarray(phrases.boxes[row], dtype=np.float64).reshape(-1, 4) for row in kept],
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
