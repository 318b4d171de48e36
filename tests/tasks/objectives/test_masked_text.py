"""Texts of a corpus beside captions: how long they are, what is masked in them; the loss is tested beside."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from e2e_vl.tasks.config import MaskedTextConfig
from e2e_vl.tasks.objectives.words import CorpusMasking
from e2e_vl.text import TextTokenizer
from tests.tasks.objectives.worded import make_preprocessor, word_labels
from tests.tasks.preprocessors import make_tokenizer, sample_of, tokens, word

LINES = ["The first line.", "zweite Zeile: naïve", "x", "the last line has a few more words"]


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, *LINES)


def draw(tokenizer, corpus=LINES, number: int = 0, **options):
    """The text that is drawn with one generator, and the labels of its wordpieces."""
    preprocessor = CorpusMasking(TextTokenizer(tokenizer, max_length=20), MaskedTextConfig(weight=1.0, **options))
    [(draft, encoding)] = preprocessor.beside(sample_of("x", corpus=corpus), np.random.default_rng(number))
    return encoding, preprocessor.targets(draft, encoding).labels


def test_a_text_joins_lines_and_wraps(tokenizer):
    masking = CorpusMasking(TextTokenizer(tokenizer), MaskedTextConfig(min_words=12))
    words = masking.words(LINES, 2)
    assert len(words) == 13
    expected = tokenizer.encode(" ".join([LINES[2], LINES[3], LINES[0]]), add_special_tokens=False)
    assert [piece for word in words for piece in word] == expected


def test_a_small_corpus_repeats_itself_and_texts_are_cut(tokenizer):
    masking = CorpusMasking(TextTokenizer(tokenizer), MaskedTextConfig(min_words=64))
    assert len(masking.words(["x"], 0)) == 64
    encoding, labels = draw(tokenizer, ["x"], max_length=10, probability=0.0)
    np.testing.assert_array_equal(encoding.input_ids, [tokenizer.vocab["x"]] * 10)
    np.testing.assert_array_equal(labels, [-1] * 10)
    assert encoding.token_type_ids.tolist() == [0] * 10 and encoding.summary is None


def test_texts_have_64_pieces_without_special_tokens(tokenizer):
    """Whatever limit the captions have."""
    for number in range(4):
        encoding, labels = draw(tokenizer, number=number, probability=0.0)
        assert encoding.input_ids.shape == labels.shape == encoding.token_type_ids.shape == (64,)
        assert not {tokenizer.cls_token_id, tokenizer.sep_token_id} & set(encoding.input_ids.tolist())


def test_special_tokens_count_among_the_pieces_and_are_never_masked(tokenizer):
    encoding, labels = draw(tokenizer, probability=1.0, special_tokens=True)
    assert encoding.input_ids.shape == labels.shape == encoding.token_type_ids.shape == (64,)
    assert encoding.input_ids[[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    assert (labels < 0).nonzero()[0].tolist() == [0, 63]


def test_masked_texts_restore_to_the_text(tokenizer):
    for number in range(4):
        encoding, labels = draw(tokenizer, number=number, probability=0.5)
        plain, _ = draw(tokenizer, number=number, probability=0.0)
        assert 10 < (labels >= 0).sum() < 54
        np.testing.assert_array_equal(np.where(labels >= 0, labels, encoding.input_ids), plain.input_ids)


def test_every_caption_has_a_text_beside_it(tokenizer):
    preprocessor = make_preprocessor(
        tokenizer, masked_text={"weight": 1.0, "probability": 0.5}, masked_words={"weight": 1.0}
    )
    captions = sample_of("the first line", "a few words", corpus=LINES)
    texts = word(preprocessor, captions)
    assert [text.image_index for text in texts] == [(0,), (), (0,), ()]
    for caption, corpus in zip(texts[::2], texts[1::2], strict=True):
        assert corpus.encoding.input_ids.shape == (64,) and corpus.record == {} and corpus.seed == 0
        assert (word_labels(corpus, "masked_text") >= 0).any()
        assert set(word_labels(corpus)) == {-1}, "its words belong to one objective"
        assert set(word_labels(caption, "masked_text")) == {-1}
        assert len(word_labels(caption)) == len(word_labels(caption, "masked_text")) == len(caption.encoding.input_ids)
    alone = word(preprocessor, dataclasses.replace(captions, texts=captions.texts[1:]))
    np.testing.assert_array_equal(alone[1].encoding.input_ids, texts[3].encoding.input_ids)
    drawn = {tuple(word(preprocessor, captions, epoch=e)[1].encoding.input_ids) for e in range(20)}
    assert len(drawn) > 10, "the corpus is drawn at random"


def test_without_a_corpus_there_is_nothing_beside(tokenizer):
    preprocessor = make_preprocessor(tokenizer, masked_text=1.0)
    assert [text.image_index for text in word(preprocessor, sample_of("the first line"))] == [(0,)]


def test_blank_captions_leave_the_corpus(tokenizer):
    caption, corpus = word(make_preprocessor(tokenizer, masked_text=1.0, is_blank=True), sample_of("x", corpus=LINES))
    assert tokens(caption, tokenizer) == ["[CLS]", "[SEP]"] and len(corpus.encoding.input_ids) == 64


def test_texts_that_make_no_sense(tokenizer):
    with pytest.raises(ValueError, match=r"masked_text\.max_length is 2; it must be at least 3"):
        MaskedTextConfig(max_length=2, special_tokens=True)
    with pytest.raises(ValueError, match=r"masked_text\.min_words is 0; it must be at least 1"):
        MaskedTextConfig(min_words=0)
    with pytest.raises(ValueError, match=r"no word in the text corpus; check data\.files\.corpus"):
        CorpusMasking(TextTokenizer(tokenizer)).words(["\u00ad"], 0)
