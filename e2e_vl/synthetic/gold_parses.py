"""Gold parses of drawn captions, in CoNLL-U with the labels of Stanford's dependencies, as in VisualBERT's ACL paper.

A caption has no verb but "is still": the noun of its first phrase is the root, and the noun of every other phrase
hangs on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from detector.errors import UserError

_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ARTICLES = ("the", "a", "an")


class GoldWord(NamedTuple):
    """A word of a parse."""

    form: str
    kind: str  # part of speech, of Universal Dependencies
    governor: int  # row from 0; -1: the root
    relation: str


def parse_of(parts: Sequence[tuple[str, bool]]) -> list[GoldWord]:
    """The parse of a caption of `flickr30k_writer`, given as texts, each with whether it is a phrase.

    Raises:
        ValueError: a caption that these rules do not know.
    """
    words: list[GoldWord] = []
    root = None  # row of the noun of the first phrase
    preposition = mark = None  # rows that wait for the phrase behind them
    for text, is_phrase in parts:
        start = len(words)
        own = text.split()
        if is_phrase:
            noun = start + len(own) - 1
            for word in own[:-1]:
                words.append(_before_noun(word, noun))
            kind = "NOUN"
            if preposition is not None:
                governor, relation, preposition = preposition, "pobj", None
            elif mark is not None:
                # "while it is still": still governs, two words behind the pronoun
                governor, relation, kind = noun + 2, "nsubj", "PRON"
            else:
                governor, relation = (-1, "root") if root is None else (root, "conj")
                root = noun if root is None else root
            words.append(GoldWord(own[-1], kind, governor, relation))
        elif text in (",", "."):
            words.append(GoldWord(text, "PUNCT", root, "punct"))
        elif text == "and":
            words.append(GoldWord(text, "CCONJ", root, "cc"))
        elif text == "in":
            preposition = start
            words.append(GoldWord(text, "ADP", root, "prep"))
        elif text == "while":
            mark = start
            words.append(GoldWord(text, "SCONJ", start + 3, "mark"))
        elif text == "is still":
            words.append(GoldWord("is", "AUX", start + 1, "cop"))
            words.append(GoldWord("still", "ADJ", root, "advcl"))
        else:
            raise UserError(f"'{text}' has no rule in the parses of drawn captions")
    return words


def _before_noun(word: str, noun: int) -> GoldWord:
    if word.lower() in _ARTICLES:
        return GoldWord(word, "DET", noun, "det")
    if word.lower() in _NUMBERS:
        return GoldWord(word, "NUM", noun, "num")
    return GoldWord(word, "ADJ", noun, "amod")


def conllu_lines(name: str, words: Iterable[GoldWord]) -> str:
    """One sentence of a CoNLL-U file, with the empty line behind it."""
    words = list(words)
    lines = [f"# sent_id = {name}", f"# text = {' '.join(word.form for word in words)}"]
    for row, word in enumerate(words, start=1):
        cells = (row, word.form, "_", word.kind, "_", "_", word.governor + 1, word.relation, "_", "_")
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n\n"
