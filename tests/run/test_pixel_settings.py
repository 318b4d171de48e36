"""Configs at full size that train the detector along, for each encoder and task: what they must all say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e_vl.config import RunConfig, load_config, read_detector_config

ROOT = Path(__file__).parents[2]
PIXELS = {  # file -> encoder, task
    "vqa/vl_bert_base_pixels": ("vl_bert", "vqa"),
    "nlvr2/vl_bert_base_pixels": ("vl_bert", "nlvr2"),
    "gqa/vl_bert_base_pixels": ("vl_bert", "gqa"),
    "flickr30k/vl_bert_base_pixels": ("vl_bert", "flickr30k"),
    "refcoco/lxmert": ("lxmert", "refcoco"),
    "vcr/lxmert_q2a": ("lxmert", "vcr"),
    "vcr/lxmert_qa2r": ("lxmert", "vcr"),
    "flickr30k/lxmert_pixels": ("lxmert", "flickr30k"),
    "refcoco/visual_bert": ("visual_bert", "refcoco"),
    "gqa/visual_bert_pixels": ("visual_bert", "gqa"),
    "vqa/visual_bert_pixels": ("visual_bert", "vqa"),
    "nlvr2/visual_bert_pixels": ("visual_bert", "nlvr2"),
    "flickr30k/visual_bert_pixels": ("visual_bert", "flickr30k"),
}
# what each encoder's official code fine-tunes with: optimiser, decay of biases and LayerNorms, clipping of all
# gradients together and of each tensor
OPTIMISERS = {
    "vl_bert": ("adamw_official", True, 1.0, None),
    "lxmert": ("bert_adam", True, 5.0, None),
    "visual_bert": ("bert_adam", False, None, 1.0),
}
TASKS = ("refcoco", "vqa", "vcr", "nlvr2", "gqa", "flickr30k")


def load(name: str) -> RunConfig:
    return load_config(ROOT / "configs" / f"{name}.yaml", ["data.root=DATA"])


@pytest.mark.parametrize("name", PIXELS)
def test_the_detector_is_trained_from_pixels(name):
    config = load(name)
    assert (config.encoder.name, config.task.name) == PIXELS[name]
    assert config.detector.backend == "builtin" and not config.detector.freeze
    sources = {config.data.boxes.train, *config.eval.boxes}
    assert "precomputed" not in sources and (config.train.detector_lr or config.train.lr) > 0
    assert config.data.files["images"] and all(source in ("gt", "detections") for source in sources)
    kept = config.train.keep_best
    assert kept is None or kept.startswith(f"{config.data.eval_splits[0]}/accuracy_")
    width = read_detector_config(config.detector).feature_dim
    assert width == (1024 if name == "nlvr2/visual_bert_pixels" else 2048)  # of the official encoders' features


@pytest.mark.parametrize("name", PIXELS)
def test_the_optimiser_is_the_encoder_s(name):
    config, train = load(name), load(name).train
    own = (train.optimizer, train.decay_norm_and_bias, train.clip_norm, train.clip_tensor_norm)
    assert own == OPTIMISERS[config.encoder.name]
    assert not (train.warmup_steps and train.warmup_share)


@pytest.mark.parametrize("name", PIXELS)
def test_the_header_says_that_it_was_not_trained_and_whose_values_it_has(name):
    lines = (ROOT / "configs" / f"{name}.yaml").read_text("utf-8").splitlines()
    header = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    assert "No result is published, and this was not trained here." in header
    assert " ours" in header
    start = load(name).encoder.weights
    assert "encoder.weights=START" in header or (start is not None and start.startswith("runs/"))


def test_every_encoder_has_every_task_from_pixels():
    """All pairs of encoder and task have a config at full size whose detector is trained."""
    found = set()
    for path in (ROOT / "configs").glob("*/*.yaml"):
        if path.parent.name not in TASKS:
            continue
        if "output" not in yaml.safe_load(path.read_text("utf-8")):
            continue  # a common base and no run
        config = load_config(path, ["data.root=DATA"])
        if config.detector.backend != "precomputed" and not config.detector.freeze:
            found.add((config.encoder.name, config.task.name))
    assert found == {(encoder, task) for encoder in OPTIMISERS for task in TASKS}


def test_the_page_lists_them():
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    assert [name for name in PIXELS if f"`configs/{name}.yaml`" not in page] == []
