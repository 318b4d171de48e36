"""Parses of captions, found by the characters of the caption and aligned with it.

Parses come from a CoNLL-U file in any order, or from spaCy where it is installed with a model. White space does not
count, and the signs of the Penn Treebank for brackets and quotation marks (`-LRB-`, `` `` ``) are those that they stand
for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from detector.errors import UserError
from e2e_vl.data.formats.conllu import ParsedWord, read_conllu

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
