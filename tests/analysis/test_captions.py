"""CoNLL-U files, parses aligned with their captions, and the wordpieces of phrases and parsed words."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from e2e_vl.analysis.captions import (
    CAPTION_KEY,
    CaptionAnnotations,
    CaptionPreprocessor,
    ParsedWord,
    Parses,
    parse_with_spacy,
    read_conllu,
)
from e2e_vl.samples import PhraseBoxes, SampleText
from e2e_vl.text import TextTokenizer, load_tokenizer
from tests.tasks.preprocessors import photo, sample_of

GOOD = """# text = It isn't red.
1\tIt\tit\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tisn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tis\tbe\tAUX\t_\t_\t4\tcop\t_\t_
3\tn't\tnot\tPART\t_\t_\t4\tneg\t_\t_
3.1\tnothing\t_\t_\t_\t_\t_\t_\t_\t_
4\tred\tred\tADJ\t_\t_\t0\troot\t_\tSpaceAfter=No
5\t.\t.\tPUNCT\t_\t_\t4\tpunct\t_\t_

# another one, without an empty line behind it
1\tStars\tstar\tNOUN\t_\t_\t0\troot\t_\t_
"""


def test_sentences_are_read(tmp_path):
    (tmp_path / "parses.conllu").write_text(GOOD)
    first, second = read_conllu(tmp_path / "parses.conllu")
    assert first == [
        ParsedWord("It", 3, "nsubj"),
        ParsedWord("isn't", 3, "cop"),
        ParsedWord("isn't", 3, "neg", is_joined=True),
        ParsedWord("red", -1, "root"),
        ParsedWord(".", 3, "punct"),
    ]
    assert second == [ParsedWord("Stars", -1, "root")]


@pytest.mark.parametrize(("old", "new"), [("\tnsubj", " nsubj"), ("1\tIt", "2\tIt"), ("\t4\tnsubj", "\t_\tnsubj")])
def test_a_damaged_line_is_named(tmp_path, old, new):
    (tmp_path / "parses.conllu").write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=r"parses\.conllu, line 2"):
        list(read_conllu(tmp_path / "parses.conllu"))


def words(*forms: str) -> list[ParsedWord]:
    return [ParsedWord(form, row - 1, "dep") for row, form in enumerate(forms)]


def placed(parsed: list[ParsedWord], text: str) -> list[str]:
    return [text[slice(*word.span)] for word in Parses.from_sentences([parsed], "here").find(text)]


def test_words_are_placed_in_the_caption():
    text = 'A man\'s  red car ( 3 ) , "old".'
    forms = ["A", "man", "'s", "red", "car", "-LRB-", "3", "-RRB-", ",", "``", "old", "''", "."]
    assert placed(words(*forms), text) == ["A", "man", "'s", "red", "car", "(", "3", ")", ",", '"', "old", '"', "."]
    assert placed(words("-LRB-", "x"), "-LRB- x") == ["-LRB-", "x"], "the caption may be written like its parse"
    assert placed(words("New York", "x"), "New York x") == ["New York", "x"]
    joined = words("a", "isn't", "isn't", "b")
    joined[2] = dataclasses.replace(joined[2], is_joined=True)
    assert placed(joined, "a isn't b") == ["a", "isn't", "isn't", "b"]


def test_parses_are_found_whatever_the_white_space():
    parses = Parses.from_sentences([words("A", "star", "."), words("``", "x", "''"), words("A", "star", ".")], "here")
    assert len(parses.by_text) == 2
    found = parses.find("A star.")
    assert [(word.span, word.governor) for word in found] == [((0, 1), -1), ((2, 6), 0), ((6, 7), 1)]
    assert parses.find('" x "') is not None and parses.find("A stars.") is None


# spaCy


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_spacy_lacks_is_said(monkeypatch, is_installed):
    def load(name: str, **_):
        raise OSError("no such model")

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load) if is_installed else None)
    with pytest.raises(ValueError, match="spacy download missing" if is_installed else "spaCy .* is not installed"):
        parse_with_spacy(["a"], "missing")


def test_words_of_white_space_are_no_words(tmp_path):
    """A pipeline that makes each last word the governor; spaCy's trained ones need a download."""
    spacy = pytest.importorskip(
        "spacy", reason='spaCy is not installed; pip install "e2e-vl[parse]" lets this test run'
    )

    @spacy.Language.component("last_word_governs")
    def parse(document):
        words, spaces = zip(*((token.text, bool(token.whitespace_)) for token in document), strict=True)
        heads, relations = [len(words) - 1] * len(words), [*["dep"] * (len(words) - 1), "ROOT"]
        return spacy.tokens.Doc(document.vocab, words=words, spaces=spaces, heads=heads, deps=relations)

    pipeline = spacy.blank("en")
    pipeline.add_pipe("last_word_governs")
    pipeline.to_disk(tmp_path / "model")
    parses = parse_with_spacy(["A  star", "A  star", "The red \n star ."], str(tmp_path / "model"))
    assert len(parses.by_text) == 2 and parses.origin.startswith("spaCy, ")
    found = [[(word.span, word.governor) for word in parses.find(text)] for text in ("A star", "The red \n star .")]
    assert found[0] == [((0, 1), 1), ((2, 6), -1)]
    assert found[1] == [((0, 3), 3), ((4, 7), 3), ((10, 14), 3), ((15, 16), -1)]


