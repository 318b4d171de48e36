"""VisualBERT, trained with its official optimiser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from e2e_vl.config import RunConfig, load_config
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from tests.run.runs import assert_same_run, lose_newest, losses_of
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
LR = 0.01
OPTIMISER = (
    "train.optimizer=bert_adam",
    f"train.lr={LR}",
    "train.warmup_steps=0",
    "train.warmup_share=0.5",
    "train.clip_norm=null",
    "train.clip_tensor_norm=1",
    "train.decay_norm_and_bias=false",
    "train.decay_bn_scales=true",
)
SHORT = (
    *("train.max_steps=2", "train.save_every_epochs=0.01", "train.trackers=[]"),
    *("eval.every_epochs=0", "eval.boxes=[gt]", "eval.report_pictures=0"),
)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def settings(tiny_config) -> Callable[..., RunConfig]:
    def make(*words: str, **fields) -> RunConfig:
        config = tiny_config(*OPTIMISER, *SHORT, *words)
        return replaced(config, encoder={"name": "visual_bert", "config": SIZES | fields})

    return make


def test_a_run_is_trained_with_the_official_optimiser_and_resumed(settings, tmp_path):
    train(settings())
    run = tmp_path / "run"
    steps = losses_of(run)
    assert [line["lr_encoder"] for line in steps] == [0.0, LR]
    assert {"lr_encoder_no_decay", "lr_head", "lr_detector"} <= steps[0].keys()
    states = [load_model(run / "checkpoints" / f"step_{step:08}" / "model")[1].state_dict() for step in (1, 2)]
    moved = {name for name, value in states[1].items() if not torch.equal(value, states[0][name])}
    assert "encoder.embeddings.visual_projection.weight" in moved and "task.head.output.weight" in moved
    assert not [name for name in moved if name.startswith("encoder.pooler.")]

    lose_newest(run, tmp_path / "copy")
    train(settings(f"output={tmp_path / 'copy'}"), resume=True)
    assert_same_run(run, tmp_path / "copy")


def test_pretraining(tmp_path):
    words = [f"data.root={tmp_path / 'data'}", f"output={tmp_path / 'run'}", "train.max_steps=1"]
    words.append("data.synthetic.scenes={train: 4, val: 2}")
    metrics = train(load_config(ROOT / "configs" / "tiny" / "visual_bert_pretraining.yaml", words))
    assert {"val/masked_words_gt_boxes", "val/relationship_gt_boxes"} <= set(metrics)
    [line] = losses_of(tmp_path / "run")
    assert line["masked_words"] > 0 and line["relationship"] > 0
