"""Fine-tuned VisualBERTs against the official code: VQA, VCR on given features, NLVR2 and Flickr30K Entities.

What is compared: scores, losses, predictions and gradients, and what the official optimiser decays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from detector.structures import ImageBatch
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.metrics.vqa import UNKNOWN
from e2e_vl.run.optim import build_optimizer
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextBatch, TextRegions
from e2e_vl.targets import Ragged, Targets
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.config import Flickr30KConfig, NLVR2Config, VCRConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTargets, Flickr30KTask
from e2e_vl.tasks.nlvr2 import LABELS, NLVR2Targets, NLVR2Task
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.tasks.vcr import CHOICES, VCRTargets, VCRTask
from e2e_vl.tasks.vqa import VQATask
from tests.parity import visual_bert_common as common
from tests.parity import visual_bert_optimiser_checks as optimiser
from tests.parity.visual_bert_common import (
    assert_gradients_near,
    encoder_config,
    our_name,
    recorded_parts,
    recorded_regions,
    recorded_texts,
    word_counts,
)
from tests.parity.vl_bert_common import RELATIVE, Golden, assert_near, optional

visual_golden = common.visual_golden


class FineTuned(nn.Module):
    """The parts of a run's model that matter here, by its names, on one recorded batch."""

    phrase_head = None

    def __init__(self, golden: Golden, part: str, task: Task, **fields: Any) -> None:
        super().__init__()
        self.part, self.arrays = part, golden[part]
        self.detector = nn.Module()
        self.encoder = VisualBertEncoder(encoder_config(golden, **fields))
        self.task = task
        weights = recorded_parts(golden, part)
        self.encoder.load_state_dict(weights.encoder, strict=True)
        self.task.load_state_dict(weights.task, strict=True)
        self.features = self.arrays["in.features"].clone().requires_grad_()
        self.eval()

    def double(self) -> FineTuned:
        super().double()
        self.features = self.arrays["in.features"].double().requires_grad_()
        return self

    def texts(self) -> TextBatch:
        return recorded_texts(self.arrays)

    def regions(self) -> TextRegions:
        return recorded_regions({**self.arrays, "in.features": self.features})

    def encoded(self) -> EncoderOutput:
        return self.encoder(self.texts(), self.regions())

    def run(self, batch: Batch) -> TaskOutput:
        return self.task(batch, self.regions(), self.encoded())

    def predict(self, batch: Batch, output: TaskOutput) -> list[dict[str, Any]]:
        regions, encoded = self.regions(), self.encoded()
        return self.task.predict(ModelOutput(output, None, regions, encoded, batch))


def batch_of(texts: TextBatch, targets: Targets, records: list[dict[str, Any]] | None = None) -> Batch:
    """Each text has an image of its own, 1 x 1 pixels, so that boxes are in its pixels."""
    side = torch.ones(len(texts), 2, dtype=torch.int64)
    images = ImageBatch(torch.zeros(len(texts), 3, 0, 0), side, side, ["image"] * len(texts))
    image_index = torch.arange(len(texts))[:, None]
    return Batch(images, None, texts, image_index, targets, records=records or [])


# VQA


class Answering(FineTuned):
    """The answer is read at the [MASK] before the last [SEP]."""

    def texts(self) -> TextBatch:
        texts = super().texts()
        return dataclasses.replace(texts, summary=texts.attention_mask.sum(dim=1) - 2)


def answering(golden: Golden, **fields: Any) -> tuple[Answering, Batch]:
    target = optional(golden, "vqa", "in.label")
    answers = [UNKNOWN, *(f"answer {number}" for number in range(1, target.shape[1]))]
    config = VQAConfig(
        answers=answers,
        hidden_layer=False,
        loss="divergence",
        init_from_words=False,
        **{"dropout": 0.1, **fields},
    )
    model = Answering(golden, "vqa", VQATask(golden.meta["configs"]["encoder"]["hidden_size"], config))
    batch = batch_of(model.texts(), AnswerTargets(target, target.argmax(dim=1)))
    return model, batch


def test_vqa(visual_golden):
    recorded, values = visual_golden, None
    model, batch = answering(recorded)
    arrays, values = recorded["vqa"], recorded.meta["values"]["vqa"]
    with torch.no_grad():
        output = model.run(batch)
    assert_near(output.logits, arrays["out.logits"].flatten(0, 1), "vqa.logits")
    assert_near(output.losses["vqa"].mean, arrays["out.loss"], "vqa.loss")
    assert float(output.losses["vqa"].mean) == pytest.approx(values["loss"], rel=RELATIVE)
    answers = model.task.answer_vocabulary.answers
    found = [answers.index(one.answer) for one in model.predict(batch, output)]
    assert found == arrays["out.argmax_without_unk"].tolist()
    scores = arrays["in.label"][range(len(found)), found]
    assert float(scores.mean()) == pytest.approx(values["accuracy"], rel=RELATIVE)

    model, batch = answering(recorded, unknown_can_win=True)
    found = [answers.index(one.answer) for one in model.predict(batch, output)]
    assert found == arrays["out.argmax_submission"].tolist()


