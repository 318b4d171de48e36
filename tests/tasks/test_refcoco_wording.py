"""An expression in wordpieces, its target and its record."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.samples import Question, ReferredBox, SampleText
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of, tokens, word

TRUTH = ReferredBox((10, 20, 30, 40))


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "red square on the left right blue thing")


def preprocessor(tokenizer, **options):
    return ReferringTask(8).preprocessor(TextTokenizer(tokenizer, **options))


def expressions(*words: str, truth: ReferredBox | None = TRUTH):
    return sample_of(*(SampleText(n + 3, text, {"sent": text, "ann_id": 9}, truth) for n, text in enumerate(words)))


def test_an_expression_and_its_box_in_resized_pixels(tokenizer):
    first, second = word(preprocessor(tokenizer), expressions("Red square on the left", "blue"), photo(scale=2))
    assert tokens(first, tokenizer) == ["[CLS]", "red", "square", "on", "the", "left", "[SEP]"]
    assert first.encoding.token_type_ids.tolist() == [0] * 7
    assert first.encoding.summary is None and first.region_of_token is None and first.seed is None
    assert first.image_index == second.image_index == (0,)
    np.testing.assert_array_equal(first.targets.box, [20, 40, 60, 80])
    assert first.targets.box.dtype == np.float32
    assert tokens(second, tokenizer) == ["[CLS]", "blue", "[SEP]"]


def test_a_mirrored_image_swaps_left_and_right(tokenizer):
    sample = expressions("red square on the left", "right thing left")
    first, second = word(preprocessor(tokenizer), sample, photo(flipped=True))
    assert tokens(first, tokenizer) == ["[CLS]", "red", "square", "on", "the", "right", "[SEP]"]
    assert tokens(second, tokenizer) == ["[CLS]", "left", "thing", "right", "[SEP]"]
    np.testing.assert_array_equal(first.targets.box, [69, 20, 89, 40])
    assert first.record["flipped"] is True and first.record["sent"] == "red square on the left"


def test_the_target_is_not_clamped(tokenizer):
    [text] = word(preprocessor(tokenizer), expressions("red", truth=ReferredBox((-4, 20, 20, 65))))
    np.testing.assert_array_equal(text.targets.box, [-4, 20, 20, 65])


def test_records_are_plain_and_about_the_stored_image(tokenizer):
    [text] = word(preprocessor(tokenizer), expressions("red"), photo(scale=2, box_ids=(100, 101)))
    assert text.record == json.loads(json.dumps(text.record))
    assert text.record == {
        "text_index": 3,
        "sent": "red",
        "ann_id": 9,
        "file_name": "photo.jpg",
        "image_size": [60, 100],
        "flipped": False,
        "candidate_ann_ids": [100, 101],
    }
    [text] = word(preprocessor(tokenizer), expressions("red"))
    assert "candidate_ann_ids" not in text.record


def test_blank_text_drops_all_words(tokenizer):
    texts = word(preprocessor(tokenizer, is_blank=True), expressions("red square", "blue"))
    assert {tuple(tokens(text, tokenizer)) for text in texts} == {("[CLS]", "[SEP]")}


def test_a_length_limit_keeps_the_separator_and_records_the_loss(tokenizer):
    long, short = word(preprocessor(tokenizer, max_length=5), expressions("red square on the left", "blue square"))
    assert tokens(long, tokenizer) == ["[CLS]", "red", "square", "on", "[SEP]"]
    assert long.record["cut_wordpieces"] == 2
    assert tokens(short, tokenizer) == ["[CLS]", "blue", "square", "[SEP]"]
    assert "cut_wordpieces" not in short.record
    with pytest.raises(ValueError, match="max_text_length is 1, but the special tokens alone need 2"):
        preprocessor(tokenizer, max_length=1)


def test_a_question_of_a_user_has_no_target(tokenizer, tmp_path):
    sample = ReferringTask(8).question(Question(tmp_path / "photo.jpg", "the red square"))
    [text] = word(preprocessor(tokenizer), sample)
    assert tokens(text, tokenizer) == ["[CLS]", "the", "red", "square", "[SEP]"]
    assert text.targets.box is None and text.record["sent"] == "the red square"