# Wordpieces


TEXT = "The red star and it ."
SPANS = ((0, 12), (17, 19))
BOXES = (np.array([[1.0, 2, 3, 4]]), np.zeros((0, 4)))
RELATIONS = [("The", 2, "det"), ("red", 2, "amod"), ("star", -1, "root"), ("and", 2, "cc"), ("it", 2, "conj")]
PARSE = [ParsedWord(*row) for row in [*RELATIONS, (".", 2, "punct")]]


def annotated(tmp_path, *, parse=PARSE, max_length: int | None = None, **options) -> CaptionAnnotations:
    """The vocabulary spells "star" as st ##ar."""
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "red", "st", "##ar", "and", "it", ".", "x")
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    parses = None if parse is None else Parses.from_sentences([parse], "here")
    preprocessor = CaptionPreprocessor(TextTokenizer(tokenizer, max_length=max_length), parses, **options)
    text = SampleText(0, TEXT, {}, phrases=PhraseBoxes(SPANS, BOXES))
    [example] = preprocessor(sample_of(text), [photo()], None)
    return example.record[CAPTION_KEY]


def test_phrases_and_words_have_their_wordpieces(tmp_path):
    caption = annotated(tmp_path)
    assert caption.phrases == ["The red star", "it"] and caption.phrase_spans.tolist() == [[1, 5], [6, 7]]
    assert caption.forms == ["The", "red", "star", "and", "it", "."]
    assert caption.word_spans.tolist() == [[1, 2], [2, 3], [3, 5], [5, 6], [6, 7], [7, 8]]
    assert caption.phrase_of == [0, 0, 0, -1, 1, -1]
    assert caption.is_head == [False, False, True, False, True, False]
    found = {(caption.forms[one.governor], caption.forms[one.dependent], one.label) for one in caption.relations}
    assert found == {
        ("star", form, label) for form, governor, label in [*RELATIONS, (".", 2, "punct")] if governor == 2
    }
    assert caption.is_word.tolist() == [False, *[True] * 7, False]
    assert [len(own) for own in caption.boxes] == [1, 0] and caption.is_parsed


def test_what_is_cut_off_is_counted(tmp_path):
    caption = annotated(tmp_path, max_length=6)  # [CLS] the red st ##ar [SEP]
    assert caption.phrases == ["The red star"] and caption.truncated_phrases == 1
    assert caption.forms == ["The", "red", "star"] and caption.truncated_words == 3
    assert [one.label for one in caption.relations] == ["det", "amod"]
    caption = annotated(tmp_path, max_length=5)  # [CLS] the red st [SEP]: a phrase is cut in its middle
    assert caption.phrases == [] and caption.truncated_phrases == 2
    assert caption.forms == ["The", "red"] and caption.truncated_words == 4


def test_without_a_parse_there_are_words_without_relations(tmp_path):
    caption = annotated(tmp_path, parse=None)
    assert caption.forms == TEXT.split() and not caption.relations and not caption.is_parsed
    other = [dataclasses.replace(word, form="x") for word in PARSE]
    with pytest.raises(ValueError, match=r"here: the caption 'The red star and it \.' has no parse"):
        annotated(tmp_path, parse=other)
    assert not annotated(tmp_path, parse=other, needs_parses=False).is_parsed
