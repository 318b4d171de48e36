"""VCR from drawn scenes to trained models, predictions, Q->AR and the leaderboard file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.config import load_config
from e2e_vl.metrics.vcr import VCRPrediction, joint_metrics, write_submission
from e2e_vl.predictions import read_predictions
from e2e_vl.run.build import make_synthetic_data
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.leaderboard import read_leaderboard

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    found = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path_factory.mktemp('vcr') / 'data'}",
    ]
    make_synthetic_data(load_config(ROOT / "configs" / "tiny" / "vcr.yaml", [*found, "output=unused"]))
    return found


def run(words: list[str], output: Path, *more: str) -> dict:
    return train(load_config(ROOT / "configs" / "tiny" / "vcr.yaml", [*words, f"output={output}", *more]))


def predictions(path: Path) -> list[VCRPrediction]:
    return read_predictions(path, VCRPrediction)


def test_two_runs_make_one_submission(words, tmp_path, on_cpu):
    scores = run(words, tmp_path / "q2a")
    assert 0 <= scores["val/accuracy_gt_boxes"] <= 1
    assert {f"val/accuracy_gt_boxes/{family}" for family in ("colour", "match", "pair")} <= set(scores)
    logged = [json.loads(line) for line in (tmp_path / "q2a" / "log.jsonl").read_text().splitlines()]
    assert {"choice", "region_class"} <= set(logged[0])
    run(words, tmp_path / "qa2r", "data.config.question=rationale")

    answers = predictions(tmp_path / "q2a" / "predictions_val_gt.json")
    rationales = predictions(tmp_path / "qa2r" / "predictions_val_gt.json")
    joint = joint_metrics(answers, rationales)
    assert joint["Q->A"] == pytest.approx(scores["val/accuracy_gt_boxes"])
    assert joint["Q->AR"] <= min(joint["Q->A"], joint["QA->R"])

    each = ["data.config.condition_on=each"]
    metrics, path = evaluate_run(
        tmp_path / "qa2r", split="val", boxes="gt", output=tmp_path / "each.json", overrides=each
    )
    given_each = predictions(path)
    assert len(given_each) == 4 * len(answers)
    assert metrics["val/accuracy_gt_boxes"] == pytest.approx(joint["QA->R"])
    assert joint_metrics(answers, given_each) == pytest.approx(joint)

    _, path = evaluate_run(tmp_path / "q2a", split="test", boxes="gt", output=tmp_path / "answers.json")
    answers = predictions(path)
    metrics, path = evaluate_run(
        tmp_path / "qa2r", split="test", boxes="gt", output=tmp_path / "rationales.json", overrides=each
    )
    assert metrics == {}  # the test split has no labels
    write_submission(tmp_path / "test.csv", answers, predictions(path))
    assert read_leaderboard(tmp_path / "test.csv").annot_ids == [record.annot_id for record in answers]


def test_controls_are_chance(words, tmp_path, on_cpu):
    """Without any word the four choices are one text, so their scores are equal and the first wins."""
    run(words, tmp_path / "blind", "data.blank_text=true", "train.max_steps=1")
    records = predictions(tmp_path / "blind" / "predictions_val_gt.json")
    assert {record.choice for record in records} <= {0, 1, 2, 3}
    for record in records:
        assert record.probabilities == pytest.approx([0.25] * 4, abs=1e-5)


def test_detection_losses_and_a_blank_image(words, tmp_path, on_cpu):
    more = ["data.blank_image=true", "detector.loss_weight=1", "task.config.loss=sigmoid", "train.max_steps=1"]
    own_classes = "data.config.class_names=[person, sportsball, book, airplane, kite]"
    own_classes = own_classes, "detector.overrides.MODEL.ROI_HEADS.NUM_CLASSES=5"
    run(words, tmp_path / "dark", *own_classes, "task.config.num_classes=6", *more)
    logged = [json.loads(line) for line in (tmp_path / "dark" / "log.jsonl").read_text().splitlines()]
    assert {"choice", "region_class", "loss_cls", "loss_rpn_cls", "loss_attribute"} <= set(logged[0])
