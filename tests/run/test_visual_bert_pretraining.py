"""VisualBERT is pre-trained from pixels: a run on drawn scenes, and objectives that only the image can answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from detector.structures import ImageBatch
from e2e_vl.config import load_config
from e2e_vl.io import read_log
from e2e_vl.run.build import build_model
from e2e_vl.run.train import train
from e2e_vl.structures import Batch, TextBatch
from e2e_vl.tasks.objectives.texts import MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny" / "visual_bert_pretraining.yaml"
CLS, SEP, MASK, RED, BLUE, A, BOX = 2, 3, 4, 5, 6, 7, 8
SIDE, STEPS = 32, 40

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_tiny_run_trains_and_evaluates(tmp_path):
    config = load_config(CONFIG, [f"data.root={tmp_path / 'data'}", f"output={tmp_path / 'run'}", "train.max_steps=2"])
    metrics = train(config)
    assert {"val/masked_words_gt_boxes", "val/relationship_gt_boxes"} <= set(metrics)
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "train"]
    assert len(lines) == 2 and all(line["masked_words"] > 0 and line["relationship"] > 0 for line in lines)


def red_and_blue() -> Batch:
    """Two images of one colour each, and the same pair of captions about both: [CLS] a [MASK] box [SEP] red [SEP].

    The masked word is the colour of the image, and the second caption fits the red image only, so that two texts have
    the same words and regions, and different labels.
    """
    pixels = torch.zeros(2, 3, SIDE, SIDE)
    pixels[0, 2], pixels[1, 0] = 100.0, 100.0
    sizes = torch.full((2, 2), SIDE)
    ids = torch.tensor([[CLS, A, MASK, BOX, SEP, RED, SEP]]).expand(2, -1)
    labels = torch.full((2, 7), -1)
    labels[:, 2] = torch.tensor([RED, BLUE])
    parts = {"masked_words": WordLabels(labels), "relationship": MatchTargets(torch.tensor([1, 0]))}
    return Batch(
        images=ImageBatch(pixels, sizes, sizes, ["red.jpg", "blue.jpg"]),
        boxes=[torch.tensor([[4.0, 4.0, 28.0, 28.0]])] * 2,
        texts=TextBatch(ids, torch.tensor([[0, 0, 0, 0, 0, 1, 1]]).expand(2, -1), torch.ones(2, 7, dtype=torch.bool)),
        image_index=torch.tensor([[0], [1]]),
        targets=PretrainingTargets(parts),
    )


def trained_losses(batch: Batch) -> dict[str, Tensor]:
    """Losses after a few steps on one batch, from the same start."""
    torch.manual_seed(0)
    dropout = [f"encoder.config.{name}=0" for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")]
    norms = "detector.overrides.MODEL.RESNETS.NORM=FrozenBN"
    model = build_model(load_config(CONFIG, [*dropout, norms]), vocab_size=9).train()
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(loss.mean for loss in model(batch).losses.values()).backward()
        optimizer.step()
    with torch.no_grad():
        return {name: loss.mean for name, loss in model(batch).losses.items()}


def test_objectives_are_learned_from_pixels_and_their_labels_are_in_no_text():
    """On images without colours the same training finds nothing: two answers that are equally likely cost log 2."""
    seen = trained_losses(red_and_blue())
    blank = red_and_blue()
    blank = dataclasses.replace(
        blank, images=dataclasses.replace(blank.images, pixels=torch.zeros_like(blank.images.pixels))
    )
    unseen = trained_losses(blank)
    assert set(seen) == set(unseen) == {"masked_words", "relationship"}
    for name in seen:
        assert seen[name] < 0.3, name
        assert unseen[name] > 0.99 * np.log(2), name
