"""Objectives on whole texts: relationship prediction and image question answering."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from e2e_vl.samples import CorrectAnswer, CorrectChoice, HumanAnswers, Question, ReferredBox, SampleText, ScoredAnswers
from e2e_vl.tasks.config import ImageQAConfig, RelationshipConfig
from e2e_vl.tasks.objectives.texts import (
    AnswerLabel,
    ImageQA,
    MatchTargets,
    Relationship,
    known_answers,
    sample_answer,
    scores_of,
)
from tests.tasks.objectives.tiny_objectives import SIZES, make_inputs, make_preprocessor, make_task
from tests.tasks.preprocessors import preprocess, sample_of, tokens

POOL = [f"caption {number}" for number in range(10)]


def exchanging(tokenizer, probability: float = 0.5, texts: str = "single", **options):
    relationship = {"weight": 1.0, "probability": probability, "texts": texts}
    return make_preprocessor(tokenizer, masked_words=0.0, relationship=relationship, **options)


@pytest.mark.parametrize("texts", ["single", "pair"])
def test_half_of_the_captions_belong_to_other_images(tokenizer, texts):
    """The caption is another one, or is followed by another one, of the same image as often as of others."""
    preprocessor, is_pair = exchanging(tokenizer, texts=texts), texts == "pair"
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
    preprocessor = make_preprocessor(tokenizer, relationship={"weight": 1.0, "texts": "labelled"})
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
    assert output.is_right.tolist() == (logits.argmax(dim=1) == torch.tensor([0, 1])).tolist()
    output.loss.mean.backward()
    assert (inputs.encoded.summary.grad.abs().sum(dim=1) > 0).tolist() == [True, True, False]


@pytest.mark.parametrize(("texts", "last"), [("pair", [2, 3]), ("labelled", [2])])
def test_each_kind_of_text_needs_its_data(texts, last):
    objective = relationship_of(texts=texts)
    objective.check(SimpleNamespace(groups=[[0, 1], last], truths=lambda: [None, CorrectChoice(0)]), None, None)
    with pytest.raises(UserError, match=rf"relationship\.texts is {texts}"):
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
    truths = ScoredAnswers({"Cat": 1.0}), ScoredAnswers({"horse": 1.0}), ScoredAnswers({}), None, ReferredBox((0,) * 4)
    texts = encode(tokenizer, questions(*truths))
    assert [int(text.targets.parts["image_qa"].answer) for text in texts] == [1, -1, -1, -1, -1]
    assert texts[0].record["target_answer"] == "cat" and "target_answer" not in texts[1].record


def test_answers_of_other_kinds_score_as_in_the_official_files():
    """Visual question answering scores what ten people said, GQA has one right answer."""
    people = HumanAnswers(("Cat",) * 3 + ("the dog",) + ("horse",) * 6)
    assert scores_of(people) == pytest.approx({"cat": 0.9, "dog": 0.3, "horse": 1.0})
    assert scores_of(CorrectAnswer("dog")) == {"dog": 1.0} and scores_of(None) is None


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
    assert list(make_task(tokenizer, image_qa={"weight": 1.0, "answers": ANSWERS}).answers) == ANSWERS
