"""The objectives of pre-training against the official VisualBERT losses: together, alone, and without images."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from detector.structures import ImageBatch
from e2e_vl.structures import Batch, EncoderOutput, TaskOutput
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.texts import MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask, build_objectives
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import (
    no_regions,
    our_name,
    recorded_encoder,
    recorded_parts,
    recorded_regions,
    recorded_texts,
)
from tests.parity.vl_bert_common import Golden, assert_near, optional

visual_golden = common.visual_golden
OFFICIAL_LOSSES = {"masked_words": "masked_lm_loss", "relationship": "next_sentence_loss"}
OFFICIAL = {
    "masked_words": {"weight": 1.0, "whole_words": False},
    "relationship": {"weight": 1.0, "text_format": "pair"},
    "masked_text": 0.0,
    "masked_regions": 0.0,
}


def official_task(golden: Golden, **objectives: Any) -> PretrainingTask:
    """The recorded heads, of the objectives that are asked for."""
    config = golden.meta["configs"]["encoder"]
    sizes = Sizes(config["hidden_size"], config["vocab_size"])
    made = build_objectives(OFFICIAL | objectives, sizes)
    task = PretrainingTask(sizes, PretrainingConfig(), made)
    weights = recorded_parts(golden, "pretrain").task
    task.load_state_dict({name: weights[name] for name in task.state_dict()}, strict=True)
    return task.eval()


def official_batch(golden: Golden, *, looks: bool = True) -> Batch:
    """The recorded texts with their labels, each about an image of its own, or about none."""
    arrays = golden["pretrain"]
    texts = recorded_texts(arrays)
    count = len(texts)
    sizes = torch.ones(count, 2, dtype=torch.int64)
    parts = {
        "masked_words": WordLabels(arrays["in.masked_lm_labels"]),
        "relationship": MatchTargets(arrays["in.is_random_next"]),
    }
    return Batch(
        images=ImageBatch(torch.zeros(count, 3, 1, 1), sizes, sizes, [str(number) for number in range(count)]),
        boxes=None,
        texts=texts,
        image_index=torch.arange(count)[:, None] if looks else torch.full((count, 1), -1),
        targets=PretrainingTargets(parts),
    )


def run(
    golden: Golden, task: PretrainingTask, batch: Batch, encoder: torch.nn.Module
) -> tuple[TaskOutput, EncoderOutput]:
    arrays = golden["pretrain"]
    regions = recorded_regions(arrays) if batch.image_index.max() >= 0 else no_regions(arrays)
    encoded = encoder(batch.texts, regions)
    return task(batch, regions, encoded), encoded


def test_objectives_have_the_official_losses_and_gradients(visual_golden):
    task, encoder = official_task(visual_golden), recorded_encoder(visual_golden)
    output, _ = run(visual_golden, task, official_batch(visual_golden), encoder)
    for name, official in OFFICIAL_LOSSES.items():
        assert_near(output.losses[name].mean, visual_golden["pretrain"][f"out.{official}"], official)
    assert_near(output.parts["relationship"], visual_golden["pretrain"]["out.seq_relationship_logits"], "logits")
    sum(loss.mean for loss in output.losses.values()).backward()
    gradients: dict[str, Tensor | None] = {}
    for part, module in (("encoder", encoder), ("task", task)):
        gradients |= {f"{part}.{name}": one.grad for name, one in module.named_parameters()}
    for name, recorded in visual_golden.part("pretrain", "grad.").items():
        if not name.startswith("in.") and name not in visual_golden.meta["zero_gradients"]["pretrain"]:
            assert_near(gradients[our_name(name)], recorded, name)


def test_scores_of_words(visual_golden):
    recorded = optional(visual_golden, "pretrain", "out.prediction_logits")
    task, encoder = official_task(visual_golden), recorded_encoder(visual_golden)
    with torch.no_grad():
        _, encoded = run(visual_golden, task, official_batch(visual_golden), encoder)
        ours = task.word_head(encoded.text, encoded.word_embeddings)
    attention_mask = recorded_texts(visual_golden["pretrain"]).attention_mask
    assert_near(
        ours[attention_mask], recorded[:, : attention_mask.shape[1]][attention_mask], "prediction_logits of words"
    )


def test_masked_words_alone(visual_golden):
    recorded = optional(visual_golden, "pretrain", "mlm_only.loss")
    task = official_task(visual_golden, relationship=0.0)
    with torch.no_grad():
        output, _ = run(visual_golden, task, official_batch(visual_golden), recorded_encoder(visual_golden))
    assert list(output.losses) == ["masked_words"]
    assert_near(output.losses["masked_words"].mean, recorded, "mlm_only.loss")


def test_objectives_of_texts_without_images(visual_golden):
    recorded = {
        name: optional(visual_golden, "pretrain", f"text_only.{official}") for name, official in OFFICIAL_LOSSES.items()
    }
    batch = official_batch(visual_golden, looks=False)
    with torch.no_grad():
        output, _ = run(visual_golden, official_task(visual_golden), batch, recorded_encoder(visual_golden))
    for name, theirs in recorded.items():
        assert_near(output.losses[name].mean, theirs, f"text_only.{name}")


def test_a_batch_without_a_masked_word_has_no_loss_for_them(visual_golden):
    """The official code has NaN there."""
    if visual_golden.meta["values"]["pretrain"].get("masked_lm_loss_without_any_label", "nan") != "nan":
        pytest.fail("the recorded loss is a number; compare it")
    batch = official_batch(visual_golden)
    nothing = WordLabels(torch.full_like(batch.targets.parts["masked_words"].labels, -1))
    batch = dataclasses.replace(batch, targets=PretrainingTargets({**batch.targets.parts, "masked_words": nothing}))
    with torch.no_grad():
        output, _ = run(visual_golden, official_task(visual_golden), batch, recorded_encoder(visual_golden))
    assert output.losses["masked_words"].mean == 0
    official = visual_golden["pretrain"]["out.next_sentence_loss"]
    assert_near(output.losses["relationship"].mean, official, "next_sentence_loss")
