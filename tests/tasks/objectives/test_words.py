"""Masked words of captions and of a corpus: which are masked, what becomes of them, and the losses."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from e2e_vl.samples import HumanAnswers, Question, SampleText
from e2e_vl.tasks.config import MaskedTextConfig, MaskedWordsConfig
from e2e_vl.tasks.objectives.base import TextDraft
from e2e_vl.tasks.objectives.words import CorpusMasking, MaskedText, MaskedWords, WordLabels, mask_words
from e2e_vl.text import TextTokenizer
from tests.tasks.objectives.tiny_objectives import HIDDEN, LENGTH, SIZES, VOCABULARY, make_inputs
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
        assert text.image_index == (0,) and text.record["text"] == CAPTION
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
    assert preprocessor.targets(TextDraft("", sample_of(CAPTION)), encoding).labels.tolist() == [-1] * 4


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


# Texts of a corpus beside captions

LINES = ["The first line.", "zweite Zeile: naïve", "x", "the last line has a few more words"]


@pytest.fixture
def corpus_tokenizer(tmp_path):
    return make_tokenizer(tmp_path, *LINES)


def draw_text(tokenizer, corpus=LINES, number: int = 0, **options):
    """The text that is drawn with one generator, and the labels of its wordpieces."""
    preprocessor = CorpusMasking(TextTokenizer(tokenizer, max_length=20), MaskedTextConfig(weight=1.0, **options))
    [(draft, encoding)] = preprocessor.extra_texts(sample_of("x", corpus=corpus), np.random.default_rng(number))
    return encoding, preprocessor.targets(draft, encoding).labels


def test_a_text_joins_lines_and_wraps(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    masking = CorpusMasking(TextTokenizer(tokenizer), MaskedTextConfig(min_words=12))
    words = masking.words(LINES, 2)
    assert len(words) == 13
    expected = tokenizer.encode(" ".join([LINES[2], LINES[3], LINES[0]]), add_special_tokens=False)
    assert [piece for word in words for piece in word] == expected


def test_a_small_corpus_repeats_itself_and_texts_are_cut(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    masking = CorpusMasking(TextTokenizer(tokenizer), MaskedTextConfig(min_words=64))
    assert len(masking.words(["x"], 0)) == 64
    encoding, labels = draw_text(tokenizer, ["x"], max_length=10, probability=0.0)
    np.testing.assert_array_equal(encoding.input_ids, [tokenizer.vocab["x"]] * 10)
    np.testing.assert_array_equal(labels, [-1] * 10)
    assert encoding.token_type_ids.tolist() == [0] * 10 and encoding.summary is None


def test_texts_have_64_pieces_without_special_tokens(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    """Whatever limit the captions have."""
    for number in range(4):
        encoding, labels = draw_text(tokenizer, number=number, probability=0.0)
        assert encoding.input_ids.shape == labels.shape == encoding.token_type_ids.shape == (64,)
        assert not {tokenizer.cls_token_id, tokenizer.sep_token_id} & set(encoding.input_ids.tolist())


def test_special_tokens_count_among_the_pieces_and_are_never_masked(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    encoding, labels = draw_text(tokenizer, probability=1.0, special_tokens=True)
    assert encoding.input_ids.shape == labels.shape == encoding.token_type_ids.shape == (64,)
    assert encoding.input_ids[[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    assert (labels < 0).nonzero()[0].tolist() == [0, 63]


def test_masked_texts_restore_to_the_text(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    for number in range(4):
        encoding, labels = draw_text(tokenizer, number=number, probability=0.5)
        plain, _ = draw_text(tokenizer, number=number, probability=0.0)
        assert 10 < (labels >= 0).sum() < 54
        np.testing.assert_array_equal(np.where(labels >= 0, labels, encoding.input_ids), plain.input_ids)


def test_every_caption_has_a_text_beside_it(corpus_tokenizer):
    tokenizer = corpus_tokenizer
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


def test_without_a_corpus_there_is_nothing_beside(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    preprocessor = make_preprocessor(tokenizer, masked_text=1.0)
    assert [text.image_index for text in word(preprocessor, sample_of("the first line"))] == [(0,)]


def test_blank_captions_leave_the_corpus(corpus_tokenizer):
    tokenizer = corpus_tokenizer
    caption, corpus = word(make_preprocessor(tokenizer, masked_text=1.0, is_blank=True), sample_of("x", corpus=LINES))
    assert tokens(caption, tokenizer) == ["[CLS]", "[SEP]"] and len(corpus.encoding.input_ids) == 64


# Losses


def labels_of(*labels: tuple[int, int, int]) -> WordLabels:
    """(text, position, wordpiece)"""
    values = torch.full((3, LENGTH), -1)
    for text, position, piece in labels:
        values[text, position] = piece
    return WordLabels(values)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_loss_is_a_cross_entropy_over_the_vocabulary(weight):
    inputs = make_inputs()
    output = inputs.run(
        MaskedWords(SIZES, MaskedWordsConfig(weight=weight)), labels_of((0, 1, 3), (2, 3, 8), (0, 2, 0))
    )
    states = inputs.encoded.text[[0, 0, 2], [1, 2, 3]]
    logits = inputs.word_head(states, inputs.encoded.word_embeddings)
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss.mean, weight * F.cross_entropy(logits, torch.tensor([3, 0, 8])))
    assert output.loss.count == 3 and output.logits.shape == (3, VOCABULARY)
    assert output.text.tolist() == [0, 0, 2]
    assert output.is_right.tolist() == (logits.argmax(dim=1) == torch.tensor([3, 0, 8])).tolist()


def test_only_masked_wordpieces_get_gradients_and_the_word_table_does():
    inputs = make_inputs()
    inputs.run(MaskedWords(SIZES, MaskedWordsConfig()), labels_of((0, 1, 3), (2, 3, 8))).loss.mean.backward()
    assert (inputs.encoded.text.grad.abs().sum(dim=2) > 0).nonzero().tolist() == [[0, 1], [2, 3]]
    assert (inputs.encoded.word_embeddings.grad.abs().sum(dim=1) > 0).all()
    assert inputs.encoded.regions.grad is None and inputs.encoded.summary.grad is None


def test_no_masked_word_is_loss_zero():
    inputs = make_inputs()
    output = inputs.run(MaskedWords(SIZES, MaskedWordsConfig()), labels_of())
    assert (output.loss.total.item(), output.loss.count.item(), output.loss.mean.item()) == (0, 0, 0)
    assert output.logits.shape == (0, VOCABULARY) and len(output.text) == len(output.is_right) == 0
    output.loss.mean.backward()
    assert not inputs.encoded.text.grad.any()


def test_the_head_has_no_layer_of_its_own_for_words():
    head = make_inputs().word_head
    assert {name: tuple(value.shape) for name, value in head.named_parameters()} == {
        "bias": (VOCABULARY,),
        "transform.dense.weight": (HIDDEN, HIDDEN),
        "transform.dense.bias": (HIDDEN,),
        "transform.norm.weight": (HIDDEN,),
        "transform.norm.bias": (HIDDEN,),
    }
    assert not list(MaskedWords(SIZES, MaskedWordsConfig()).parameters())
    assert MaskedWords.reads_words and not MaskedWords.predicts_regions


def test_loss_is_that_of_masked_words():
    inputs, labels = make_inputs(), labels_of((2, 0, 4), (2, 2, 1))
    own = inputs.run(MaskedText(SIZES, MaskedTextConfig(weight=2.0)), labels)
    other = inputs.run(MaskedWords(SIZES, MaskedWordsConfig(weight=1.0)), labels)
    torch.testing.assert_close(own.loss.mean, 2 * other.loss.mean)
    torch.testing.assert_close(own.logits, other.logits)
    assert own.loss.count == 2 and own.text.tolist() == [2, 2]


def test_no_text_of_the_corpus_is_loss_zero():
    output = make_inputs().run(MaskedText(SIZES, MaskedTextConfig(weight=1.0)), labels_of())
    assert output.loss.mean == 0 and output.loss.count == 0


def test_it_says_nothing_to_a_user_whose_text_has_an_image():
    objective = MaskedText(SIZES, MaskedTextConfig(weight=1.0))
    assert objective.answer(None, torch.zeros(0, 3), None) == {} and objective.lines(None) == []


def test_the_corpus_must_be_there():
    objective = MaskedText(SIZES, MaskedTextConfig(weight=1.0))
    objective.check(None, None, None)  # before the data are known
    objective.check(SimpleNamespace(corpus=["a"]), None, None)
    with pytest.raises(ValueError, match=r"set data.files.corpus and data.config.use_corpus=true, or .*masked_text=0"):
        objective.check(SimpleNamespace(corpus=None), None, None)
