"""Objectives on texts: masked words of captions and of a corpus, relationship prediction, image question answering."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from e2e_vl.preprocessing import EncodedText
from e2e_vl.samples import (
    CorrectAnswer,
    CorrectChoice,
    HumanAnswers,
    Question,
    ReferredBoxes,
    SampleText,
    ScoredAnswers,
)
from e2e_vl.tasks.config import ImageQAConfig, MaskedTextConfig, MaskedWordsConfig, RelationshipConfig
from e2e_vl.tasks.objectives.texts import (
    AnswerLabel,
    ImageQA,
    MatchTargets,
    Relationship,
    known_answers,
    sample_answer,
    truth_scores,
)
from e2e_vl.tasks.objectives.words import CorpusMasking, MaskedText, MaskedWords, WordLabels, mask_words
from e2e_vl.text import TextTokenizer
from tests.tasks.objectives.tiny_objectives import LENGTH, SIZES, make_inputs, make_preprocessor, make_task
from tests.tasks.preprocessors import make_tokenizer, preprocess, sample_of, tokens

MASK, SIZE = 4, 1000
RULE = partial(mask_words, mask_id=MASK, vocab_size=SIZE)
WORDS = [[10], [20, 21, 22], [30, 31], [40]] * 5000
IDS = np.array([piece for pieces in WORDS for piece in pieces])


def test_labels_are_the_original_ids_of_whole_words():
    ids, labels = RULE(WORDS, np.random.default_rng(0))
    np.testing.assert_array_equal(labels[labels >= 0], IDS[labels >= 0])
    np.testing.assert_array_equal(ids[labels < 0], IDS[labels < 0])
    ends = np.cumsum([len(pieces) for pieces in WORDS])[:-1]
    for own, changed in zip(np.split(labels, ends), np.split(ids, ends), strict=True):
        assert len(set(own >= 0)) == 1 and (changed == MASK).sum() in (0, 1, len(own))
    assert (RULE(WORDS, np.random.default_rng(0), probability=0.0)[0] == IDS).all()


def test_shares_of_the_official_code():
    ids, labels = RULE(WORDS, np.random.default_rng(2))
    starts = np.cumsum([0, *(len(pieces) for pieces in WORDS[:-1])])
    chosen = labels >= 0
    assert chosen[starts].mean() == pytest.approx(0.15, abs=0.01)
    assert (ids[starts] == MASK)[chosen[starts]].mean() == pytest.approx(0.8, abs=0.03)
    assert (ids[starts] == IDS[starts])[chosen[starts]].mean() == pytest.approx(0.1, abs=0.02)
    replaced = ids[chosen & (ids != MASK) & (ids != IDS)]
    assert len(replaced) / chosen.sum() == pytest.approx(0.1, abs=0.02)
    assert replaced.min() < 20 and replaced.max() > SIZE - 20
    assert len(set(replaced.tolist())) > 0.3 * len(replaced), "each piece is replaced on its own"
    ids, labels = RULE(WORDS, np.random.default_rng(3), always_mask=True)  # paper
    assert (ids[labels >= 0] == MASK).all() and (labels >= 0).mean() == pytest.approx(0.15, abs=0.01)


CAPTION = "A red square stands left of the naïve box"


def word_labels(text: EncodedText, objective: str = "masked_words") -> np.ndarray:
    return text.targets.parts[objective].labels


def test_masks_depend_on_seed_epoch_and_text_only(tokenizer):
    preprocessor = make_preprocessor(tokenizer, masked_words={"probability": 0.5})
    captions = sample_of(*[CAPTION] * 8)

    def made(sample, **draws) -> list[tuple[list[int], int]]:
        return [(text.encoding.input_ids.tolist(), text.seed) for text in preprocess(preprocessor, sample, **draws)]

    first = made(captions)
    assert first == made(captions)
    alone = [made(sample_of(*captions.texts[n : n + 1])) for n in range(8)]
    assert [row for rows in alone for row in rows] == first
    for other in (made(captions, epoch=1), made(captions, seed=1)):
        assert all(one != two for one, two in zip(first, other, strict=True))
    assert len({seed for _, seed in first}) == 8
    assert len({tuple(ids) for ids, _ in first}) > 4


def test_of_a_users_text_every_mask_is_predicted_and_no_other_word(tokenizer, tmp_path):
    sample = make_task(tokenizer).question(Question(tmp_path / "photo.jpg", "a [MASK] square left of [MASK]"))
    [text] = preprocess(make_preprocessor(tokenizer, masked_words={"probability": 1.0}), sample)
    assert tokens(text, tokenizer) == ["[CLS]", "a", "[MASK]", "square", "left", "of", "[MASK]", "[SEP]"]
    assert (word_labels(text) >= 0).nonzero()[0].tolist() == [2, 6]


@pytest.mark.parametrize(
    ("form", "question", "line", "answers"),
    [("words", "what is it ?", "what is it ? ", {"red box", "blue"}), ("left_out", "what is it", "what is it", {""})],
)
def test_one_of_the_answers_follows_a_question(tokenizer, form, question, line, answers):
    preprocessor = make_preprocessor(tokenizer, masked_words={"answer": form, "probability": 0.0})
    sample = sample_of(SampleText(0, question, {}, HumanAnswers(("red box", "blue", "blue"))))
    found = {" ".join(tokens(*preprocess(preprocessor, sample, epoch=n), tokenizer)[1:-1]) for n in range(20)}
    assert found == {line + answer for answer in answers}


LINES = ["The first line.", "zweite Zeile: naïve", "x", "the last line has a few more words"]


@pytest.fixture
def corpus_tokenizer(tmp_path):
    return make_tokenizer(tmp_path, *LINES)


def corpus_text(tokenizer, number: int = 0, **options) -> tuple[list[int], list[int]]:
    """The ids and labels of the text that is drawn with one generator."""
    masking = CorpusMasking(TextTokenizer(tokenizer, max_length=20), MaskedTextConfig(weight=1.0, **options))
    [(draft, encoding)] = masking.extra_texts(sample_of("x", corpus=LINES), np.random.default_rng(number))
    return encoding.input_ids.tolist(), masking.targets(draft, encoding).labels.tolist()


def test_a_text_joins_lines_and_starts_again_after_the_last(corpus_tokenizer):
    words = CorpusMasking(TextTokenizer(corpus_tokenizer), MaskedTextConfig(min_words=12)).words_from_line(LINES, 2)
    expected = corpus_tokenizer.encode(" ".join([LINES[2], LINES[3], LINES[0]]), add_special_tokens=False)
    assert len(words) == 13 and [piece for pieces in words for piece in pieces] == expected


@pytest.mark.parametrize("special_tokens", [False, True])
def test_texts_of_64_wordpieces_are_masked(corpus_tokenizer, special_tokens):
    ends = [corpus_tokenizer.cls_token_id, corpus_tokenizer.sep_token_id]
    for number in range(4):
        plain, none = corpus_text(corpus_tokenizer, number, probability=0.0, special_tokens=special_tokens)
        ids, labels = corpus_text(corpus_tokenizer, number, probability=0.5, special_tokens=special_tokens)
        assert len(plain) == len(ids) == len(labels) == 64 and set(none) == {-1}
        assert ([plain[0], plain[-1]] == ends) == special_tokens
        assert 10 < sum(label >= 0 for label in labels) < 54
        assert [old if label < 0 else label for old, label in zip(ids, labels, strict=True)] == plain
    _, labels = corpus_text(corpus_tokenizer, probability=1.0, special_tokens=True)
    assert [place for place, label in enumerate(labels) if label < 0] == [0, 63]


def test_every_caption_has_a_text_beside_it(corpus_tokenizer):
    preprocessor = make_preprocessor(corpus_tokenizer, masked_text={"weight": 1.0, "probability": 0.5})
    captions = sample_of("the first line", "a few words", corpus=LINES)
    texts = preprocess(preprocessor, captions)
    assert [text.image_index for text in texts] == [(0,), (), (0,), ()]
    for caption, corpus in zip(texts[::2], texts[1::2], strict=True):
        assert corpus.encoding.input_ids.shape == (64,) and corpus.record == {} and corpus.seed == 0
        assert (word_labels(corpus, "masked_text") >= 0).any()
        assert set(word_labels(corpus)) == {-1}, "its words belong to one objective"
        assert set(word_labels(caption, "masked_text")) == {-1}
    alone = preprocess(preprocessor, dataclasses.replace(captions, texts=captions.texts[1:]))
    np.testing.assert_array_equal(alone[1].encoding.input_ids, texts[3].encoding.input_ids)
    drawn = {tuple(preprocess(preprocessor, captions, epoch=e)[1].encoding.input_ids) for e in range(20)}
    assert len(drawn) > 10, "the corpus is drawn at random"


def labels_of(*labels: tuple[int, int, int]) -> WordLabels:
    """(text, position, wordpiece)"""
    values = torch.full((3, LENGTH), -1)
    for text, position, piece in labels:
        values[text, position] = piece
    return WordLabels(values)


def test_loss_is_a_cross_entropy_over_the_vocabulary():
    inputs, objective = make_inputs(), MaskedWords(SIZES, MaskedWordsConfig(weight=0.5))
    output = inputs.run(objective, labels_of((0, 1, 3), (2, 3, 8), (0, 2, 0)))
    states, truth = inputs.encoded.text[[0, 0, 2], [1, 2, 3]], torch.tensor([3, 0, 8])
    logits = inputs.word_head(states, inputs.encoded.word_embeddings)
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss.mean, 0.5 * F.cross_entropy(logits, truth))
    assert output.loss.count == 3 and output.text.tolist() == [0, 0, 2]
    assert output.is_correct.tolist() == (logits.argmax(dim=1) == truth).tolist()
    output.loss.mean.backward()
    assert (inputs.encoded.text.grad.abs().sum(dim=2) > 0).nonzero().tolist() == [[0, 1], [0, 2], [2, 3]]
    assert (inputs.encoded.word_embeddings.grad.abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (MaskedText(SIZES, MaskedTextConfig(weight=1.0)), "objectives.masked_text"),
        (MaskedWords(SIZES, MaskedWordsConfig(answer="letters")), "masked_words.answer is letters"),
    ],
)
def test_data_without_corpus_or_human_answers_are_refused(objective, message):
    objective.check(SimpleNamespace(corpus=["a"], truths=lambda: [None, HumanAnswers(("a",))]), None, None)
    objective.check(None, None, None)
    with pytest.raises(UserError, match=message):
        objective.check(SimpleNamespace(corpus=None, truths=lambda: [None, CorrectAnswer("a")]), None, None)


# Whole texts

POOL = [f"caption {number}" for number in range(10)]


def exchanging(tokenizer, probability: float = 0.5, text_format: str = "single", **options):
    relationship = {"weight": 1.0, "probability": probability, "text_format": text_format}
    return make_preprocessor(tokenizer, masked_words=0.0, relationship=relationship, **options)


@pytest.mark.parametrize("texts", ["single", "pair"])
def test_half_of_the_captions_belong_to_other_images(tokenizer, texts):
    """The caption is another one, or is followed by another one, of the same image as often as of others."""
    preprocessor, is_pair = exchanging(tokenizer, text_format=texts), texts == "pair"
    matches, shown = [], set()
    for epoch in range(60):
        sample = sample_of(*POOL[:3], pool=POOL, own_texts=range(3))
        for number, text in enumerate(preprocess(preprocessor, sample, epoch=epoch)):
            is_match, record = int(text.targets.parts["relationship"].is_match), text.record
            judged = record["second" if is_pair else "text"]
            assert record["text_index"] == number and record["is_match"] == bool(is_match) == (judged in POOL[:3])
            if is_pair:
                assert record["text"] == POOL[number] and judged != POOL[number]
                assert text.encoding.token_type_ids.tolist() == [0] * 4 + [1] * 3
            else:
                assert not is_match or judged == POOL[number], "never another caption of the same image"
            said = [*record["text"].split(), "[SEP]", *(judged.split() if is_pair else ())]
            assert tokens(text, tokenizer) == ["[CLS]", *said, *["[SEP]"] * is_pair]
            matches.append(is_match)
            shown.add(judged)
    assert 0.35 < np.mean(matches) < 0.65
    assert shown == set(POOL)


def test_a_users_text_is_never_exchanged(tokenizer, tmp_path):
    sample = make_task(tokenizer).question(Question(tmp_path / "photo.jpg", "caption [MASK]"))
    for texts, epoch in itertools.product(("single", "pair"), range(9)):
        [text] = preprocess(exchanging(tokenizer, 0.9, texts), sample, epoch=epoch)
        assert "second" not in text.record
        assert text.record["text"] == "caption [MASK]" and text.targets.parts["relationship"].is_match == 1


@pytest.mark.parametrize(("truth", "label"), [(CorrectChoice(1), 1), (CorrectChoice(0), 0), (None, -1)])
def test_truths_of_the_data_are_the_labels(tokenizer, truth, label):
    preprocessor = make_preprocessor(tokenizer, relationship={"weight": 1.0, "text_format": "labelled"})
    [text] = preprocess(preprocessor, sample_of(SampleText(0, POOL[0], {}, truth)))
    assert text.record["text"] == POOL[0] and int(text.targets.parts["relationship"].is_match) == label


def relationship_of(**settings) -> Relationship:
    torch.manual_seed(0)
    return Relationship(SIZES, RelationshipConfig(**{"weight": 1.0} | settings))


def test_loss_is_a_cross_entropy_over_the_texts_with_an_image():
    inputs, objective = make_inputs(), relationship_of(weight=2.0)
    output = inputs.run(objective, MatchTargets(torch.tensor([0, 1, -1])))
    logits = objective.head(inputs.encoded.summary)[:2]
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss.mean, 2 * F.cross_entropy(logits, torch.tensor([0, 1])))
    assert output.loss.count == 2 and output.text.tolist() == [0, 1]
    assert output.is_correct.tolist() == (logits.argmax(dim=1) == torch.tensor([0, 1])).tolist()
    output.loss.mean.backward()
    assert (inputs.encoded.summary.grad.abs().sum(dim=1) > 0).tolist() == [True, True, False]


@pytest.mark.parametrize(("texts", "last"), [("pair", [2, 3]), ("labelled", [2])])
def test_each_kind_of_text_needs_its_data(texts, last):
    objective = relationship_of(text_format=texts)
    objective.check(SimpleNamespace(groups=[[0, 1], last], truths=lambda: [None, CorrectChoice(0)]), None, None)
    with pytest.raises(UserError, match=rf"relationship\.text_format is {texts}"):
        objective.check(SimpleNamespace(groups=[[0, 1], [2]], truths=lambda: [None]), None, None)


def test_captions_of_other_images_need_other_images(tokenizer):
    with pytest.raises(UserError, match="two images"):
        preprocess(exchanging(tokenizer, 0.99), sample_of(*POOL[:3], pool=POOL[:3], own_texts=range(3)))


ANSWERS = ["2", "cat", "dog", "gray"]
CLASS_OF = {answer: number for number, answer in enumerate(ANSWERS)}
QUESTION = "is it a b"


def test_answers_are_drawn_in_proportion_to_their_scores():
    generator = np.random.default_rng(0)
    found = Counter(sample_answer({"a cat.": 0.9, "dog": 0.3, "horse": 5.0}, CLASS_OF, generator) for _ in range(4000))
    assert set(found) == {"cat", "dog"}
    assert found["cat"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert sample_answer({"The dog": 0.3, "horse": 1.0}, CLASS_OF, None) == "dog"  # one needs no draw
    assert sample_answer({"horse": 1.0}, CLASS_OF, None) is None


def test_the_best_answer(tokenizer):
    """Of the answers in the list; "two" replaces "2", and of equal scores the first counts."""
    for scores in ({"two": 0.3, "2": 1.0}, {"2": 1.0, "two": 0.3}):
        assert known_answers(scores | {"grey": 0.9}, CLASS_OF) == {"2": 0.3, "gray": 0.9}
    cases = [
        ({"horse": 9.0, "dog": 0.3, "a cat.": 0.9}, "cat"),
        ({"2": 1.0, "two": 0.3, "grey": 0.9}, "gray"),
        ({"dog": 0.6, "cat": 0.6}, "dog"),
        ({"horse": 1.0}, None),
    ]
    texts = encode(tokenizer, questions(*(ScoredAnswers(scores) for scores, _ in cases)), label="best")
    assert [text.record.get("target_answer") for text in texts] == [answer for _, answer in cases]


def questions(*truths: object, **more):
    sample = sample_of(*[QUESTION] * len(truths), **more)
    texts = tuple(dataclasses.replace(text, truth=truth) for text, truth in zip(sample.texts, truths, strict=True))
    return dataclasses.replace(sample, texts=texts)


def encode(tokenizer, sample, **settings):
    image_qa = {"weight": 1.0, "answers": ANSWERS} | settings
    return preprocess(make_preprocessor(tokenizer, masked_words=0.0, image_qa=image_qa), sample)


def test_only_questions_with_a_known_answer_are_learned_from(tokenizer):
    truths = (
        ScoredAnswers({"Cat": 1.0}),
        ScoredAnswers({"horse": 1.0}),
        ScoredAnswers({}),
        None,
        ReferredBoxes(((0,) * 4,)),
    )
    texts = encode(tokenizer, questions(*truths))
    assert [int(text.targets.parts["image_qa"].answer) for text in texts] == [1, -1, -1, -1, -1]
    assert texts[0].record["target_answer"] == "cat" and "target_answer" not in texts[1].record


def test_answers_of_other_kinds_score_as_in_the_official_files():
    """Visual question answering scores what ten people said, GQA has one right answer."""
    people = HumanAnswers(("Cat",) * 3 + ("the dog",) + ("horse",) * 6)
    assert truth_scores(people) == pytest.approx({"cat": 0.9, "dog": 0.3, "horse": 1.0})
    assert truth_scores(CorrectAnswer("dog")) == {"dog": 1.0} and truth_scores(None) is None


def image_qa(**settings) -> ImageQA:
    torch.manual_seed(0)
    return ImageQA(SIZES, ImageQAConfig(**{"weight": 1.0, "answers": ANSWERS} | settings))


def test_loss_is_a_cross_entropy_over_the_texts_with_an_answer():
    inputs, objective = make_inputs(), image_qa(weight=2.0)
    assert objective.head.transform["dense"].out_features == 2 * SIZES.summary_size
    output = inputs.run(objective, AnswerLabel(torch.tensor([3, -1, 0])))
    logits = objective.head(inputs.encoded.summary[[0, 2]])
    torch.testing.assert_close(output.loss.mean, 2 * F.cross_entropy(logits, torch.tensor([3, 0])))
    assert output.text.tolist() == [0, 2]


def test_a_list_with_a_known_answer_is_needed(tokenizer):
    objective = image_qa()
    objective.check(SimpleNamespace(truths=lambda: [None, ScoredAnswers({"A dog": 1.0})]), None, None)
    with pytest.raises(UserError, match=r"image_qa\.answers"):
        objective.check(SimpleNamespace(truths=lambda: [None, ScoredAnswers({"horse": 1.0})]), None, None)
    with pytest.raises(UserError, match=r"image_qa\.answers is missing"):
        image_qa(answers=None)
    task = make_task(tokenizer, image_qa={"weight": 1.0, "answers": ANSWERS})
    assert task.answer_vocabulary.answers == ANSWERS
