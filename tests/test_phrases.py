"""Phrases of a text as wordpieces: where they are, what they name after a resize, and what cutting leaves of them."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from e2e_vl.examples import ImageExample, PhraseBatch, TextExample
from e2e_vl.samples import PhraseBoxes, SampleText
from e2e_vl.tasks.refcoco import ReferringPreprocessor
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of, word

WORDS = "The big star next to a red circle"
SPANS = ((0, 12), (21, 33))
BOXES = (np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]]), np.array([[4.0, 4, 8, 8]]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("vocabulary"), WORDS)


@pytest.fixture
def mark(tokenizer):
    return functools.partial(marked, tokenizer)


def marked(tokenizer, text: SampleText, **changes) -> tuple[TextExample, ImageExample]:
    """The text as a wording marks it, and the image that it is about."""
    preprocessor = ReferringPreprocessor(TextTokenizer(tokenizer, **{"with_phrase_spans": True} | changes))
    image = photo()
    [example] = word(preprocessor, sample_of(text), image)
    return example, image


def test_phrases_are_wordpieces_and_boxes_of_the_resized_image(mark, tokenizer):
    text = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES, is_complete=True))
    example, image = mark(text)
    own = example.phrases
    pieces = example.encoding.input_ids.tolist()
    said = [tokenizer.convert_ids_to_tokens(pieces[first:end]) for first, end in own.spans]
    assert said == [["the", "big", "star"], ["a", "red", "circle"]]
    assert own.is_complete and own.words == WORDS
    assert own.offsets[0].tolist() == [0, 0] and own.offsets[1].tolist() == [0, 3]
    for found, stated in zip(own.boxes, BOXES, strict=True):
        np.testing.assert_allclose(found, image.image_transform.transform_boxes(stated).astype(np.float32))


def test_a_mark_right_behind_a_phrase_is_no_part_of_it(mark):
    """The comma begins at the character at which the phrase ends."""
    text = SampleText(0, "the star,a circle", {}, phrases=PhraseBoxes(((0, 8), (9, 17)), BOXES))
    example, _ = mark(text)
    assert example.phrases.spans.tolist() == [[1, 3], [4, 6]]


def test_a_text_without_stated_phrases_has_none_and_nobody_asks_costs_nothing(mark):
    example, _ = mark(SampleText(0, WORDS, {}))
    assert len(example.phrases.spans) == 0 and not example.phrases.is_complete
    text = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES))
    example, _ = mark(text, with_phrase_spans=False)
    assert example.phrases is None


@pytest.mark.parametrize(("limit", "spans"), [(10, [[1, 4], [6, 9]]), (5, [[1, 4], [3, 4]]), (4, [[1, 3], [2, 3]])])
def test_a_phrase_that_is_cut_off_becomes_what_stands_last_before_its_end(mark, limit, spans):
    text = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES))
    example, _ = mark(text, max_length=limit)
    assert example.phrases.spans.tolist() == spans


def test_a_blank_text_has_no_phrases(mark):
    """The control without words."""
    example, _ = mark(SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES)), is_blank=True)
    assert len(example.phrases.spans) == 0


def test_joined_phrases_keep_their_texts_and_boxes(mark):
    one, _ = mark(SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES, is_complete=True)))
    none, _ = mark(SampleText(1, "the star", {}))
    unknown, _ = mark(SampleText(2, "the star", {}, phrases=PhraseBoxes(((0, 8),), None)))
    batch = PhraseBatch.join([none.phrases, one.phrases, unknown.phrases])
    assert batch.spans.counts.tolist() == [0, 2, 1] and batch.spans.owner.tolist() == [1, 1, 2]
    assert batch.boxes.counts.tolist() == [2, 1, 0] and batch.boxes.values.shape == (3, 4)
    assert batch.is_complete.tolist() == [False, True, False]
    assert batch.offsets.shape == (3, len(one.phrases.offsets), 2) and not batch.offsets[0, 4:].any()


def test_cutting_moves_spans_with_their_wordpieces(mark):
    one, _ = mark(SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES)))
    batch = PhraseBatch.join([one.phrases])
    length = len(one.phrases.offsets)
    index = torch.tensor([[0, 1, 2, 3, 4, length - 1]])  # [CLS] the big star next [SEP]
    cut = batch.truncate(index, torch.ones_like(index, dtype=torch.bool))
    assert cut.spans.values.tolist() == [[1, 4], [4, 5]]  # "a red circle" is gone; "next" stands before it
    assert cut.offsets[0, 1:4].tolist() == batch.offsets[0, 1:4].tolist()
    all_kept = batch.truncate(torch.arange(length)[None], torch.ones(1, length, dtype=torch.bool))
    assert torch.equal(all_kept.spans.values, batch.spans.values)


def test_wordpieces_know_which_of_them_go_on_with_a_word(tmp_path):
    """Words end where the tokenizer ends them: at white space, punctuation and Chinese characters."""
    tokenizer = make_tokenizer(tmp_path, "the star")
    texts = ("the redstar, don't $5 re-do", "星形 star星", "the\u200bstar", "é e\u0301 star\tstar\n🙂", "...", "star")
    for text in texts:
        example, _ = marked(tokenizer, SampleText(0, text, {}))
        words = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).word_ids
        expected = [False] + [one == other for one, other in itertools.pairwise(words)]
        batch = PhraseBatch.join([example.phrases])
        assert batch.continues_word.tolist() == [[False, *expected, False]], text
    assert "redstar" not in tokenizer.get_vocab()


def test_punctuation_is_known(tmp_path):
    example, _ = marked(make_tokenizer(tmp_path, "the star"), SampleText(0, "(the star)!", {}))
    assert PhraseBatch.join([example.phrases]).is_punctuation().tolist() == [
        [False, True, False, False, True, True, False]
    ]
