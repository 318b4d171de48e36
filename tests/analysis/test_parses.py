"""Parses are found by their text and aligned with it; spaCy is imitated."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from e2e_vl.analysis.captions import ParsedWord, Parses, parse_with_spacy, place_words, read_parses


def words(*forms: str) -> list[ParsedWord]:
    return [ParsedWord(form, "X", row - 1, "dep") for row, form in enumerate(forms)]


def cut(parsed: list[ParsedWord], text: str) -> list[str]:
    return [text[slice(*word.span)] for word in place_words(parsed, text)]


def test_words_are_placed_in_the_caption():
    text = 'A man\'s  red car ( 3 ) , "old".'
    forms = ["A", "man", "'s", "red", "car", "-LRB-", "3", "-RRB-", ",", "``", "old", "''", "."]
    assert cut(words(*forms), text) == ["A", "man", "'s", "red", "car", "(", "3", ")", ",", '"', "old", '"', "."]
    assert [word.governor for word in place_words(words("A", "b"), "A b")] == [-1, 0]
    assert cut(words("New York", "x"), "New York x") == ["New York", "x"]
    joined = [*words("a"), ParsedWord("isn't", "X", 0, "cop"), ParsedWord("isn't", "X", 0, "neg", joined=1)]
    assert cut(joined, "a isn't") == ["a", "isn't", "isn't"]


def test_a_parse_of_another_text_is_refused():
    with pytest.raises(ValueError, match=r"'a star' has the word 'stars' where 'star' stands"):
        place_words(words("a", "stars"), "a star")
    with pytest.raises(ValueError, match=r"'a star \.' ends before '\.'"):
        place_words(words("a", "star"), "a star .")


def test_parses_are_found_whatever_the_white_space():
    parses = Parses.of([words("A", "star", "."), words("``", "x", "''")], "here")
    assert len(parses) == 2
    assert [word.span for word in parses.find("A star.")] == [(0, 1), (2, 6), (6, 7)]
    assert parses.find('" x "') is not None and parses.find("A stars.") is None
    assert len(Parses.of([words("A", "b"), words("A", "b")], "here")) == 1
    other = [ParsedWord("A", "X", 1, "dep"), ParsedWord("b", "X", -1, "root")]
    with pytest.raises(ValueError, match="here: the sentence 'A b' is parsed twice, and not alike"):
        Parses.of([words("A", "b"), other], "here")


def test_a_file_without_sentences_is_refused(tmp_path):
    (tmp_path / "empty.conllu").write_text("# nothing\n\n")
    with pytest.raises(ValueError, match=r"empty\.conllu: there is no sentence"):
        read_parses(tmp_path / "empty.conllu")


def test_spacy_parses_each_text_once(monkeypatch):
    asked, annotated = [], [True]

    class Document(list):
        def has_annotation(self, name: str) -> bool:
            return name == "DEP" and annotated[0]

    def document(text: str):
        tokens = [SimpleNamespace(i=i, text=form, pos_="X", dep_="dep") for i, form in enumerate(text.split(" "))]
        for token in tokens:
            token.is_space = not token.text
            token.head = tokens[-1]
        return Document(tokens)

    def load(name: str, **options):
        if name == "missing":
            raise OSError("no such model")
        return SimpleNamespace(pipe=lambda texts: [asked.append(text) or document(text) for text in texts])

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load))
    parses = parse_with_spacy(["a  star", "a  star", "b"], "small")
    assert asked == ["a  star", "b"] and parses.origin == "spaCy, small"
    found = parses.find("a star")
    assert [(word.span, word.governor) for word in found] == [((0, 1), 1), ((2, 6), -1)]
    annotated[0] = False
    with pytest.raises(ValueError, match="the spaCy model has no parser"):
        parse_with_spacy(["a"], "small")
    with pytest.raises(ValueError, match=r"no model 'missing'; install it \(python -m spacy download missing\)"):
        parse_with_spacy(["a"], "missing")
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(ValueError, match="needs spaCy; install it with pip install"):
        parse_with_spacy(["a"], "small")
