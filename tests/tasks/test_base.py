"""What tasks share: the initial values of their heads, pictures, and texts without a target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detector.errors import UserError
from e2e_vl import parts
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.examples import Preprocessor
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.samples import CorrectAnswer, CorrectChoice, HumanAnswers, PhraseBoxes, ReferredBox, SampleText
from e2e_vl.structures import EncoderOutput
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.tasks.config import GQAConfig, NLVR2Config, ReferringConfig, VCRConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer
from tests.encoders.small import make_inputs
from tests.tasks.batches import make_batch
from tests.tasks.preprocessors import make_tokenizer, preprocess, sample_of

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
    official, normal = linears(name), linears(name, new_layers="normal")
    assert len(official) == len(normal) == (1 if name == "vcr" else 2)
    for linear in official:
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5  # Xavier uniform
        assert 0.95 * bound < linear.weight.abs().max() <= bound
    for linear in normal:
        assert linear.weight.std() == pytest.approx(0.02, rel=0.15)
        assert linear.weight.mean().abs() < 0.005
    assert all(linear.bias.abs().sum() == 0 for linear in official + normal)


@pytest.mark.parametrize("name", ["vqa", "vcr"])
def test_heads_on_the_summary_have_its_width(name):
    config_class, task_class = parts.TASKS[name].config_class, parts.TASKS[name].cls
    config = VQAConfig(answers=["yes", "no"]) if name == "vqa" else config_class()
    task = task_class.build(Sizes(hidden_size=8, vocab_size=9, summary_size=24), config)
    assert task.head.output.in_features == 24
    if name == "vcr":
        assert task.region_classifier.output.in_features == 8
    own = task_class.build(Sizes(hidden_size=8, vocab_size=9), config)
    assert own.head.output.in_features == 8


def test_phrases_of_an_answer_in_words_are_drawn(grey):
    clear, unsure, nowhere = (
        GroundedPhrase("a cat", (0, 5), box, score)
        for box, score in (((5, 5, 40, 40), 0.9), ((5, 5, 40, 40), 0.2), (None, 0.2))
    )

    def draw(*phrases: GroundedPhrase, correct: float | None = None) -> np.ndarray:
        return Task.draw(None, Prediction(file_name=grey, grounded=phrases, correct=correct))

    assert Task.draw(None, Prediction()) is None and (draw(clear) != draw()).any()
    for correct, is_drawn in ((0.0, True), (0.3, False), (1.0, False), (None, False)):
        assert (draw(nowhere, unsure, correct=correct) != draw()).any() == is_drawn


# Texts of joined data that have phrases and no target of the task

SIZE = 32  # of `make_inputs` there are three texts
PHRASES = PhraseBoxes(((0, 3),), (np.array([[1.0, 1, 9, 9]]),))
BOX = (10.0, 10.0, 30.0, 30.0)
ANSWERS = ["red", "blue"]


def answering(task: type[Task], config: type, loss: str) -> Task:
    return task(SIZE, config(answers=ANSWERS, loss=loss, head_width=1, dropout=0.0, initialise_from_words=False))


# of each task: how it is made, a truth of its own, and the name of its loss
CASES: dict[str, tuple[Any, Any, str]] = {
    **{
        f"vqa {loss}": (lambda loss=loss: answering(VQATask, VQAConfig, loss), HumanAnswers(("red",) * 10), "vqa")
        for loss in ("binary", "softmax", "divergence")
    },
    "gqa": (lambda: answering(GQATask, GQAConfig, "binary"), CorrectAnswer("blue"), "gqa"),
    "nlvr2": (lambda: NLVR2Task(SIZE, NLVR2Config(dropout=0.0)), CorrectChoice(1), "nlvr2"),
    "nlvr2 sigmoid": (lambda: NLVR2Task(SIZE, NLVR2Config(dropout=0.0, loss="sigmoid")), CorrectChoice(1), "nlvr2"),
    **{
        f"refcoco {loss}": (
            lambda loss=loss: ReferringTask(SIZE, ReferringConfig(dropout=0.0, loss=loss)),
            ReferredBox(BOX),
            "referring",
        )
        for loss in ("binary", "softmax")
    },
    "flickr30k": (lambda: Flickr30KTask(SIZE), PHRASES, "flickr30k"),
}
OTHER_TRUTHS = (None, PHRASES, ReferredBox(BOX))


def preprocessor_of(task: Task, folder: Path, *, with_phrase_spans: bool = True) -> Preprocessor:
    tokenizer = make_tokenizer(folder, "red blue square")
    return task.preprocessor(TextTokenizer(tokenizer, VLBertModel.layout, with_phrase_spans=with_phrase_spans))


def texts_of(task: Task, folder: Path, *truths: Any, may_lack: bool = True, with_phrase_spans: bool = True) -> list:
    """One wordpiece text per truth; those of another kind may lack a target."""
    preprocessor = preprocessor_of(task, folder, with_phrase_spans=with_phrase_spans)
    fields = {"phrases": PHRASES, "may_lack_target": may_lack}
    return preprocess(
        preprocessor, sample_of(*(SampleText(n, "red square", {}, truth, **fields) for n, truth in enumerate(truths)))
    )


def other_truths(preprocessor: Preprocessor) -> list[Any]:
    return [truth for truth in OTHER_TRUTHS if not isinstance(truth, preprocessor.learns_from)]


@pytest.mark.parametrize("name", CASES)
def test_only_texts_with_a_target_are_learned(tmp_path, name):
    make, own, loss_name = CASES[name]
    torch.manual_seed(0)
    task = make().eval()
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter)
    others = other_truths(preprocessor_of(task, tmp_path))
    _, regions = make_inputs()
    # the first region of a text is what is referred to and named, the others lie elsewhere
    places = torch.arange(regions.attention_mask.shape[1])[:, None] * 40.0 + torch.tensor(BOX)
    regions = dataclasses.replace(regions, boxes=places.expand_as(regions.boxes))
    if own is PHRASES:
        own = PhraseBoxes(((0, 3),), (np.array([BOX]),))
    rows = {"mixed": [own, others[0], own], "own": [own, own, own], "others": [others[0], others[-1], others[0]]}
    states = torch.randn(3, 4, SIZE), torch.randn(3, regions.attention_mask.shape[1], SIZE), torch.randn(3, SIZE)
    found, reached = {}, {}
    for kind, truths in rows.items():
        targets = [text.targets for text in texts_of(task, tmp_path, *truths)]
        text, region, summary = (state.clone().requires_grad_() for state in states)
        batch = make_batch([[0]] * 3, targets=type(targets[0]).join(targets))
        found[kind] = task(batch, regions, EncoderOutput(text=text, regions=region, summary=summary)).losses[loss_name]
        found[kind].total.backward()
        grads = [one.grad.flatten(1).abs().amax(dim=1) for one in (text, region, summary) if one.grad is not None]
        reached[kind] = (torch.stack(grads).amax(dim=0) > 0).tolist()
    assert (found["others"].total.item(), found["others"].count.item()) == (0, 0)
    assert reached["others"] == [False] * 3
    assert not reached["mixed"][1] and reached["mixed"][0]
    assert 0 < found["mixed"].count < found["own"].count
    assert 0 < found["mixed"].total <= found["own"].total


@pytest.mark.parametrize("name", CASES)
def test_which_texts_lack_a_target(tmp_path, name):
    """None does in one data set alone, or in a run without phrases."""
    make, own, _ = CASES[name]
    task = make()
    others = other_truths(preprocessor_of(task, tmp_path))
    first, *rest = texts_of(task, tmp_path, own, *others)
    assert first.targets.has_target is None and "only_phrases" not in first.record
    assert all(one.targets.has_target is False and one.record["only_phrases"] is True for one in rest)
    joined = type(first.targets).join([first.targets, *(one.targets for one in rest)])
    assert joined.has_target.tolist() == [True, *[False] * len(rest)]
    for options in ({"may_lack": False}, {"with_phrase_spans": False}):
        assert all(one.targets.has_target is None for one in texts_of(task, tmp_path, own, others[0], **options))


def test_a_task_whose_texts_have_choices(tmp_path):
    [text] = texts_of(VCRTask(SIZE), tmp_path, PHRASES)
    assert text.targets.has_target is False and text.targets.is_right.dtype == np.float32
    assert text.record["only_phrases"] is True and text.phrases.spans.tolist() == [[1, 2]]
    with pytest.raises(UserError, match="'red square' has no four choices"):
        texts_of(VCRTask(SIZE), tmp_path, PHRASES, may_lack=False)