def test_a_row_without_a_known_answer_costs_nothing_but_counts(visual_golden):
    model, batch = answering(visual_golden)
    rows = batch.targets.scores.clone()
    rows[0] = 0
    with torch.no_grad():
        all_rows, one_less = (
            model.run(dataclasses.replace(batch, targets=AnswerTargets(one, one.argmax(dim=1)))).losses["vqa"]
            for one in (batch.targets.scores, rows)
        )
    assert float(one_less.count) == float(all_rows.count) == len(rows)
    with torch.no_grad():
        shares = model.run(batch).logits[0].log_softmax(dim=0)
    row = batch.targets.scores[0]
    expected = (torch.xlogy(row, row) - row * shares).sum()
    torch.testing.assert_close(all_rows.total - one_less.total, expected, rtol=RELATIVE, atol=RELATIVE)


# VCR


class Choosing(FineTuned):
    """The four choices of a question read the same regions, whose places in the texts are recorded lists."""

    def texts(self) -> TextBatch:
        flat = {
            name: self.arrays[name].flatten(0, 1) for name in ("in.input_ids", "in.token_type_ids", "in.input_mask")
        }
        return recorded_texts(flat)

    def regions(self) -> TextRegions:
        choices = self.arrays["in.input_ids"].shape[1]
        counts = self.arrays["in.num_regions"].repeat_interleave(choices)
        return recorded_regions(
            {"in.features": self.features.repeat_interleave(choices, dim=0), "in.num_regions": counts}
        )

    def encoded(self) -> EncoderOutput:
        texts, regions = self.texts(), self.regions()
        counts = word_counts(self.arrays["in.alignment"].flatten(0, 1), regions, texts.attention_mask.shape[1])
        return self.encoder.encode(texts, *self.encoder.embeddings.join(texts, regions, counts))


def choosing(golden: Golden) -> tuple[Choosing, Batch]:
    label = optional(golden, "vcr", "in.label")
    task = VCRTask(golden.meta["configs"]["encoder"]["hidden_size"], VCRConfig(loss="softmax", region_loss_weight=0.0))
    model = Choosing(golden, "vcr", task)
    is_correct = torch.nn.functional.one_hot(label, CHOICES).flatten().float()
    return model, batch_of(model.texts(), VCRTargets(is_correct))


def test_vcr(visual_golden):
    model, batch = choosing(visual_golden)
    arrays, values = visual_golden["vcr"], visual_golden.meta["values"]["vcr"]
    with torch.no_grad():
        output = model.run(batch)
    assert_near(output.logits, arrays["out.logits"], "vcr.logits")
    assert_near(output.losses["choice"].mean, arrays["out.loss"], "vcr.loss")
    best = [one.choice for one in model.predict(batch, output)]
    assert best == values["argmax"]
    hits = torch.tensor(best) == arrays["in.label"]
    assert float(hits.float().mean()) == pytest.approx(values["accuracy"], rel=RELATIVE)


# NLVR2


class Comparing(FineTuned):
    """Regions of the left image, then of the right one."""

    def regions(self) -> TextRegions:
        return recorded_regions({**self.arrays, "in.features": self.features}, self.arrays["in.visual_types"])


def comparing(golden: Golden) -> tuple[Comparing, Batch]:
    label = optional(golden, "nlvr2", "in.label")
    model = Comparing(golden, "nlvr2", NLVR2Task(golden.meta["configs"]["encoder"]["hidden_size"], NLVR2Config()))
    return model, batch_of(model.texts(), NLVR2Targets(label))


def test_nlvr2(visual_golden):
    model, batch = comparing(visual_golden)
    arrays, values = visual_golden["nlvr2"], visual_golden.meta["values"]["nlvr2"]
    position = torch.arange(arrays["in.visual_types"].shape[1])
    is_left = position < arrays["in.num_left"][:, None]
    real = model.regions().attention_mask
    assert torch.equal(model.regions().image_slot[real] == 0, is_left[real])
    with torch.no_grad():
        output = model.run(batch)
    assert_near(output.logits, arrays["out.logits"], "nlvr2.logits")
    assert_near(output.losses["nlvr2"].mean, arrays["out.loss"], "nlvr2.loss")
    found = [LABELS.index(one.prediction) for one in model.predict(batch, output)]
    assert found == values["argmax"]
    assert np.mean(np.array(found) == arrays["in.label"].numpy()) == pytest.approx(values["accuracy"], rel=RELATIVE)


# Flickr30K Entities


