"""The shipped settings of VisualBERT's fine-tuning equal the JSON files of its official code (commit 2a9e8bd)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from e2e_vl.config import RunConfig, load_config, read_detector_config
from e2e_vl.encoders.visual_bert import VisualBertEncoderConfig
from e2e_vl.parts import TASKS

ROOT = Path(__file__).parents[2]
MAX_LENGTH = 128  # max_seq_length of all of them


@dataclasses.dataclass(frozen=True)
class Official:
    """One official JSON file."""

    file: str
    batch: int
    epochs: int
    feature_dim: int  # visual_embedding_dim


OFFICIAL = {
    "vqa/visual_bert": Official("vqa/fine-tune", 64, 10, 2048),
    "nlvr2/visual_bert": Official("nlvr2/fine-tune", 64, 10, 1024),
    "flickr30k/visual_bert": Official("flickr/fine-tune", 32, 5, 2054),
    "vcr/visual_bert_q2a": Official("vcr/fine-tune-qa", 32, 8, 512),
    "vcr/visual_bert_qa2r": Official("vcr/fine-tune-qar", 32, 12, 512),
}


def load(name: str) -> RunConfig:
    return load_config(ROOT / "configs" / f"{name}.yaml", ["data.root=DATA"])


@pytest.mark.parametrize("name", OFFICIAL)
def test_training(name):
    official, config = OFFICIAL[name], load(name)
    train = config.train
    assert (train.images_per_batch, config.data.texts_per_image, train.accumulate) == (official.batch, 1, 1)
    assert (train.epochs, train.max_steps) == (official.epochs, None)
    assert (train.lr, train.detector_lr, train.head_lr) == (2e-5, None, None)
    assert (train.optimizer, train.schedule, train.schedule_first) == ("bert_adam", "linear", False)
    assert (train.betas, train.eps, train.weight_decay) == ([0.9, 0.999], 1e-6, 0.01)
    assert (train.decay_norm_and_bias, train.decay_bn_scales) == (False, True)
    assert (train.warmup_share, train.clip_norm, train.clip_tensor_norm) == (0.1, None, 1.0)
    assert (train.patience, train.mixed_precision) == (3, "no")
    assert train.keep_best.startswith(f"{config.data.eval_splits[0]}/accuracy_")
    assert config.data.flip == 0


@pytest.mark.parametrize("name", OFFICIAL)
def test_header_names_the_official_file(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text("utf-8")
    header = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    assert f"configs/{OFFICIAL[name].file}.json" in header


@pytest.mark.parametrize("name", OFFICIAL)
def test_encoder_and_features(name):
    config = load(name)
    width = read_detector_config(config.detector).feature_dim
    encoder = VisualBertEncoderConfig(feature_dim=width, **config.encoder.config)
    assert encoder.visual_embedding_dim == OFFICIAL[name].feature_dim
    assert encoder.special_visual_initialize and not encoder.train_pooler and not encoder.bypass_transformer
    assert (encoder.hidden_dropout_prob, encoder.attention_probs_dropout_prob) == (0.1, 0.1)
    assert encoder.region_types == [0, 1]
    assert encoder.uses_whole_image == name.startswith("vcr/")
    assert config.data.vocabulary == "bert-base-uncased"


@pytest.mark.parametrize("name", OFFICIAL)
def test_task(name):
    config = load(name)
    task = from_dict(TASKS[config.task.name][0], {**config.task.config}, "task.config")
    assert task.new_layers == "normal"
    assert config.data.max_text_length == (None if name.startswith("vcr/") else MAX_LENGTH)
    if name.startswith("vqa/"):
        assert (task.hidden_layer, task.loss, task.initialise_from_words, task.dropout) == (
            False,
            "divergence",
            False,
            0.1,
        )
    elif name.startswith("nlvr2/"):
        assert (task.hidden_layer, task.loss, task.dropout) == (False, "softmax", 0.1)
        assert config.data.boxes.selection.max_regions == 144
    elif name.startswith("flickr30k/"):
        assert (task.head_size, task.num_heads, task.loss_per, task.phrase_state) == (64, 1, "text", "last")
    else:
        assert (task.names_by, task.ground_at, task.cut, task.join_word) == ("mention", "word_number", "fronts", None)
        assert task.cut_choices_only
        assert task.names_restart_in_choices
        assert (task.max_pieces, task.loss, task.region_loss_weight, task.dropout) == (
            MAX_LENGTH - 3,
            "softmax",
            0,
            0.1,
        )
        assert len(task.people_names) == 15 and task.people_names.count("Peyton") == 2
        assert config.data.config.objects == "r2c_all_texts" and not config.detector.freeze
        assert config.data.config.question == ("rationale" if name.endswith("qa2r") else "answer")
