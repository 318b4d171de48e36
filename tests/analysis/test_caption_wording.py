"""Wordpieces of phrases and of parsed words, also where a caption is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from e2e_vl.analysis.captions import RECORD, CaptionAnnotations, CaptionPreprocessor, ParsedWord, Parses
from e2e_vl.samples import PhraseBoxes, SampleText
from e2e_vl.text import TextTokenizer, load_tokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of

TEXT = "The red star and it ."
SPANS = ((0, 12), (17, 19))
BOXES = (np.array([[1.0, 2, 3, 4]]), np.zeros((0, 4)))
PARSE = [
    ParsedWord("The", "DET", 2, "det"),
    ParsedWord("red", "ADJ", 2, "amod"),
    ParsedWord("star", "NOUN", -1, "root"),
    ParsedWord("and", "CCONJ", 2, "cc"),
    ParsedWord("it", "PRON", 2, "conj"),
    ParsedWord(".", "PUNCT", 2, "punct"),
]


def facts_of(
    tmp_path, *, parse: list[ParsedWord] | None = PARSE, max_length: int | None = None, **options
) -> CaptionAnnotations:
    """The vocabulary spells "star" as st ##ar."""
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "red", "st", "##ar", "and", "it", ".", "x")
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    parses = None if parse is None else Parses.of([parse], "here")
    preprocessor = CaptionPreprocessor(TextTokenizer(tokenizer, max_length=max_length), parses, **options)
    text = SampleText(0, TEXT, {}, phrases=PhraseBoxes(SPANS, BOXES))
    [example] = preprocessor(sample_of(text), [photo()], None)
    return example.record[RECORD]


def test_phrases_and_words_have_their_wordpieces(tmp_path):
    caption = facts_of(tmp_path)
    assert caption.phrases == ["The red star", "it"] and caption.phrase_spans.tolist() == [[1, 5], [6, 7]]
    assert caption.forms == ["The", "red", "star", "and", "it", "."]
    assert caption.word_spans.tolist() == [[1, 2], [2, 3], [3, 5], [5, 6], [6, 7], [7, 8]]
    assert caption.phrase_of == [0, 0, 0, -1, 1, -1]
    assert caption.is_head == [False, False, True, False, True, False]
    found = {(caption.forms[one.governor], caption.forms[one.dependent], one.label) for one in caption.relations}
    assert found == {
        *(("star", "The", "det"), ("star", "red", "amod"), ("star", "and", "cc"), ("star", "it", "conj")),
        ("star", ".", "punct"),
    }
    assert caption.is_word.tolist() == [False, *[True] * 7, False]
    assert [len(own) for own in caption.boxes] == [1, 0] and caption.is_parsed


def test_what_is_cut_off_is_counted(tmp_path):
    caption = facts_of(tmp_path, max_length=6)  # [CLS] the red st ##ar [SEP]
    assert caption.phrases == ["The red star"] and caption.phrases_cut == 1
    assert caption.forms == ["The", "red", "star"] and caption.words_cut == 3
    assert [one.label for one in caption.relations] == ["det", "amod"]


def test_a_phrase_that_is_cut_in_its_middle_is_left_out(tmp_path):
    caption = facts_of(tmp_path, max_length=5)  # [CLS] the red st [SEP]
    assert caption.phrases == [] and caption.phrases_cut == 2
    assert caption.forms == ["The", "red"] and caption.words_cut == 4


def test_without_a_parse_there_are_words_without_relations(tmp_path):
    caption = facts_of(tmp_path, parse=None)
    assert caption.forms == TEXT.split() and not caption.relations and not caption.is_parsed
    other = [dataclasses.replace(word, form="x") for word in PARSE]
    with pytest.raises(ValueError, match=r"here: the caption 'The red star and it \.' has no parse"):
        facts_of(tmp_path, parse=other)
    assert not facts_of(tmp_path, parse=other, needs_parses=False).is_parsed


def test_a_text_without_phrases_is_refused(tmp_path):
    preprocessor = CaptionPreprocessor(TextTokenizer(make_tokenizer(tmp_path, "the")))
    with pytest.raises(ValueError, match=r"text 3 \('the'\) has no phrases with boxes"):
        list(preprocessor(sample_of(SampleText(3, "the", {})), [photo()], None))