class Grounding(FineTuned):
    """Regions lie side by side, so that the boxes of a phrase can be the right regions' own."""

    def regions(self) -> TextRegions:
        regions = super().regions()
        left = torch.arange(regions.attention_mask.shape[1], dtype=torch.float32).expand_as(regions.attention_mask)
        zero, one = torch.zeros_like(left), torch.ones_like(left)
        return dataclasses.replace(regions, boxes=torch.stack([2 * left, zero, 2 * left + 1, one], dim=-1))


def grounding(golden: Golden) -> tuple[Grounding, Batch]:
    """Padded phrases of the official batch have no position; here there is no padding."""
    positions, labels = optional(golden, "flickr", "in.flickr_position"), golden["flickr"]["in.label"]
    arrays = golden["flickr"]
    config = Flickr30KConfig(head_size=len(arrays["state.bert.flickr_attention.query.weight"]))
    model = Grounding(golden, "flickr", Flickr30KTask(golden.meta["configs"]["encoder"]["hidden_size"], config))
    real, regions = positions >= 0, model.regions()
    spans = torch.stack([positions[real], positions[real] + 1], dim=1)
    owner = torch.arange(len(positions))[:, None].expand_as(positions)[real]
    right = [regions.boxes[text][row > 0].numpy() for text, row in zip(owner.tolist(), labels[real], strict=True)]
    boxes = Ragged(torch.from_numpy(np.concatenate(right)), torch.tensor([len(one) for one in right]))
    targets = Flickr30KTargets(Ragged(spans, real.sum(dim=1)), boxes)
    records = []
    for text in range(len(positions)):
        own = [right[phrase].tolist() for phrase in (owner == text).nonzero()[:, 0]]
        records.append({"gt_boxes": own, "phrases": [""] * len(own), "phrase_types": [[]] * len(own)})
    return model, batch_of(model.texts(), targets, records)


def test_flickr30k(visual_golden):
    model, batch = grounding(visual_golden)
    arrays, values = visual_golden["flickr"], visual_golden.meta["values"]["flickr"]
    with torch.no_grad():
        output = model.run(batch)
    real = arrays["in.flickr_position"] >= 0
    has_region = model.regions().attention_mask[:, None].expand(arrays["out.log_probabilities"].shape)[real]
    recorded = arrays["out.log_probabilities"][real]
    assert torch.equal(output.logits > -torch.inf, has_region)
    assert_near(output.logits[has_region], recorded[has_region], "flickr.log_probabilities")
    assert_near(output.losses["flickr30k"].mean, arrays["out.loss"], "flickr.loss")
    ranks = [rank for one in model.predict(batch, output) for rank in one.ranks]
    assert len(ranks) == values["entity_num"]
    reachable = sum(rank is not None for rank in ranks)
    assert reachable / len(ranks) == pytest.approx(values["upperbound_accuracy"], rel=RELATIVE)
    assert sum(rank == 0 for rank in ranks) / len(ranks) == pytest.approx(values["accuracy"], rel=RELATIVE)
    for k, recall in values.get("recall", {}).items():
        assert sum(rank is not None and rank < int(k) for rank in ranks) == recall["hits"], k
        assert reachable == recall["upper_bound_hits"]


# All of them

MAKE: dict[str, tuple[Callable[[Golden], tuple[FineTuned, Batch]], str]] = {  # with the loss's name
    "vqa": (answering, "vqa"),
    "vcr": (choosing, "choice"),
    "nlvr2": (comparing, "nlvr2"),
    "flickr": (grounding, "flickr30k"),
}


@pytest.mark.parametrize("part", MAKE)
def test_gradients_of_fine_tuning(visual_golden, part):
    make, loss = MAKE[part]
    model, batch = make(visual_golden)
    model.double()
    model.run(batch).losses[loss].mean.backward()
    assert_gradients_near(visual_golden, part, model, {"in.features": model.features})


@pytest.mark.parametrize("part", MAKE)
def test_what_decays_in_fine_tuning(visual_golden, part):
    """Official models of Flickr30K Entities hold heads that nothing reads; they are not built here."""
    if part not in visual_golden.meta["optimizer_groups"]:
        pytest.skip(f"the set has no groups of {part}; they are optional")
    recorded = visual_golden.meta["optimizer_groups"][part]
    model, _ = MAKE[part][0](visual_golden)
    model.encoder.config.train_pooler = False
    model.encoder.train()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for group in build_optimizer(model, optimiser.settings(visual_golden)).param_groups:
        found[group["weight_decay"] > 0] |= {names.pop(id(one)) for one in group["params"]}
    unread = tuple(name for name in visual_golden.meta["no_grad_params"][part] if "pooler" not in name)
    wanted = {
        key: {our_name(name) for name in recorded[key] if name not in unread}
        for key in ("decay", "no_decay", "not_in_optimiser")
    }
    assert found[False] == wanted["no_decay"]
    assert set(names.values()) == wanted["not_in_optimiser"]
    assert {name for name in found[True] if not name.startswith(optimiser.LAYERS)} == wanted["decay"]
