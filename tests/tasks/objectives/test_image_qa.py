"""Answers in pre-training: which one is drawn, when there is none, and that it never stands in the text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from e2e_vl.parts import decode
from e2e_vl.samples import CorrectAnswer, HumanAnswers, ReferredBox, ScoredAnswers
from e2e_vl.tasks.config import ImageQAConfig
from e2e_vl.tasks.objectives.texts import DrawnAnswer, ImageQA, draw_answer, scores_of
from tests.tasks.objectives.tiny_objectives import SIZES, make_inputs
from tests.tasks.objectives.worded import make_preprocessor, make_task
from tests.tasks.preprocessors import make_tokenizer, sample_of, tokens, word

ANSWERS = ("2", "cat", "dog", "gray")
CLASS_OF = {answer: number for number, answer in enumerate(ANSWERS)}
QUESTION = "is it a b"


def drawn(scores: dict[str, float], count: int = 1) -> Counter:
    generator = np.random.default_rng(0)
    return Counter(draw_answer(scores, CLASS_OF, generator) for _ in range(count))


def test_answers_are_drawn_in_proportion_to_their_scores():
    found = drawn({"a cat.": 0.9, "dog": 0.3, "horse": 5.0}, 4000)
    assert set(found) == {"cat", "dog"}
    assert found["cat"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_answers_that_are_spelled_otherwise_replace_others():
    """The score of "two" counts, whichever comes first (official code)."""
    for scores in ({"two": 0.3, "2": 1.0}, {"2": 1.0, "two": 0.3}):
        found = drawn(scores | {"grey": 0.9}, 4000)
        assert found["2"] / 4000 == pytest.approx(0.25, abs=0.03)


def test_one_answer_or_none_needs_no_draw():
    generator = SimpleNamespace()  # it has nothing to draw with
    assert draw_answer({"The dog": 0.3, "horse": 1.0}, CLASS_OF, generator) == "dog"
    assert draw_answer({"horse": 1.0}, CLASS_OF, generator) is None
    assert draw_answer({}, CLASS_OF, generator) is None


def test_the_best_answer(tokenizer):
    """Of the answers in the list; "two" is spelled otherwise and replaces "2", and of equal ones the first counts."""
    best = {"weight": 1.0, "answers": ANSWERS, "label": "best"}
    cases = [
        ({"horse": 9.0, "dog": 0.3, "a cat.": 0.9}, "cat"),
        ({"2": 1.0, "two": 0.3, "grey": 0.9}, "gray"),
        ({"dog": 0.6, "cat": 0.6}, "dog"),
        ({"horse": 1.0}, None),
    ]
    for _ in range(5):
        texts = worded(tokenizer, questions(*(ScoredAnswers(scores) for scores, _ in cases)), image_qa=best)
        assert [text.record.get("drawn_answer") for text in texts] == [answer for _, answer in cases]
    with pytest.raises(ValueError, match="label is 'worst'; it must be one of drawn, best"):
        decode(best | {"label": "worst"}, ImageQAConfig, "task.config.objectives.image_qa")


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "is it a b cat dog 2 gray caption")


def questions(*truths: object, **more):
    sample = sample_of(*[QUESTION] * len(truths), **more)
    texts = tuple(dataclasses.replace(text, truth=truth) for text, truth in zip(sample.texts, truths, strict=True))
    return dataclasses.replace(sample, texts=texts)


def worded(tokenizer, sample, **objectives):
    settings = {"masked_words": 0.0, "image_qa": {"weight": 1.0, "answers": ANSWERS}}
    return word(make_preprocessor(tokenizer, **settings | objectives), sample)


def test_only_questions_with_a_known_answer_are_learned_from(tokenizer):
    truths = (
        ScoredAnswers({"Cat": 1.0}),
        ScoredAnswers({"horse": 1.0}),
        ScoredAnswers({}),
        None,
        ReferredBox((0.0, 0.0, 1.0, 1.0)),
    )
    texts = worded(tokenizer, questions(*truths))
    assert [int(text.targets.parts["image_qa"].answer) for text in texts] == [1, -1, -1, -1, -1]
    assert texts[0].record["drawn_answer"] == "cat" and "drawn_answer" not in texts[1].record


def test_answers_of_other_kinds_score_as_in_the_official_files(tokenizer):
    """Visual question answering scores what ten people said, GQA has one right answer."""
    people = HumanAnswers(("Cat",) * 3 + ("the dog",) + ("horse",) * 6)
    assert scores_of(people) == pytest.approx({"cat": 0.9, "dog": 0.3, "horse": 1.0})
    assert scores_of(CorrectAnswer("dog")) == {"dog": 1.0} and scores_of(None) is None
    texts = worded(tokenizer, questions(CorrectAnswer("dog"), HumanAnswers(("gray",) * 10)))
    assert [int(text.targets.parts["image_qa"].answer) for text in texts] == [2, 3]


def test_the_answer_never_stands_in_the_text(tokenizer):
    for truth in (ScoredAnswers({"cat": 1.0}), ScoredAnswers({"dog": 1.0}), None):
        [text] = worded(tokenizer, questions(truth))
        assert tokens(text, tokenizer) == ["[CLS]", *QUESTION.split(), "[SEP]"]


def test_the_answer_to_a_question_about_another_image_is_not_learned(tokenizer):
    pool = [QUESTION, "caption a", "caption b"]
    relationship = {"weight": 1.0, "probability": 0.5}
    seen = set()
    for index in range(30):
        sample = questions(ScoredAnswers({"cat": 1.0}), pool=pool, own_texts=[0])
        preprocessor = make_preprocessor(
            tokenizer, masked_words=0.0, relationship=relationship, image_qa={"weight": 1.0, "answers": ANSWERS}
        )
        [text] = word(preprocessor, sample, epoch=index)
        is_match = int(text.targets.parts["relationship"].is_match)
        assert int(text.targets.parts["image_qa"].answer) == (1 if is_match else -1)
        seen.add(is_match)
    assert seen == {0, 1}


def make_objective(**settings) -> ImageQA:
    torch.manual_seed(0)
    return ImageQA(SIZES, ImageQAConfig(**{"weight": 1.0, "answers": ANSWERS} | settings))


def test_loss_is_a_cross_entropy_over_the_texts_with_an_answer():
    inputs, objective = make_inputs(), make_objective(weight=2.0)
    assert objective.head.transform["dense"].out_features == 2 * SIZES.summary_size
    output = inputs.run(objective, DrawnAnswer(torch.tensor([3, -1, 0])))
    logits = objective.head(inputs.encoded.summary[[0, 2]])
    torch.testing.assert_close(output.loss.mean, 2 * F.cross_entropy(logits, torch.tensor([3, 0])))
    assert output.text.tolist() == [0, 2]
    nothing = inputs.run(objective, DrawnAnswer(torch.tensor([-1, -1, -1])))
    assert nothing.loss.mean == 0 and nothing.loss.count == 0


def test_it_is_learned():
    inputs, objective, targets = make_inputs(), make_objective(), DrawnAnswer(torch.tensor([3, 1, 0]))
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.05)
    for _ in range(40):
        optimiser.zero_grad()
        inputs.run(objective, targets).loss.mean.backward()
        optimiser.step()
    assert inputs.run(objective, targets).is_right.all()


def test_data_without_a_known_answer_are_refused():
    objective = make_objective()
    facts = SimpleNamespace(truths=lambda: [None, ScoredAnswers({"horse": 1.0})])
    with pytest.raises(ValueError, match=r"has an answer that is in task\.config\.objectives\.image_qa\.answers"):
        objective.check(facts, None, None)
    objective.check(SimpleNamespace(truths=lambda: [ScoredAnswers({"A dog": 1.0})]), None, None)
    objective.check(None, None, None)


def test_the_list_of_answers_is_needed(tokenizer):
    with pytest.raises(ValueError, match=r"image_qa\.answers is missing"):
        ImageQAConfig(weight=1.0)
    task = make_task(tokenizer, image_qa={"weight": 1.0, "answers": ANSWERS})
    assert task.answers == ANSWERS
    assert make_task(tokenizer, masked_words=1.0).answers == ()
