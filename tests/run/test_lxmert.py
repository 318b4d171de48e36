"""LXMERT: tasks and pre-training from pixels, and runs on the files of its official code, whose features are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from e2e_vl.config import RunConfig
from e2e_vl.run.build import build_model, build_tokenizer, make_synthetic_data
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.run.train import train
from e2e_vl.synthetic import make_scenes
from tests.conftest import ENCODERS
from tests.run.runs import losses_of, predictions_of, tiny
from tests.weights.starts import options, replaced

ENCODER = ENCODERS["lxmert"]
ONE_STEP = ("train.max_steps=1", "train.warmup_steps=0", "eval.boxes=[gt]", "eval.report_pictures=0")
OBJECTIVES = {
    "masked_words": {"weight": 1.0, "whole_words": False},
    "masked_text": 0.0,
    "masked_regions": 0.0,
    "relationship": 1.0,
    "object_labels": {"weight": 6.67, "classes": 6},
    "region_features": 6.67,
}

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., RunConfig]:
    """`config_of("vqa", "train.lr=1")`: settings of configs/tiny/vqa.yaml with a small LXMERT, on data drawn for it."""

    def make(name: str, *words: str) -> RunConfig:
        own = ("data.synthetic.scenes={train: 4, val: 2}", *ONE_STEP, *words)
        return replaced(tiny(name, tmp_path / "data", tmp_path / "run", *own), encoder=ENCODER)

    return make


def test_a_step_of_pretraining_from_pixels(config_of, tmp_path):
    settings = (
        "task.config.mask_probability=0.8",
        "task.config.replace_probability=0.1",
        "data.config.use_corpus=false",
    )
    config = config_of("pretraining", *settings)
    task = options(config.task.config) | {"objectives": OBJECTIVES, "region_probability": 0.5, "max_length": None}
    train(replaced(config, task={"config": task}))
    [losses] = losses_of(tmp_path / "run")
    for name in ("masked_words", "relationship", "object_labels", "region_features"):
        assert 0 < losses[name] < 100


def test_a_saved_model_keeps_the_answers_of_pretraining(config_of, tmp_path):
    """The list comes with the model, wherever the file of answers was."""
    listed = tmp_path / "all_ans.json"
    listed.write_text('[{"ans": "cat", "dsets": ["vqa"]}, {"ans": "dog", "dsets": ["gqa"]}, '
                      '{"ans": "red", "dsets": ["vqa", "gqa"]}]', encoding="utf-8")  # fmt: skip
    config = config_of("pretraining", "data.config.use_corpus=false")
    make_synthetic_data(config)
    answers = {"weight": 1.0, "answers": str(listed), "answer_sources": ["gqa"]}
    task = options(config.task.config) | {"objectives": OBJECTIVES | {"image_qa": answers}}
    config = replaced(config, task={"config": task})
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    assert model.task.answers == ("dog", "red")
    save_model(tmp_path / "saved", config, model, tokenizer)
    listed.unlink()
    _, loaded, _ = load_model(tmp_path / "saved")
    assert loaded.task.answers == ("dog", "red")
    theirs = loaded.task.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.task.state_dict().items())


def test_a_step_of_gqa_with_the_score_of_its_attention(config_of, tmp_path):
    words = ("data.synthetic.formats=[gqa, refcoco+, detections]", "data.config.grounding=true")
    words += ("task.config.grounding=true", "task.config.initialise_from_words=false")
    metrics = train(config_of("gqa", *words, "data.files.scene_graphs=gqa/sceneGraphs/{part}_sceneGraphs.json"))
    records = predictions_of(tmp_path / "run", "val_all_gt")
    scored = [record["grounding"] for record in records if record.get("is_balanced", True)]
    assert metrics["val_all/grounding_gt_boxes"] == pytest.approx(sum(scored) / len(scored))
    assert any(scored) and all("named_boxes" not in record for record in records)


# On saved features


def test_pretraining(tmp_path):
    data = tmp_path / "data"
    make_scenes(data, scenes={"train": 8, "val": 4}, formats=["lxmert"])
    for path in (data / "images").rglob("*.jpg"):
        path.unlink()  # features are all that is read
    answers = data / "lxmert" / "all_ans.json"
    words = [f"task.config.objectives.image_qa.answers={answers}", "task.config.region_probability=0.5"]
    words += ["train={max_steps: 2, images_per_batch: 2}", "eval.report_pictures=0"]
    metrics = train(tiny("lxmert_files", data, tmp_path / "run", *words))
    [*_, losses] = losses_of(tmp_path / "run")
    names = {"masked_words", "relationship", "object_labels", "attribute_labels", "region_features", "image_qa"}
    assert names <= set(losses) and all(0 <= losses[name] < 100 for name in names)
    assert {f"val/{name}_precomputed_boxes" for name in ("object_labels", "attribute_labels")} <= set(metrics)
