"""Texts of joined data that have phrases and no target of the task: what each task words, joins and learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.examples import Preprocessor
from e2e_vl.predictions import GroundedPhrase, PhrasesOnly, with_target
from e2e_vl.run.evaluate import metrics_of
from e2e_vl.samples import CorrectAnswer, CorrectChoice, HumanAnswers, PhraseBoxes, ReferredBox, SampleImage, SampleText
from e2e_vl.structures import Batch, EncoderOutput
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.config import GQAConfig, NLVR2Config, ReferringConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer
from tests.encoders.small import make_inputs
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of, word

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
    "nlvr2 sigmoid": (
        lambda: NLVR2Task(SIZE, NLVR2Config(dropout=0.0, loss="sigmoid")),
        CorrectChoice(1),
        "nlvr2",
    ),
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
    stated = [
        SampleText(n, "red square", {}, truth, phrases=PHRASES, may_lack_target=may_lack)
        for n, truth in enumerate(truths)
    ]
    return word(preprocessor, sample_of(*stated, image=SampleImage("7", Path("photo.jpg"))), photo())


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
        batch = fake_batch(type(targets[0]).join(targets))
        found[kind] = task(batch, regions, EncoderOutput(text=text, regions=region, summary=summary)).losses[loss_name]
        found[kind].total.backward()
        grads = [one.grad.flatten(1).abs().amax(dim=1) for one in (text, region, summary) if one.grad is not None]
        reached[kind] = (torch.stack(grads).amax(dim=0) > 0).tolist()
    assert (found["others"].total.item(), found["others"].count.item()) == (0, 0)
    assert reached["others"] == [False] * 3
    assert not reached["mixed"][1] and reached["mixed"][0]
    assert 0 < found["mixed"].count < found["own"].count
    assert 0 < found["mixed"].total <= found["own"].total


def fake_batch(targets: Any) -> Batch:
    """A batch of three texts of which tasks read the targets only."""

    class Three(Batch):
        def __init__(self) -> None:
            self.targets = targets
            self.image_index = torch.zeros(3, 1, dtype=torch.int64)

        def __len__(self) -> int:
            return 3

    return Three()


@pytest.mark.parametrize("name", CASES)
def test_who_lacks_a_target(tmp_path, name):
    make, own, _ = CASES[name]
    task = make()
    others = other_truths(preprocessor_of(task, tmp_path))
    first, *rest = texts_of(task, tmp_path, own, *others)
    assert first.targets.has_target is None and "only_phrases" not in first.record
    assert all(one.targets.has_target is False and one.record["only_phrases"] is True for one in rest)
    assert all(type(one.targets) is type(first.targets) and one.phrases is not None for one in rest)
    joined = type(first.targets).join([first.targets, *(one.targets for one in rest)])
    assert joined.has_target.tolist() == [True, *[False] * len(rest)]


@pytest.mark.parametrize("name", CASES)
def test_a_truth_that_is_missing_by_mistake_is_an_error(tmp_path, name):
    """In one data set alone, in data that state no phrases, and in a run without phrases."""
    make, own, _ = CASES[name]
    task = make()
    for options in ({"may_lack": False}, {"with_phrase_spans": False}):
        for other in other_truths(preprocessor_of(task, tmp_path)):
            targets = [text.targets for text in texts_of(task, tmp_path, own, other, **options)]
            with pytest.raises(ValueError, match=r"some texts of a batch have .* and others do not"):
                type(targets[0]).join(targets)


def test_a_task_whose_texts_have_choices(tmp_path):
    preprocessor = preprocessor_of(VCRTask(SIZE), tmp_path)
    stated = SampleText(0, "red square", {}, PHRASES, phrases=PHRASES, may_lack_target=True)
    photo_of_it = SampleImage("7", Path("photo.jpg"))
    [text] = word(preprocessor, sample_of(stated, image=photo_of_it), photo())
    assert text.targets.has_target is False and text.targets.is_right.dtype == np.float32
    assert text.record["only_phrases"] is True and text.phrases.spans.tolist() == [[1, 2]]
    for other in (
        dataclasses.replace(stated, truth=CorrectChoice(0)),
        dataclasses.replace(stated, may_lack_target=False),
    ):
        with pytest.raises(ValueError, match="'red square' has no four choices, so VCR has nothing to learn from it"):
            word(preprocessor, sample_of(other, image=photo_of_it), photo())


def test_predictions_and_metrics_leave_them_out():
    task = answering(VQATask, VQAConfig, "binary")
    phrase = GroundedPhrase("red", (0, 3), None, 0.0, True)
    given = [{"text_index": 0, "answers": ["red"] * 10}, {"text_index": 1, "only_phrases": True, "grounded": [phrase]}]
    first, second = (task.prediction(record, answer="red", score=1.0) for record in given)
    assert second == PhrasesOnly(text_index=1, grounded=(phrase,))
    assert with_target([first, second]) == [first]
    assert metrics_of(task, [first, second]) == {"count": 1.0, "accuracy": 1.0, "phrase_accuracy": 1.0}
    assert metrics_of(task, [second]) == {"phrase_accuracy": 1.0}
    assert metrics_of(task, []) == {"count": 0.0}
