"""What trackers get, and what a run prints before training and at its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from detector.checkpoint import LoadReport
from e2e_vl.io import read_log
from e2e_vl.run.build import Start, build_eval_data, build_run
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.trackers import PICTURES, end_text, result_table, start_text
from tests.run.test_train import GT_ONLY

ROOT = Path(__file__).parents[2]
BOXES = ("gt", "detections", "online")

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_tensorboard_gets_settings_values_and_pictures(trained_run):
    folder = trained_run.path / "tensorboard"
    files = sorted(path for path in folder.rglob("events.*"))
    scalars: dict[str, list] = {}
    texts, pictures = "", []
    for path in files:
        events = EventAccumulator(str(path))
        events.Reload()
        scalars |= {name: events.Scalars(name) for name in events.Tags()["scalars"]}
        pictures += [(name, len(events.Images(name))) for name in events.Tags()["images"]]
        texts += path.read_bytes().decode("latin-1")
    assert [event.step for event in scalars["train/loss"]] == list(range(1, 9))
    assert {"train/lr_encoder", "val/accuracy_gt_boxes", "val/ceiling_predicted_boxes"} <= set(scalars)
    evaluations = sum(line["kind"] == "eval" for line in read_log(trained_run.path / "log.jsonl"))
    assert dict(pictures) == {f"val, {boxes} {row}": evaluations for boxes in BOXES for row in range(PICTURES)}
    assert "encoder.config.hidden_size" in texts and "train.lr" in texts  # hyper-parameters


# What a run prints


def said(config, *, step: int = 0, starts: tuple[Start, ...] = ()) -> dict[str, str]:
    """Lines of the block, by what they begin with."""
    run = build_run(config)
    build_eval_data(config, run)
    run.starts += starts
    first, *lines = start_text(config, run, make_accelerator("no"), step, 8).splitlines()
    assert first == config.output
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_the_block_before_training(tiny_config):
    lines = said(tiny_config("train.mixed_precision=bf16", "train.accumulate=2"))
    assert list(lines) == ["device", "training", "evaluation", "steps", "vocabulary", "detector", "encoder", "head"]
    assert lines["device"].startswith("CPU with 1 of ") and "1 process, bfloat16 mixed with float32" in lines["device"]
    assert lines["training"].startswith("train: 12 images with ") and lines["training"].endswith("texts, boxes: online")
    assert lines["evaluation"].endswith("texts, boxes: gt, detections, online")
    assert lines["steps"] == "8, each with 4 images in 2 parts and at most 3 texts per image (32 images in all)"
    assert lines["vocabulary"].endswith("wordpieces, built from the training texts")
    for name in ("detector", "encoder", "head"):
        assert re.fullmatch(r"[\d,]+ parameters, all random", lines[name])


def test_what_stays_random_is_named(tiny_config):
    names = ["head.output.weight", "head.output.bias"]
    first = LoadReport(["a"], missing=[*names, "x"], unexpected=["old"], mismatched=[], copied=["m -> head"])
    second = LoadReport(["x", "y"], missing=names, unexpected=[], mismatched=[], layout="BERT")
    line = said(tiny_config(*GT_ONLY), starts=(Start("task", "one", first), Start("task", "two", second)))["head"]
    assert line.partition("parameters, ")[2] == (
        "1 tensor from one (this detector names) and 2 tensors from two (BERT names); copied: m -> head; "
        "random: head.output.weight, head.output.bias; not used: old"
    )


def test_the_table_has_a_row_per_family_and_a_column_per_source_of_boxes():
    metrics = {
        "val/accuracy_gt_boxes": 0.5,
        "val/count_gt_boxes": 6.0,
        "val/accuracy_gt_boxes/yes/no": 0.25,
        "val/accuracy_predicted_boxes": 1.0,
        "val/accuracy_predicted_boxes/other": None,
        "test/AP_precomputed_boxes": 0.125,
        "steps": 8,
        "parameters": {"detector": 3},
    }
    assert result_table(metrics) == [
        "                     gt boxes  predicted boxes  precomputed boxes",
        "val/accuracy            0.500            1.000                  -",
        "val/accuracy/yes/no     0.250                -                  -",
        "val/accuracy/other          -                -                  -",
        "val/count                   6                -                  -",
        "test/AP                     -                -              0.125",
    ]
    first = {"val/count_gt_boxes": 6.0, "val/accuracy_gt_boxes": 0.5, "test/accuracy_gt_boxes": 0.5}
    assert [line.split()[0] for line in result_table(first)[1:]] == ["val/accuracy", "val/count", "test/accuracy"]
    assert result_table({"steps": 8}) == []


def test_the_end_has_the_results_of_the_last_and_of_the_best_model():
    best = {"metric": "val/x_gt_boxes", "value": 0.5, "step": 900, "images": 2, "metrics": {"val/x_gt_boxes": 0.25}}
    summary = {"steps": 1200, "seconds_training": 90.0, "best": best, "val/x_gt_boxes": 0.125, "stopped_early": 3}
    lines = end_text(summary, Path("runs/a"), Path("runs/a/report.html")).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("val/x")] == ["0.125", "0.250"]
    assert {"last model: runs/a/model", "report: runs/a/report.html"} <= set(lines)
    assert any(line.startswith("best model: runs/a/best") for line in lines)
