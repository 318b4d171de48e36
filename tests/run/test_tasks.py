"""Tiny runs of each task, from drawing to predictions and a user's question. Referring expressions: test_train.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from detector.io import read_json
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.io import read_log
from e2e_vl.predictions import read_predictions
from e2e_vl.run.build import build_run, make_synthetic_data
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from e2e_vl.tasks.vcr import VCRPrediction, joint_metrics
from e2e_vl.weights.visual_bert import OfficialVisualBert
from tests.conftest import ENCODERS
from tests.data.helpers import write_metadata
from tests.official_vqa import vqa_accuracy
from tests.run.runs import ROOT, first_texts, predictions_of, tiny
from tests.same import assert_same
from tests.weights.starts import options, replaced

pytestmark = pytest.mark.usefixtures("on_cpu")


def metrics_of(run: Path) -> dict:
    return read_json(run / "metrics.json")


@pytest.fixture
def settings(shared_folder, tmp_path) -> Callable[..., RunConfig]:
    """`settings("vqa", ...)`: settings of a tiny run on data that are drawn once."""

    def make(task: str, *words: str) -> RunConfig:
        return tiny(task, shared_folder / f"{task}_data", tmp_path / "run", *words)

    return make


def test_gqa(run_of):
    run = run_of("gqa")
    names = ("accuracy", "validity", "plausibility", "consistency", "distribution")
    assert all(f"val_all/{name}_gt_boxes" in metrics_of(run) for name in names)
    records = predictions_of(run, "val_all_gt")
    is_balanced = [record.get("is_balanced", True) for record in records]
    assert {*is_balanced} == {True, False}
    assert ["is_valid" in record for record in records] == is_balanced


def test_the_grounding_score_of_gqa_with_lxmert(settings, tmp_path):
    config = settings(
        "gqa",
        "data.synthetic={scenes: {train: 4, val: 2}, formats: [gqa, refcoco+, detections]}",
        f"data.root={tmp_path / 'data'}",
        *("data.config.grounding=true", "task.config={grounding: true, init_from_words: false}"),
        "data.files.scene_graphs=gqa/sceneGraphs/{part}_sceneGraphs.json",
        *("train={max_steps: 1, warmup_steps: 0}", "eval={boxes: [gt], report_pictures: 0}"),
    )
    metrics = train(replaced(config, encoder=ENCODERS["lxmert"]))
    records = predictions_of(config.output, "val_all_gt")
    scored = [record["grounding"] for record in records if record.get("is_balanced", True)]
    assert metrics["val_all/grounding_gt_boxes"] == pytest.approx(sum(scored) / len(scored))
    assert any(scored) and all("named_boxes" not in record for record in records)


def test_flickr30k(run_of):
    run = run_of("flickr30k")
    metrics = metrics_of(run)
    assert metrics["val/ceiling_gt_boxes"] == 1, "the annotated boxes hold the right ones"
    recalls = [metrics[f"val/{name}_gt_boxes"] for name in ("accuracy", "recall_5", "recall_10")]
    assert recalls == sorted(recalls) and recalls[0] >= 0
    assert any(name.startswith("val/accuracy_by_type_gt_boxes/") for name in metrics)
    records = predictions_of(run)
    assert all(len(record["boxes"]) == len(record["phrases"]) == len(record["ranks"]) for record in records)
    assert len({len(record["phrases"]) for record in records}) > 1


def test_nlvr2(run_of):
    run = run_of("nlvr2")
    metrics = metrics_of(run)
    assert 0 <= metrics["val/consistency_gt_boxes"] <= metrics["val/accuracy_gt_boxes"] <= 1
    records = predictions_of(run)
    assert all(len(record["file_names"]) == 2 for record in records)


# VQA and its list of answers


def test_vqa(vqa_run, tmp_path):
    metrics, moved = metrics_of(vqa_run), tmp_path / "moved"
    answers = read_json(vqa_run / "answers.json")
    assert metrics["val/count_gt_boxes"] == 41 and {"yes", "no"} <= set(answers)
    shutil.copytree(vqa_run, moved)
    (moved / "answers.json").unlink()  # a run needs neither its old place nor the data to answer
    _, model, _ = load_model(moved, overrides=["data.root=nowhere"])
    assert model.task.answer_vocabulary.answers == answers and model.task.head.output.out_features == len(answers)
    again, path = evaluate_run(moved, split="val", boxes="gt", output=tmp_path / "p.json")
    assert again["val/accuracy_gt_boxes"] == metrics["val/accuracy_gt_boxes"]
    records = read_json(path)
    assert_same(records, predictions_of(moved))
    assert {record["answer"] for record in records} <= set(answers)
    assert vqa_accuracy(records, records, 12)["overall"] == pytest.approx(100 * metrics["val/accuracy_gt_boxes"])


def test_controls_of_vqa(vqa_run, settings):
    """The same words for each text, and the same pixels for both images, which have one size."""
    run = build_run(settings("vqa", "data.blank_image=true", "data.blank_text=true", "data.boxes.train=gt"))
    batch = first_texts(run, 2, 3)
    assert torch.equal(batch.images.pixels[0], batch.images.pixels[1])
    assert (batch.texts.input_ids == batch.texts.input_ids[0]).all()
    loss = run.model(batch).losses["vqa"].mean
    loss.backward()
    assert torch.isfinite(loss)


# VCR


def test_two_runs_of_vcr_are_scored_together(vcr_runs, tmp_path):
    q2a, qa2r = vcr_runs
    scores = metrics_of(q2a)
    assert {f"val/accuracy_gt_boxes/{family}" for family in ("colour", "match", "pair")} <= set(scores)
    assert {"choice", "region_class"} <= set(read_log(q2a / "log.jsonl")[0])
    answers, rationales = (read_predictions(run / "predictions_val_gt.json", VCRPrediction) for run in vcr_runs)
    joint = joint_metrics(answers, rationales)
    assert joint["Q->A"] == pytest.approx(scores["val/accuracy_gt_boxes"])
    assert joint["Q->AR"] <= min(joint["Q->A"], joint["QA->R"])

    each = ["data.config.condition_on=each"]
    metrics, path = evaluate_run(qa2r, split="val", boxes="gt", output=tmp_path / "each.json", overrides=each)
    given_each = read_predictions(path, VCRPrediction)
    assert len(given_each) == 4 * len(answers)
    assert metrics["val/accuracy_gt_boxes"] == pytest.approx(joint["QA->R"])
    assert joint_metrics(answers, given_each) == pytest.approx(joint)


# VCR with VisualBERT and the network of R2C, also as an official file


NETWORK = {
    "RESNETS": {"STEM_OUT_CHANNELS": 8, "RES2_OUT_CHANNELS": 16, "WIDTH_PER_GROUP": 4},
    "R2C": {"FEATURE_DIM": 8, "MASK_CHANNELS": 4, "CLASS_DIM": 4, "CANVAS": [192, 192]},
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def detector_of(shipped: RunConfig, **more: object) -> dict:
    """The network of a published config, small."""
    backbone = shipped.detector.overrides.get("MODEL", {}).get("BACKBONE", {})
    return {
        "backend": shipped.detector.backend,
        "config": str(ROOT / "configs/detector/r2c_R_50.yaml"),
        "overrides": {"MODEL": NETWORK | {"BACKBONE": backbone}},
        "loss_weight": 0.0,
        "loss_weights": {},
        **more,
    }


def tiny_vcr(folder: Path, name: str, *words: str) -> RunConfig:
    common = ("train={max_steps: 1, warmup_steps: 0, schedule: constant}", "data={flip: 0, texts_per_image: 1}")
    return tiny("vcr", folder / "vcr", folder / name, *common, "eval={boxes: [gt], report_pictures: 0}", *words)


def test_a_step_with_the_shipped_settings(tmp_path):
    shipped = load_config(ROOT / "configs/vcr/visual_bert_q2a.yaml", ["data.root=DATA"])
    config = replaced(
        tiny_vcr(tmp_path, "run", "data.config.objects=r2c_all_texts"),
        detector=detector_of(shipped, weights=None),
        encoder={"name": shipped.encoder.name, "config": options(shipped.encoder.config) | SMALL},
        task={"config": shipped.task.config},
    )
    metrics = train(config)
    assert 0 <= metrics["val/accuracy_gt_boxes"] <= 1
    _, model, _ = load_model(tmp_path / "run")
    assert type(model.detector).__name__ == "R2CNetwork"
    assert OfficialVisualBert().export(model, "vcr", tmp_path / "x.th") == []
    state = torch.load(tmp_path / "x.th", weights_only=True)
    assert {"bert.classifier.weight", "detector.object_embed.weight"} <= state.keys()


def test_the_first_phase_trains_the_network_and_the_next_goes_on_with_it(tmp_path):
    """COCO's captions with objects of a detector of VCR's classes; res5 and what follows learn, res4 does not."""
    shipped = load_config(ROOT / "configs/pretraining/visual_bert_coco_vcr.yaml", ["data.root=DATA"])
    data, metadata = tmp_path / "data", tmp_path / "metadata"
    words = ("train={max_steps: 2, warmup_ratio: 0}", "eval.report_pictures=0")
    drawn = tiny("visual_bert_pretraining", data, tmp_path / "run", *words)
    config = replaced(
        drawn,
        detector=detector_of(shipped),
        encoder={"config": options(drawn.encoder.config) | {"uses_whole_image": True}},
        task={"config": shipped.task.config},
        data={
            "config": options(shipped.data.config) | {"min_object_score": 0.15},
            "files": {key: drawn.data.files[key] for key in ("images", "captions")} | {"metadata": str(metadata)},
        },
    )
    make_synthetic_data(drawn)
    metadata.mkdir()
    for split in ("train", "val"):
        write_metadata(data / f"detection/instances_{split}.json", metadata)
    metrics = train(config)
    assert {"val/masked_words_gt_boxes", "val/relationship_gt_boxes"} <= set(metrics)
    _, model, _ = load_model(tmp_path / "run")
    assert type(model.detector).__name__ == "R2CNetwork" and model.task.instance_masks.size == 14

    before = model.detector.state_dict()
    tuned = replaced(
        tiny_vcr(tmp_path, "tuned", "detector.freeze=true"),
        detector=detector_of(shipped, weights=str(tmp_path / "run")),
        encoder={"name": "visual_bert", "config": SMALL | {"uses_whole_image": True}},
        task={"config": {"mask_size": 14}},
    )
    train(tuned)
    after = load_model(tmp_path / "tuned")[1].detector.state_dict()
    kept = [name for name in before if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)
