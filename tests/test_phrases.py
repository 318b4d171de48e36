from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from e2e_vl.phrases import PhraseBatch, match_phrase
from e2e_vl.preprocessing import EncodedText
from e2e_vl.samples import PhraseBoxes, SampleText
from e2e_vl.tasks.refcoco import ReferringPreprocessor
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage
from tests.tasks.preprocessors import make_tokenizer, photo, preprocess, sample_of

WORDS = "The big star next to a red circle"
SPANS = ((0, 12), (21, 33))
BOXES = (np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]]), np.array([[4.0, 4, 8, 8]]))
SAID = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES, is_complete=True))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("vocabulary"), WORDS)


@pytest.fixture
def mark(tokenizer):
    """`mark(text)`: the text as preprocessed with its phrases, and the image that it is about."""

    def marked(text: SampleText, **changes) -> tuple[EncodedText, LoadedImage]:
        preprocessor = ReferringPreprocessor(TextTokenizer(tokenizer, **{"with_phrase_spans": True} | changes))
        image = photo()
        [example] = preprocess(preprocessor, sample_of(text), image)
        return example, image

    return marked


def test_phrases_are_wordpieces_and_boxes_of_the_resized_image(mark, tokenizer):
    example, image = mark(SAID)
    own = example.phrases
    pieces = example.encoding.input_ids.tolist()
    said = [tokenizer.convert_ids_to_tokens(pieces[first:end]) for first, end in own.spans]
    assert said == [["the", "big", "star"], ["a", "red", "circle"]]
    assert own.is_complete and own.words == WORDS
    assert own.offsets[0].tolist() == [0, 0] and own.offsets[1].tolist() == [0, 3]
    for found, annotated in zip(own.boxes, BOXES, strict=True):
        np.testing.assert_allclose(found, image.image_transform.transform_boxes(annotated).astype(np.float32))


def test_a_phrase_matches_a_text_by_their_common_words():
    assert match_phrase("The big star", "the big, big star!") == (1, 1)
    assert match_phrase("star", "the big star") == (1, pytest.approx(1 / 3))
    assert match_phrase("the left lion", "right lion") == (pytest.approx(1 / 3), 0.5)
    assert match_phrase("", "a star") == match_phrase("star", "...") == (0, 0)


def test_phrases_of_candidate_boxes_match_each_text(tokenizer):
    preprocessor = ReferringPreprocessor(TextTokenizer(tokenizer, with_phrase_matches=True))
    image = dataclasses.replace(photo(), boxes=np.zeros((3, 4), np.float32), phrases=("star", "big star", ""))
    texts = SampleText(0, "the star", {}), SampleText(1, "big star", {})
    first, second = preprocess(preprocessor, sample_of(*texts), image)
    np.testing.assert_allclose(first.phrase_matches, [[[1, 0.5], [0.5, 0.5], [0, 0]]])
    np.testing.assert_allclose(second.phrase_matches, [[[1, 0.5], [1, 1], [0, 0]]])
    [unknown] = preprocess(preprocessor, sample_of(texts[0]), photo())
    assert unknown.phrase_matches is None
    blind = ReferringPreprocessor(TextTokenizer(tokenizer, with_phrase_matches=True, is_blank=True))
    assert not np.any(preprocess(blind, sample_of(texts[1]), image)[0].phrase_matches), "the control sees no text"


def test_texts_without_phrases_and_punctuation_behind_a_phrase(mark):
    example, _ = mark(SampleText(0, WORDS, {}))
    assert len(example.phrases.spans) == 0 and not example.phrases.is_complete
    example, _ = mark(SAID, with_phrase_spans=False)
    assert example.phrases is None
    # the comma begins at the character at which the phrase ends
    example, _ = mark(SampleText(0, "the star,a circle", {}, phrases=PhraseBoxes(((0, 8), (9, 17)), BOXES)))
    assert example.phrases.spans.tolist() == [[1, 3], [4, 6]]
    is_punctuation = PhraseBatch.join([example.phrases]).is_punctuation()
    assert is_punctuation.tolist() == [[False, False, False, True, False, False, False]]


@pytest.mark.parametrize(("limit", "spans"), [(10, [[1, 4], [6, 9]]), (5, [[1, 4], [3, 4]]), (4, [[1, 3], [2, 3]])])
def test_a_phrase_that_is_cut_off_becomes_what_stands_last_before_its_end(mark, limit, spans):
    example, _ = mark(SAID, max_length=limit)
    assert example.phrases.spans.tolist() == spans


def test_joined_phrases_keep_their_texts_and_boxes(mark):
    one, _ = mark(SAID)
    none, _ = mark(SampleText(1, "the star", {}))
    unknown, _ = mark(SampleText(2, "the star", {}, phrases=PhraseBoxes(((0, 8),), None)))
    batch = PhraseBatch.join([none.phrases, one.phrases, unknown.phrases])
    assert batch.spans.counts.tolist() == [0, 2, 1] and batch.spans.owner.tolist() == [1, 1, 2]
    assert batch.boxes.counts.tolist() == [2, 1, 0] and batch.boxes.values.shape == (3, 4)
    assert batch.is_complete.tolist() == [False, True, False]
    assert batch.offsets.shape == (3, len(one.phrases.offsets), 2) and not batch.offsets[0, 4:].any()


def test_truncation_moves_spans_with_their_wordpieces(mark):
    one, _ = mark(SAID)
    batch = PhraseBatch.join([one.phrases])
    length = len(one.phrases.offsets)
    index = torch.tensor([[0, 1, 2, 3, 4, length - 1]])  # [CLS] the big star next [SEP]
    cut = batch.truncate(index, torch.ones_like(index, dtype=torch.bool))
    assert cut.spans.values.tolist() == [[1, 4], [4, 5]]  # "a red circle" is gone; "next" stands before it
    assert cut.offsets[0, 1:4].tolist() == batch.offsets[0, 1:4].tolist()
    all_kept = batch.truncate(torch.arange(length)[None], torch.ones(1, length, dtype=torch.bool))
    assert torch.equal(all_kept.spans.values, batch.spans.values)


def test_wordpieces_know_which_of_them_go_on_with_a_word(mark, tokenizer):
    """Words end where the tokenizer ends them: at whitespace, punctuation and Chinese characters."""
    texts = ("the redstar, don't $5 re-do", "星形 star星", "the\u200bstar", "é e\u0301 star\tstar\n🙂", "...", "star")
    for text in texts:
        example, _ = mark(SampleText(0, text, {}))
        words = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).word_ids
        expected = [False] + [one == other for one, other in itertools.pairwise(words)]
        batch = PhraseBatch.join([example.phrases])
        assert batch.continues_word.tolist() == [[False, *expected, False]], text
    assert "redstar" not in tokenizer.get_vocab()
