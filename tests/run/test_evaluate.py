from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from detector.io import read_json
from e2e_vl.cli.run import evaluate
from e2e_vl.config import BoxSource
from e2e_vl.extraction.regions import detector_of_run
from e2e_vl.metrics.refcoco import ReferringPrediction, hits
from e2e_vl.predictions import PhrasesOnly
from e2e_vl.run.evaluate import (
    LossSums,
    evaluate_run,
    find_sure_threshold,
    mark_unsure,
    sureness_metrics,
)
from e2e_vl.run.metric_names import MetricName, name_metrics
from e2e_vl.run.train import train
from e2e_vl.tasks.config import ReferringConfig
from e2e_vl.tasks.refcoco import ReferringTask
from tests.run.runs import predictions_of
from tests.run.test_optim import loss
from tests.same import assert_same

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("boxes", ["gt", "detections", "online"])
def test_evaluating_a_run_gives_the_numbers_of_its_training(trained_run, boxes, tmp_path):
    metrics, path = evaluate_run(trained_run.path, split="val", boxes=boxes, output=tmp_path / "deep" / "p.json")
    assert len(metrics) > 3
    assert_same(metrics, {name: trained_run.metrics[name] for name in metrics})
    assert_same(read_json(path), predictions_of(trained_run.path, f"val_{boxes}"))


def test_scenes_of_a_run_are_drawn_where_they_are_missing(trained_run, tmp_path, caplog):
    """As for the bundled demo, which comes without its scenes."""
    root = tmp_path / "elsewhere"
    metrics, _ = evaluate_run(
        trained_run.path, split="val", boxes="gt", output=tmp_path / "p.json", overrides=[f"data.root={root}"]
    )
    assert_same(metrics, {name: trained_run.metrics[name] for name in metrics})
    assert f"{root} does not exist, so the scenes of this run are drawn there first." in caplog.text
    (root / "synthetic.json").rename(root / "synthetic.json.unfinished")  # an evaluation was stopped while it drew
    shutil.rmtree(root / "refcoco+")
    again, _ = evaluate_run(
        trained_run.path, split="val", boxes="gt", output=tmp_path / "p.json", overrides=[f"data.root={root}"]
    )
    assert_same(again, metrics)
    assert f"{root} is unfinished, so the scenes of this run are drawn there first." in caplog.text


def test_boxes_of_a_detector_that_never_learned_to_find_any_are_warned_of(tiny_config, trained_run, caplog):
    words = ("detector.loss_weight=0", "data.boxes.train=gt", "train={max_steps: 1, trackers: []}", "eval.boxes=[]")
    config = tiny_config(*words)
    train(config)
    run = Path(config.output)
    assert "random" not in caplog.text
    assert detector_of_run(trained_run.path).warning == ""
    evaluate_run(run, split="val", boxes="online", output=run / "online.json")
    assert "The detector's predicted boxes are random" in caplog.text
    assert detector_of_run(run).warning.startswith("The run's detector was trained on given")


def test_a_corrupt_image_of_the_evaluation_ends_no_run(tiny_config, tmp_path):
    shutil.copytree(tiny_config().data.root, tmp_path / "data")
    image = sorted((tmp_path / "data" / "images" / "train2014").iterdir())[12]
    image.write_bytes(image.read_bytes()[:200])
    words = "data.boxes.train=gt", "data.workers=1", "detector.loss_weight=0", f"data.root={tmp_path / 'data'}"
    config = tiny_config(*words, "train={max_steps: 1, trackers: []}", "eval={boxes: [gt], report_pictures: 0}")
    run, metrics = Path(config.output), train(config)
    assert metrics["val/unreadable_images_gt_boxes"] == 1
    records = predictions_of(run)
    [lost] = read_json(run / "unreadable_val_gt.json")
    assert lost["images"] == ["13"] and "000000000013" in lost["reason"]
    assert {record["image_id"] for record in records}.isdisjoint({13})
    texts = [record.get("text_index", 0) for record in records] + lost["texts"]
    assert sorted(texts) == list(range(len(texts)))
    assert metrics["val/count_gt_boxes"] == len(records)
    # later, only by request
    with pytest.raises(ValueError, match=r"000000000013.*skip_broken=true"):
        evaluate_run(run, split="val", boxes="gt")
    again, _ = evaluate_run(run, split="val", boxes="gt", overrides=["data.skip_broken=true"])
    assert again["val/unreadable_images_gt_boxes"] == 1


# tools/evaluate.py


