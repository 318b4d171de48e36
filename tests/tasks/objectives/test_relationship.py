"""Captions of other images in the place of some; the loss is tested beside."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.samples import CorrectChoice, Question, SampleText
from e2e_vl.tasks.config import RelationshipConfig
from tests.tasks.objectives.worded import make_preprocessor, make_task
from tests.tasks.preprocessors import make_tokenizer, sample_of, tokens, word

POOL = [f"caption {number}" for number in range(10)]


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "caption 0 1 2 3 4 5 6 7 8 9 a b")


def exchanging(tokenizer, probability: float = 0.5, texts: str = "single", **options):
    relationship = {"weight": 1.0, "probability": probability, "texts": texts}
    return make_preprocessor(tokenizer, masked_words=0.0, relationship=relationship, **options)


def test_half_of_the_captions_belong_to_other_images(tokenizer):
    preprocessor = exchanging(tokenizer)
    matches, shown = [], set()
    for epoch in range(60):
        sample = sample_of(*POOL[:3], pool=POOL, own_texts=range(3))
        for number, text in enumerate(word(preprocessor, sample, epoch=epoch)):
            is_match = int(text.targets.parts["relationship"].is_match)
            assert text.record["is_match"] == bool(is_match)
            assert text.record["text_index"] == number
            if is_match:
                assert text.record["sent"] == POOL[number]
            else:
                assert text.record["sent"] in POOL[3:], "never another caption of the same image"
                shown.add(text.record["sent"])
            assert tokens(text, tokenizer) == ["[CLS]", *text.record["sent"].split(), "[SEP]"]
            matches.append(is_match)
    assert 0.35 < np.mean(matches) < 0.65
    assert shown == set(POOL[3:])


def test_the_exchange_is_part_of_the_texts_own_randomness(tokenizer):
    preprocessor = exchanging(tokenizer)
    sample = sample_of(*POOL[:3], pool=POOL, own_texts=range(3))
    one, other = (word(preprocessor, sample, epoch=epoch) for epoch in (4, 4))
    assert [text.record for text in one] == [text.record for text in other]
    assert one[0].record == json.loads(json.dumps(one[0].record))
    seen = {tuple(text.record["sent"] for text in word(preprocessor, sample, epoch=epoch)) for epoch in range(20)}
    assert len(seen) > 10


def test_without_the_objective_every_caption_is_its_own(tokenizer):
    preprocessor = make_preprocessor(tokenizer, masked_words=1.0)
    for epoch in range(10):
        [text] = word(preprocessor, sample_of(POOL[0], pool=POOL, own_texts=range(1)), epoch=epoch)
        assert text.record["sent"] == POOL[0] and "is_match" not in text.record


def test_texts_of_a_corpus_have_no_match(tokenizer):
    relationship, corpus = {"weight": 1.0, "probability": 0.9}, ["a b"]
    preprocessor = make_preprocessor(tokenizer, masked_text=1.0, relationship=relationship)
    for epoch in range(5):
        _, text = word(preprocessor, sample_of(POOL[0], pool=POOL, own_texts=range(1), corpus=corpus), epoch=epoch)
        assert text.targets.parts["relationship"].is_match == -1 and text.record == {}


def test_a_users_text_is_never_exchanged(tokenizer, tmp_path):
    task = make_task(tokenizer, relationship=1.0)
    sample = task.question(Question(tmp_path / "photo.jpg", "caption [MASK]"))
    for epoch in range(9):
        [text] = word(exchanging(tokenizer, 0.9), sample, epoch=epoch)
        assert text.record["sent"] == "caption [MASK]" and text.targets.parts["relationship"].is_match == 1


@pytest.mark.parametrize("probability", [0, 1, 1.5])
def test_probabilities_that_make_no_sense(probability):
    with pytest.raises(ValueError, match="it must be above 0 and below 1"):
        RelationshipConfig(probability=probability)


# A second caption


def test_a_second_caption_is_judged(tokenizer):
    """Half of the second captions are of the same image and never the first one; the others are of other images."""
    preprocessor = exchanging(tokenizer, texts="pair")
    matches, shown = [], set()
    for epoch in range(60):
        for number, text in enumerate(
            word(preprocessor, sample_of(*POOL[:3], pool=POOL, own_texts=range(3)), epoch=epoch)
        ):
            is_match, second = int(text.targets.parts["relationship"].is_match), text.record["second"]
            assert text.record["sent"] == POOL[number] and second != POOL[number]
            assert (second in POOL[:3]) == bool(is_match) == text.record["is_match"]
            assert tokens(text, tokenizer) == ["[CLS]", *POOL[number].split(), "[SEP]", *second.split(), "[SEP]"]
            assert text.encoding.token_type_ids.tolist() == [0] * 4 + [1] * 3
            matches.append(is_match)
            shown.add(second)
    assert 0.35 < np.mean(matches) < 0.65
    assert shown == set(POOL)


def test_wordpieces_of_both_captions_are_masked(tokenizer):
    relationship = {"weight": 1.0, "texts": "pair"}
    preprocessor = make_preprocessor(tokenizer, masked_words={"probability": 1.0}, relationship=relationship)
    [text] = word(preprocessor, sample_of(POOL[0], pool=POOL, own_texts=range(2)))
    labels = text.targets.parts["masked_words"].labels
    assert (labels >= 0).tolist() == [False, True, True, False, True, True, False]


def test_a_label_cannot_be_read_from_the_text(tokenizer):
    """The same two captions are right for one image and wrong for another: only the image tells them apart."""
    pool, preprocessor = ["caption a", "caption b", "caption a", "caption 0"], exchanging(tokenizer, texts="pair")
    labels = {}
    for own in ((0, 1), (2, 3)):
        sample = sample_of(SampleText(own[0], pool[own[0]], {}), pool=pool, own_texts=own)
        for epoch in range(60):
            [text] = word(preprocessor, sample, epoch=epoch)
            if text.record["second"] == "caption b":
                labels.setdefault(
                    own, (text.encoding.input_ids.tolist(), int(text.targets.parts["relationship"].is_match))
                )
    (first, right), (second, wrong) = labels[0, 1], labels[2, 3]
    assert first == second and (right, wrong) == (1, 0)


def test_an_only_caption_has_no_second_one(tokenizer):
    preprocessor = exchanging(tokenizer, 0.01, texts="pair")
    with pytest.raises(ValueError, match="texts is pair, but an image has one caption only"):
        word(preprocessor, sample_of(POOL[0], pool=POOL, own_texts=[0]))


def test_a_users_text_is_alone(tokenizer, tmp_path):
    relationship = {"weight": 1.0, "texts": "pair"}
    sample = make_task(tokenizer, relationship=relationship).question(
        Question(tmp_path / "photo.jpg", "caption [MASK]")
    )
    [text] = word(exchanging(tokenizer, 0.9, texts="pair"), sample)
    assert "second" not in text.record and text.record["sent"] == "caption [MASK]"


# Stated truths


@pytest.mark.parametrize(("truth", "label"), [(CorrectChoice(1), 1), (CorrectChoice(0), 0), (None, -1)])
def test_stated_truths_are_the_labels(tokenizer, truth, label):
    preprocessor = make_preprocessor(tokenizer, relationship={"weight": 1.0, "texts": "stated"})
    for epoch in range(5):
        [text] = word(preprocessor, sample_of(SampleText(0, POOL[0], {}, truth), pool=POOL, own_texts=[0]), epoch=epoch)
        assert text.record["sent"] == POOL[0] and int(text.targets.parts["relationship"].is_match) == label
