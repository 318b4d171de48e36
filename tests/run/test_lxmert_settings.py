"""configs/*/lxmert*.yaml hold the settings of LXMERT's official code (its README and command lines)."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.config import load_config

ROOT = Path(__file__).parents[2]
# peak rate, epochs, warm-up, batch, clipping
PUBLISHED = {
    "pretraining/lxmert": (1e-4, 20, 0.05, 256, 1.0),
    "vqa/lxmert": (5e-5, 4, 0.1, 32, 5.0),
    "gqa/lxmert": (1e-5, 4, 0.1, 32, 5.0),
    "nlvr2/lxmert": (5e-5, 4, 0.1, 32, 5.0),
}
SPLITS = {
    "pretraining/lxmert": ("mscoco_train+mscoco_nominival+vgnococo", ["mscoco_minival"]),
    "vqa/lxmert": ("train+nominival", ["minival"]),
    "gqa/lxmert": ("train+valid", ["testdev"]),
    "nlvr2/lxmert": ("train", ["valid"]),
}


def load(name: str):
    return load_config(ROOT / "configs" / f"{name}.yaml", ["data.root=DATA"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_rates_batches_and_splits(name):
    config = load(name)
    train, data = config.train, config.data
    assert (train.lr, train.epochs, train.warmup_share, train.images_per_batch, train.clip_norm) == PUBLISHED[name]
    assert (train.optimizer, train.weight_decay, train.eps, train.decay_norm_and_bias) == (
        "bert_adam",
        0.01,
        1e-6,
        True,
    )
    assert (train.schedule, train.accumulate, train.clip_tensor_norm) == ("linear", 1, None)
    assert (config.seed, data.max_text_length, data.texts_per_image, data.flip) == (9595, 20, 1, 0.0)
    assert (data.train_split, data.eval_splits) == SPLITS[name]
    assert (config.encoder.name, config.detector.backend, data.boxes.train) == ("lxmert", "precomputed", "precomputed")


@pytest.mark.parametrize("name", [*PUBLISHED, "pretraining/lxmert_paper", "pretraining/lxmert_paper_answers"])
def test_the_best_epoch_is_judged_by_what_is_evaluated(name):
    """Pre-training by the loss (official: BEST_EVAL_LOSS), fine-tuning by the accuracy."""
    config = load(name)
    metric = "loss" if name.startswith("pretraining") else "accuracy"
    assert config.train.keep_best == f"{config.data.eval_splits[0]}/{metric}_precomputed_boxes"
    assert "precomputed" in config.eval.boxes


def test_from_scratch_means_all_parameters_in_the_paper_only():
    official, paper = load("pretraining/lxmert"), load("pretraining/lxmert_paper")
    assert (official.encoder.weights, official.task.weights) == (None, "bert-base-uncased")
    assert official.task.config.word_start == "bias"
    assert (paper.encoder.weights, paper.task.weights) == (None, None)


def test_heads_are_the_official_ones():
    for name in ("vqa/lxmert", "gqa/lxmert"):
        head = load(name).task.config
        assert (head.loss, head.dropout, head.head_width, head.new_layers) == ("binary", 0.0, 2, "normal")
        assert not head.initialise_from_words
    pairs = load("nlvr2/lxmert").task.config
    assert (pairs.loss, pairs.dropout, pairs.hidden_layer) == ("softmax", 0.0, True)
    assert load("nlvr2/lxmert").encoder.config == {"max_images": 2}


def test_pre_training_sums_five_objectives():
    config = load("pretraining/lxmert").task.config
    weights = {name: value["weight"] if isinstance(value, dict) else value for name, value in config.objectives.items()}
    of_regions = dict.fromkeys(("object_labels", "attribute_labels", "region_features"), pytest.approx(1 / 0.15))
    assert weights == of_regions | {
        "masked_words": 1.0,
        "relationship": 1.0,
        "image_qa": 1.0,
        "masked_text": 0.0,
        "masked_regions": 0.0,
    }
    assert config.objectives["masked_words"]["whole_words"] is False
    assert (config.mask_probability, config.replace_probability, config.mask_pixels) == (0.8, 0.1, False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_from_pixels_the_detector_learns_too(name):
    config = load(f"{name}_pixels")
    assert config.detector.backend == "builtin" and not config.detector.freeze
    assert config.data.boxes.train != "precomputed"
