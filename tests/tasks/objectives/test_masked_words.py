"""Which words are masked, and what becomes of them; the loss is tested beside."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from e2e_vl.samples import HumanAnswers, Question, SampleText
from e2e_vl.tasks.config import MaskedWordsConfig
from e2e_vl.tasks.objectives.base import Draft
from e2e_vl.tasks.objectives.words import mask_words
from tests.tasks.objectives.worded import make_preprocessor, make_task, word_labels
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of, tokens, word

MASK, SIZE = 4, 1000
RULE = partial(mask_words, mask_id=MASK, vocab_size=SIZE)
WORDS = [[10], [20, 21, 22], [30, 31], [40]] * 5000
IDS = np.array([piece for pieces in WORDS for piece in pieces])


def test_labels_are_the_original_ids_of_whole_words():
    ids, labels = RULE(WORDS, np.random.default_rng(0))
    assert ids.dtype == labels.dtype == np.int64
    assert len(ids) == len(labels) == len(IDS)
    np.testing.assert_array_equal(labels[labels >= 0], IDS[labels >= 0])
    np.testing.assert_array_equal(ids[labels < 0], IDS[labels < 0])
    position = 0
    for pieces in WORDS:
        assert len(set(labels[position : position + len(pieces)] >= 0)) == 1
        masked = ids[position : position + len(pieces)] == MASK
        if (masked.sum()) > 1:
            assert masked.all()
        position += len(pieces)


def test_shares_of_the_official_code():
    ids, labels = RULE(WORDS, np.random.default_rng(2))
    starts = np.cumsum([0, *(len(pieces) for pieces in WORDS[:-1])])
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
    generator = np.random.default_rng(0)
    ids, _ = mask_words([[100]] * 2000, generator, mask_id=4, vocab_size=5, probability=1.0)
    assert set(ids.tolist()) == {0, 1, 2, 3, 4, 100}


def test_the_papers_rule_always_masks():
    ids, labels = RULE(WORDS, np.random.default_rng(3), always_mask=True)
    assert (ids[labels >= 0] == MASK).all()
    assert (labels >= 0).mean() == pytest.approx(0.15, abs=0.01)


def test_no_word_is_forced():
    chosen = [(RULE([[7], [8]], np.random.default_rng(seed))[1] >= 0).any() for seed in range(400)]
    assert np.mean(chosen) == pytest.approx(1 - 0.85**2, abs=0.07)
    ids, labels = RULE([], np.random.default_rng(0))
    assert len(ids) == len(labels) == 0
    ids, labels = RULE(WORDS, np.random.default_rng(0), probability=0.0)
    assert (labels == -1).all()
    np.testing.assert_array_equal(ids, IDS)


def test_the_same_generator_gives_the_same_mask():
    one, other = (RULE(WORDS[:50], np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(one, other)


def test_a_probability_above_one():
    with pytest.raises(ValueError, match=r"masked_words\.probability is 15; it must be from 0 to 1"):
        MaskedWordsConfig(probability=15)


# A caption on its way through the wording

CAPTION = "A red square stands left of the naïve box"


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "a red square stands left of the box")


def restored(text, tokenizer) -> str:
    labels = word_labels(text)
    return tokenizer.decode(np.where(labels >= 0, labels, text.encoding.input_ids))


def test_a_caption_is_masked_and_can_be_restored(tokenizer):
    preprocessor = make_preprocessor(tokenizer, masked_words={"probability": 0.5})
    chosen = 0
    for epoch in range(20):
        [text] = word(preprocessor, sample_of(CAPTION), epoch=epoch)
        assert text.image_index == (0,) and text.record["sent"] == CAPTION
        spelled = f"[CLS]{CAPTION}[SEP]".replace("ï", "i").replace(" ", "").lower()
        assert restored(text, tokenizer).replace(" ", "").replace("##", "").lower() == spelled
        labels = word_labels(text)
        assert labels.shape == text.encoding.input_ids.shape and labels[[0, -1]].tolist() == [-1, -1]
        np.testing.assert_array_equal(text.encoding.token_type_ids, 0)
        chosen += int((labels >= 0).sum())
    assert chosen > 50


def test_masks_depend_on_seed_epoch_and_text_only(tokenizer):
    preprocessor = make_preprocessor(tokenizer, masked_words={"probability": 0.5})
    captions = sample_of(*[CAPTION] * 8)

    def made(sample, **draws) -> list[tuple[list[int], int]]:
        return [(text.encoding.input_ids.tolist(), text.seed) for text in word(preprocessor, sample, **draws)]

    first = made(captions)
    assert first == made(captions)
    alone = [made(sample_of(*captions.texts[n : n + 1])) for n in range(8)]
    assert [row for rows in alone for row in rows] == first
    for other in (made(captions, epoch=1), made(captions, seed=1)):
        assert all(one != two for one, two in zip(first, other, strict=True))
    assert len({seed for _, seed in first}) == 8
    assert len({tuple(ids) for ids, _ in first}) > 4


def test_mirroring_changes_no_word_and_no_mask(tokenizer):
    preprocessor = make_preprocessor(tokenizer)
    for epoch in range(5):
        [one], [other] = (word(preprocessor, sample_of(CAPTION), photo(flipped=f), epoch=epoch) for f in (False, True))
        np.testing.assert_array_equal(one.encoding.input_ids, other.encoding.input_ids)
        np.testing.assert_array_equal(word_labels(one), word_labels(other))
        assert (one.record["flipped"], other.record["flipped"]) == (False, True)


def test_a_further_text_of_another_objective_has_nothing_masked(tokenizer):
    preprocessor = make_preprocessor(tokenizer).parts["masked_words"]
    encoding = preprocessor.text_tokenizer.single([7, 8])
    assert preprocessor.targets(Draft("", sample_of(CAPTION)), encoding).labels.tolist() == [-1] * 4


def test_blank_and_cut_captions(tokenizer):
    [blank] = word(make_preprocessor(tokenizer, is_blank=True), sample_of(CAPTION))
    assert tokens(blank, tokenizer) == ["[CLS]", "[SEP]"] and word_labels(blank).tolist() == [-1, -1]
    [cut] = word(make_preprocessor(tokenizer, masked_words={"probability": 1.0}, max_length=5), sample_of(CAPTION))
    assert len(cut.encoding.input_ids) == len(word_labels(cut)) == 5
    assert cut.encoding.input_ids[-1] == tokenizer.sep_token_id
    assert (word_labels(cut) >= 0).tolist() == [False, True, True, True, False]
    assert cut.record["cut_wordpieces"] > 0


def test_of_a_users_text_every_mask_is_predicted_and_no_other_word(tokenizer, tmp_path):
    preprocessor = make_preprocessor(tokenizer, masked_words={"probability": 1.0})
    question = Question(tmp_path / "photo.jpg", "a [MASK] square left of [MASK]")
    sample = make_task(tokenizer).question(question)
    [text] = word(preprocessor, sample)
    assert tokens(text, tokenizer) == ["[CLS]", "a", "[MASK]", "square", "left", "of", "[MASK]", "[SEP]"]
    assert (word_labels(text) >= 0).nonzero()[0].tolist() == [2, 6]
    with pytest.raises(ValueError, match=r"has 6 wordpieces, and the run reads 4, so a \[MASK\] is lost; shorten"):
        word(make_preprocessor(tokenizer, max_length=6), sample)


def test_without_the_objective_no_word_is_masked(tokenizer):
    preprocessor = make_preprocessor(tokenizer, masked_words=0.0, relationship=1.0)
    for epoch in range(5):
        [text] = word(preprocessor, sample_of(CAPTION, own_texts=range(1), pool=[CAPTION] * 9), epoch=epoch)
        assert tokenizer.mask_token_id not in text.encoding.input_ids
        assert list(text.targets.parts) == ["relationship"]


# Answers behind questions


@pytest.mark.parametrize(
    ("form", "expected"),
    [("words", {"red box", "blue"}), ("letters", {"r e d b o x", "b l u e"}), ("left_out", {""})],
)
@pytest.mark.parametrize("question", ["what is it", "what is it?", "what is it ?"])
def test_one_of_the_answers_stands_behind_a_question(tmp_path, form, expected, question):
    tokenizer = make_tokenizer(tmp_path, "what is it ? red box blue", " ".join("redboxblue"))
    preprocessor = make_preprocessor(tokenizer, masked_words={"answer": form, "probability": 0.0})
    asked = SampleText(0, question, {}, HumanAnswers(("red box", "blue", "blue")))
    shown = set()
    for epoch in range(20):
        [text] = word(preprocessor, sample_of(asked), epoch=epoch)
        line = " ".join(tokens(text, tokenizer)[1:-1])
        start = "what is it ?" if form != "left_out" or "?" in question else "what is it"
        assert line.startswith(start) and not text.encoding.token_type_ids.any()
        shown.add(line.removeprefix(start).strip())
    assert shown == expected


def test_answers_that_nobody_gave_cannot_be_masked(tmp_path):
    tokenizer = make_tokenizer(tmp_path, "what is it")
    task = make_task(tokenizer, masked_words={"answer": "words"})
    facts = SimpleNamespace(groups=[[0]], corpus=None, truths=lambda: [HumanAnswers(("red",))])
    task.check_data(facts, None)
    facts.truths = lambda: [None]
    with pytest.raises(ValueError, match=r"masked_words\.answer is words, but no text of the data has human answers"):
        task.check_data(facts, None)