@pytest.mark.parametrize(("iou", "boxes"), [("mattnet", "gt"), ("vlbert", "detections"), ("strict", "online")])
def test_the_tool_prints_accuracy_and_ceiling_of_every_convention(trained_run, capsys, tmp_path, boxes, iou):
    output = tmp_path / "predictions.json"
    arguments = ["--run", str(trained_run.path), "--split", "val", "--boxes", boxes, "--iou", iou]
    assert evaluate([*arguments, "--output", str(output)]) == 0
    lines = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("val/")]
    values = {name.strip(): float(value) for name, value in lines}
    records = read_json(output)
    suffix = BoxSource(boxes).metric_suffix
    assert {f"val/accuracy_{suffix}/{record['family']}" for record in records} <= set(values)
    for name, key in (("accuracy", lambda r: [r["box"]]), ("ceiling", lambda r: r["candidate_boxes"])):
        right = [
            hits(np.array(key(record)), np.array(record["gt_box"]), iou, record["image_size"]).any()
            for record in records
        ]
        assert values[f"val/{name}_{suffix}"] == pytest.approx(np.mean(right), abs=1e-4)
    assert any(name.startswith(f"val/best_shortcut_{suffix}/relation/") for name in values)
    assert values[f"val/count_{suffix}"] == len(records)
    assert values[f"val/accuracy_{suffix}"] == pytest.approx(np.mean([one["correct"] for one in records]), abs=1e-4)
    for record in records:
        assert record["box"] in record["candidate_boxes"]
        assert record["score"] == max(record["candidate_scores"])
        assert Path(record["file_name"]).is_file()


def test_the_tool_writes_beside_the_run_and_takes_settings(trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run.path / "model", run)
    shutil.copytree(trained_run.config.data.root, tmp_path / "moved")
    words = [f"data.root={tmp_path / 'moved'}", "eval.images_per_batch=1"]
    assert evaluate(["--run", str(run), "--split", "train", "--boxes", "gt", *words]) == 0
    records = read_json(run / "evaluations" / "train_gt.json")
    assert len({record["image_id"] for record in records}) == 12
    assert all(str(tmp_path / "moved") in record["file_name"] for record in records)


def test_the_tool_never_writes_over_the_files_of_a_run(trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run.path, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    arguments = ["--run", str(run), "--split", "val", "--boxes", "gt"]
    assert evaluate([*arguments, "--iou", "strict"]) == evaluate(arguments) == 0
    names = ("val_gt.json", "val_gt_metrics.json", "val_gt_strict.json", "val_gt_strict_metrics.json")
    assert sorted(path.name for path in (run / "evaluations").iterdir()) == sorted(names)
    assert_same(read_json(run / "evaluations" / "val_gt.json"), predictions_of(run))
    for own in ("predictions_val_gt.json", "model/config.yaml"):
        assert evaluate([*arguments, "--output", str(run / own)]) == 2
    assert {path: path.read_bytes() for path in before} == before


def test_means_of_losses_are_over_the_items_of_all_batches(tiny_config):
    sums = LossSums()
    sums.add({"words": loss(6.0, 2.0), "phrases": loss(1.0, 1.0)})
    sums.add({"words": loss(1.0, 5.0), "none": loss(0.0, 0.0)})
    assert sums.means() == {"words": 1.0, "phrases": 1.0}
    assert sums.metrics(tiny_config("phrases.weight=0.5")) == {"loss": 1.5}
    assert LossSums().metrics(tiny_config()) == {}


# Sure answers


def test_the_threshold_of_a_run_marks_its_answers():
    task = ReferringTask(8, ReferringConfig())
    rows = [(0.9, 1.0)] * 40 + [(0.4, 0.0)] * 20
    predictions = [
        ReferringPrediction(box=(0, 0, 9, 9), score=score, candidate_boxes=(), correct=correct)
        for score, correct in rows
    ]
    measured = sureness_metrics(task, [*predictions, PhrasesOnly()])
    assert measured == {"sure_threshold": 0.9} and sureness_metrics(task, predictions[:49]) == {}
    metrics = name_metrics(measured, "val", BoxSource.ONLINE)
    metrics[MetricName("test", "sure_threshold", BoxSource.GT)] = None
    splits = ["train", "val", "test"]
    sources = (BoxSource.ONLINE, BoxSource.GT, BoxSource.DETECTIONS)
    thresholds = [find_sure_threshold(metrics, splits, boxes) for boxes in sources]
    assert thresholds == [0.9, math.inf, -math.inf]
    for threshold, number in zip(thresholds, (20, 60, 0), strict=True):
        mark_unsure(task, predictions, threshold)
        assert sum(prediction.is_unsure for prediction in predictions) == number
