"""Shared by the tasks: new heads, phrases in pictures, texts without a target, and settings that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from detector.errors import UserError
from e2e_vl import registry
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.preprocessing import Preprocessor
from e2e_vl.registry import decode
from e2e_vl.samples import (
    CorrectAnswer,
    CorrectChoice,
    EntityPhrases,
    HumanAnswers,
    PhraseBoxes,
    ReferredBoxes,
    SampleText,
)
from e2e_vl.structures import EncoderOutput
from e2e_vl.tasks.base import Task, phrase_boxes
from e2e_vl.tasks.config import Flickr30KConfig, GQAConfig, NLVR2Config, ReferringConfig, VCRConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer
from tests.encoders.small import make_inputs
from tests.tasks.batches import make_batch
from tests.tasks.preprocessors import preprocess, sample_of

H = 400
TASKS = {
    "refcoco": lambda **options: ReferringTask(H, ReferringConfig(**options)),
    "vqa": lambda **options: VQATask(H, VQAConfig(answers=[str(number) for number in range(50)], **options)),
    "vcr": lambda **options: VCRTask(H, VCRConfig(**options)),
}


def linears(name: str, **options) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    head = TASKS[name](**options).head.requires_grad_(False)
    return [module for module in head.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("name", TASKS)
def test_heads_start_as_in_the_official_code_or_as_in_the_paper(name):
    official, normal = linears(name), linears(name, head_init="normal")
    assert len(official) == len(normal) == (1 if name == "vcr" else 2)
    for linear in official:
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5  # Xavier uniform
        assert 0.95 * bound < linear.weight.abs().max() <= bound
    for linear in normal:
        assert linear.weight.std() == pytest.approx(0.02, rel=0.15)
        assert linear.weight.mean().abs() < 0.005
    assert all(linear.bias.abs().sum() == 0 for linear in official + normal)


def phrase(text: str, score: float, correct: bool | None = None, box: tuple | None = (5, 5, 40, 40)) -> GroundedPhrase:
    return GroundedPhrase(text, (0, len(text)), box, score, correct)


def test_unsure_phrases_are_shown_where_they_may_explain_a_wrong_answer():
    own, landmark = phrase("a cat", 0.9, False), phrase("a dog", 0.3, False, box=(50, 5, 80, 30))
    wrong = Prediction(grounded=(own, landmark), correct=0.0)
    assert phrase_boxes(wrong) == ([own.box, landmark.box], ["a cat?", "a dog? 0.30, unsure"], [False, True])
    assert phrase_boxes(wrong, 1)[1] == ["a dog? 0.30, unsure"]
    for correct in (0.3, 1.0, None):
        assert phrase_boxes(Prediction(grounded=(own, landmark), correct=correct))[1] == ["a cat?"]
    nowhere = Prediction(grounded=(own, phrase("a star", 0.0, box=None)), correct=0.0)
    assert phrase_boxes(nowhere) == ([own.box], ["a cat?"], [False])


SIZE = 32  # of `make_inputs` there are three texts
BOX = (10.0, 10.0, 30.0, 30.0)
PHRASES = PhraseBoxes(((0, 3),), (np.array([BOX]),))
ENTITIES = EntityPhrases(PHRASES.spans, PHRASES.boxes, entities=("1",), types=(("people",),))
ANSWERS = {"answers": ["red", "blue"], "head_width": 1, "init_from_words": False}
PEOPLE = HumanAnswers(("red",) * 10)
CASES = [
    *((VQATask, VQAConfig(loss=loss, **ANSWERS), PEOPLE) for loss in ("binary", "softmax", "divergence")),
    (GQATask, GQAConfig(**ANSWERS), CorrectAnswer("blue")),
    *((NLVR2Task, NLVR2Config(loss=loss), CorrectChoice(1)) for loss in ("softmax", "sigmoid")),
    *((ReferringTask, ReferringConfig(loss=loss), ReferredBoxes((BOX,))) for loss in ("binary", "softmax")),
    (Flickr30KTask, Flickr30KConfig(), ENTITIES),
]
OTHER_TRUTHS = (None, PHRASES, ReferredBoxes((BOX,)))


def preprocessor_of(task: Task, tokenizer, *, with_phrase_spans: bool = True) -> Preprocessor:
    return task.preprocessor(TextTokenizer(tokenizer, VLBertModel.layout, with_phrase_spans=with_phrase_spans))


def texts_of(task: Task, tokenizer, *truths: Any, may_lack: bool = True, with_phrase_spans: bool = True) -> list:
    """One encoded text per truth."""
    fields = {"phrases": PHRASES, "may_lack_target": may_lack}
    texts = (SampleText(n, "red square", {}, truth, **fields) for n, truth in enumerate(truths))
    return preprocess(preprocessor_of(task, tokenizer, with_phrase_spans=with_phrase_spans), sample_of(*texts))


def other_truths(task: Task, tokenizer) -> list[Any]:
    learned = preprocessor_of(task, tokenizer).learns_from
    return [truth for truth in OTHER_TRUTHS if not isinstance(truth, learned)]


@pytest.mark.parametrize(("task_class", "config", "own"), CASES)
def test_only_texts_with_a_target_are_learned(tokenizer, task_class, config, own):
    torch.manual_seed(0)
    task = task_class(SIZE, config).eval()
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter)
    others = other_truths(task, tokenizer)
    _, regions = make_inputs()
    # the first region of a text is what is referred to and named, the others lie elsewhere
    places = torch.arange(regions.attention_mask.shape[1])[:, None] * 40.0 + torch.tensor(BOX)
    regions = dataclasses.replace(regions, boxes=places.expand_as(regions.boxes))
    rows = {"mixed": [own, others[0], own], "own": [own, own, own], "others": [others[0], others[-1], others[0]]}
    states = torch.randn(3, 4, SIZE), torch.randn(3, regions.attention_mask.shape[1], SIZE), torch.randn(3, SIZE)
    found, reached = {}, {}
    for kind, truths in rows.items():
        targets = [text.targets for text in texts_of(task, tokenizer, *truths)]
        text, region, summary = (state.clone().requires_grad_() for state in states)
        batch = make_batch([[0]] * 3, targets=type(targets[0]).join(targets))
        encoded = EncoderOutput(text=text, regions=region, summary=summary)
        [found[kind]] = task(batch, regions, encoded).losses.values()
        found[kind].total.backward()
        grads = [one.grad.flatten(1).abs().amax(dim=1) for one in (text, region, summary) if one.grad is not None]
        reached[kind] = (torch.stack(grads).amax(dim=0) > 0).tolist()
    assert (found["others"].total.item(), found["others"].count.item()) == (0, 0)
    assert reached["others"] == [False] * 3
    assert not reached["mixed"][1] and reached["mixed"][0]
    assert 0 < found["mixed"].count < found["own"].count
    assert 0 < found["mixed"].total <= found["own"].total


@pytest.mark.parametrize(("task_class", "config", "own"), CASES)
def test_which_texts_lack_a_target(tokenizer, task_class, config, own):
    """None in a single data set, or in a run without phrases."""
    task = task_class(SIZE, config)
    others = other_truths(task, tokenizer)
    first, *rest = texts_of(task, tokenizer, own, *others)
    assert first.targets.has_target is None and "only_phrases" not in first.record
    assert all(one.targets.has_target is False and one.record["only_phrases"] is True for one in rest)
    joined = type(first.targets).join([first.targets, *(one.targets for one in rest)])
    assert joined.has_target.tolist() == [True, *[False] * len(rest)]
    for options in ({"may_lack": False}, {"with_phrase_spans": False}):
        assert all(one.targets.has_target is None for one in texts_of(task, tokenizer, own, others[0], **options))


def test_a_task_whose_texts_have_choices(tokenizer):
    [text] = texts_of(VCRTask(SIZE), tokenizer, PHRASES)
    assert text.targets.has_target is False and text.targets.is_correct.dtype == np.float32
    assert text.record["only_phrases"] is True and text.phrases.spans.tolist() == [[1, 2]]
    with pytest.raises(UserError, match="'red square' has no choices"):
        texts_of(VCRTask(SIZE), tokenizer, PHRASES, may_lack=False)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("vcr", "people_names", []), ("pretraining", "replace_probability", 0.5), ("masked_words", "probability", 15)],
)
def test_a_wrong_setting_is_named(name, field, value):
    with pytest.raises(UserError, match=field):
        decode({field: value}, (registry.TASKS | registry.OBJECTIVES)[name].config_class, "task.config")


def test_messages_name_an_objective_as_settings_do():
    assert all(part.config_class.name == name for name, part in registry.OBJECTIVES.items())
