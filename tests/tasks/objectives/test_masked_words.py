from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.data.masking import WordMasking, mask_words, word_pieces
from e2e_vl.text import build_vocabulary, load_tokenizer

MASK, SIZE = 4, 1000
RULE = WordMasking(MASK, SIZE)
WORDS = [[10], [20, 21, 22], [30, 31], [40]] * 5000
IDS = np.array([piece for word in WORDS for piece in word])


def test_pieces_of_words_as_bert_splits_them(tmp_path):
    build_vocabulary(["a red box, left most!"], tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    words = word_pieces("A red Boxes, left,most!", tokenizer)
    tokens = [tokenizer.convert_ids_to_tokens(word) for word in words]
    spelled = ["box", "##e", "##s"]
    assert tokens == [["a"], ["red"], spelled, [","], ["left"], [","], ["most"], ["!"]]
    assert [piece for word in words for piece in word] == tokenizer.convert_tokens_to_ids(
        tokenizer.tokenize("A red Boxes, left,most!")
    )
    assert word_pieces(" \n", tokenizer) == []


def test_labels_are_the_original_ids_of_whole_words():
    ids, labels = mask_words(WORDS, RULE, np.random.default_rng(0))
    assert ids.dtype == labels.dtype == np.int64
    assert len(ids) == len(labels) == len(IDS)
    np.testing.assert_array_equal(labels[labels >= 0], IDS[labels >= 0])
    np.testing.assert_array_equal(ids[labels < 0], IDS[labels < 0])
    position = 0
    for word in WORDS:
        assert len(set(labels[position : position + len(word)] >= 0)) == 1
        masked = ids[position : position + len(word)] == MASK
        if (masked.sum()) > 1:
            assert masked.all()
        position += len(word)


def test_shares_of_the_official_code():
    ids, labels = mask_words(WORDS, RULE, np.random.default_rng(2))
    starts = np.cumsum([0, *(len(word) for word in WORDS[:-1])])
    chosen = labels >= 0
    assert chosen[starts].mean() == pytest.approx(0.15, abs=0.01)
    assert (ids[starts] == MASK)[chosen[starts]].mean() == pytest.approx(0.8, abs=0.03)
    assert (ids[starts] == IDS[starts])[chosen[starts]].mean() == pytest.approx(0.1, abs=0.02)
    replaced = ids[chosen & (ids != MASK) & (ids != IDS)]
    assert len(replaced) / chosen.sum() == pytest.approx(0.1, abs=0.02)
    assert replaced.min() < 20
    assert replaced.max() > SIZE - 20
    assert len(set(replaced.tolist())) > 0.3 * len(replaced), "each piece is replaced on its own"


def test_random_entries_may_be_special_tokens():
    rule = WordMasking(mask_id=4, vocabulary_size=5, probability=1.0)
    ids, _ = mask_words([[100]] * 2000, rule, np.random.default_rng(0))
    assert set(ids.tolist()) == {0, 1, 2, 3, 4, 100}


def test_the_papers_rule_always_masks():
    ids, labels = mask_words(WORDS, WordMasking(MASK, SIZE, always_mask=True), np.random.default_rng(3))
    assert (ids[labels >= 0] == MASK).all()
    assert (labels >= 0).mean() == pytest.approx(0.15, abs=0.01)


def test_no_word_is_forced():
    chosen = [(RULE([[7], [8]], np.random.default_rng(seed))[1] >= 0).any() for seed in range(400)]
    assert np.mean(chosen) == pytest.approx(1 - 0.85**2, abs=0.07)
    ids, labels = RULE([], np.random.default_rng(0))
    assert len(ids) == len(labels) == 0
    ids, labels = mask_words(WORDS, WordMasking(MASK, SIZE, probability=0.0), np.random.default_rng(0))
    assert (labels == -1).all()
    np.testing.assert_array_equal(ids, IDS)


def test_the_same_generator_gives_the_same_mask():
    one, other = (mask_words(WORDS[:50], RULE, np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(one, other)


def test_a_probability_above_one():
    with pytest.raises(ValueError, match="masking probability is 15"):
        WordMasking(MASK, SIZE, probability=15)
