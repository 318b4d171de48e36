"""The best model is kept, and training ends when no better one comes; a resumed run does the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e_vl.io import read_log
from e2e_vl.run import train as training
from e2e_vl.run.best import BestModel
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train

METRIC = "val/score_gt_boxes"
# 3 steps are an epoch: each step is evaluated, and steps 4 and 8 are saved
SETTINGS = (
    f"train.keep_best={METRIC}",
    "train.max_steps=8",
    "train.save_every_epochs=1.3333333",
    "eval.every_epochs=0.3333333",
    "eval.boxes=[gt]",
    "data.texts_per_image=null",
    "train.trackers=[]",
    "eval.report_pictures=0",
)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def scores(monkeypatch) -> dict[int, float]:
    """What the evaluation of each step gives, in place of the true metrics."""
    values = {0: 0.0, 1: 0.1, 2: 0.3, 3: 0.2, 4: 0.3, 5: 0.5, 6: 0.4, 7: 0.5, 8: 0.45}
    step = 0
    evaluate = training.Trainer.evaluate

    def at_step(self, *arguments, **options):
        nonlocal step
        step = self.step
        return evaluate(self, *arguments, **options)

    monkeypatch.setattr(training.Trainer, "evaluate", at_step)
    monkeypatch.setattr(training, "evaluate_splits", lambda *a, **k: {METRIC: values[step], "val/count_gt_boxes": 6.0})
    return values


def best_of(run: str | Path) -> dict:
    return json.loads((Path(run) / "best" / "best.json").read_text())


def weights_of(model: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(model) / "encoder" / "model.safetensors")


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_best_model_is_kept_and_a_resumed_run_keeps_the_same(scores, tiny_config, tmp_path, monkeypatch):
    metrics = train(tiny_config(*SETTINGS, f"output={tmp_path / 'whole'}"))
    run = tmp_path / "whole"
    assert best_of(run) == {"metric": METRIC, "value": 0.5, "step": 5}
    own = {"metrics": {METRIC: 0.45, "val/count_gt_boxes": 6.0}}  # what every evaluation gives after step 8
    assert metrics["best"] == {**best_of(run), "images": 6, **own} and "stopped_early" not in metrics
    assert not is_equal(weights_of(run / "best"), weights_of(run / "model"))

    config, step = tiny_config(*SETTINGS), training.Trainer.train_step

    def interrupt(self, micro_batches):
        if self.step == 7:  # the model of step 5 is there already, and the run goes on from step 4
            raise KeyboardInterrupt
        return step(self, micro_batches)

    monkeypatch.setattr(training.Trainer, "train_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.setattr(training.Trainer, "train_step", step)
    assert train(config, resume=True)["best"] == metrics["best"]
    assert is_equal(weights_of(run / "best"), weights_of(Path(config.output) / "best"))
    assert read_log(run / "log.jsonl") == read_log(Path(config.output) / "log.jsonl")


def test_only_evaluations_of_the_same_images_compare(scores, tiny_config):
    """The last model is evaluated on the first images, too, and then on all; here it is the best."""
    scores[8] = 0.9
    config = tiny_config(*SETTINGS, "eval.max_images=2", "eval.every_epochs=1")
    metrics = train(config)
    lines = [(line["kind"], line["step"]) for line in read_log(Path(config.output) / "log.jsonl")]
    evaluations = [line for line in lines if line[0] != "train"]
    assert evaluations == [("eval", 3), ("eval", 6), ("eval", 8), ("final", 8)]
    assert metrics["best"] == {"metric": METRIC, "value": 0.9, "step": 8, "images": 2}
    assert is_equal(weights_of(Path(config.output) / "best"), weights_of(Path(config.output) / "model"))


def test_training_ends_when_no_better_model_comes(scores, tiny_config):
    config = tiny_config(*SETTINGS, "train.patience=2")
    metrics = train(config)
    assert (metrics["steps"], metrics["stopped_early"]) == (4, 2)  # steps 3 and 4 are not better than step 2
    assert best_of(config.output)["step"] == 2
    assert train(config, resume=True)["steps"] == 4  # it has ended
    assert train(tiny_config(*SETTINGS, "train.patience=3"), resume=True)["steps"] == 8  # 5 is better, 6 to 8 are not


def test_a_run_keeps_the_model_of_the_least_loss(tiny_config, tmp_path):
    """Only the split and the boxes that are judged have a loss."""
    every = ("train.max_steps=2", "train.trackers=[]", "eval.every_epochs=0.3333333", "data.texts_per_image=null")
    every += ("eval.report_pictures=0",)
    metrics = train(tiny_config("train.keep_best=val/loss_gt_boxes", "eval.boxes=[gt, detections]", *every))
    [name] = {name for name in metrics if "loss" in name}
    assert metrics["best"]["value"] < metrics[name]

    again, _ = evaluate_run(tmp_path / "run", split="val", boxes="gt", with_loss=True)
    assert again[name] == pytest.approx(metrics[name], rel=1e-6)
    best, _ = evaluate_run(tmp_path / "run" / "best", split="val", boxes="gt", with_loss=True)
    assert best[name] == pytest.approx(metrics["best"]["value"], rel=1e-6)


# The judge alone


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("m", [None, 0.2, 0.2, None, 0.1], [False, True, False, False, False]),
        ("val/loss_gt_boxes", [0.7, 0.4, 0.4, 0.3, 0.5], [True, True, False, True, False]),
        ("val/loss_gt_boxes", [float("nan"), float("inf"), 0.7, float("-inf"), 0.6], [False, False, True, False, True]),
    ],
)
def test_more_is_better_but_of_a_loss_less(tmp_path, metric, values, expected):
    best = BestModel(tmp_path / "best", metric, patience=3)
    assert [best.judge(step, {metric: value}) for step, value in enumerate(values)] == expected
    last = max(step for step, is_best in enumerate(expected) if is_best)
    assert best.found == {"metric": metric, "value": values[last], "step": last}
    assert best.waited == len(values) - 1 - last and best.is_over is (best.waited >= 3)
    assert not best.judge(4, {metric: 9.0}), "a step is judged once"
    again = BestModel(tmp_path / "best", metric)
    again.load_state_dict(best.state_dict())
    assert again.state_dict() == best.state_dict()
    other = BestModel(tmp_path / "best", "another")
    other.load_state_dict(best.state_dict())
    assert other.found is None, "what was measured by another metric is forgotten"


def test_names_of_metrics(tmp_path):
    metrics = {"val/accuracy_gt_boxes": 0.5, "val/count_gt_boxes": 6.0, "val/ceiling_gt_boxes": 1.0}
    for name in ("val/count_gt_boxes", "val/ceiling_gt_boxes", "val/accuracy_predicted_boxes", "accuracy"):
        with pytest.raises(ValueError, match=r"it must be one of val/accuracy_gt_boxes,"):
            BestModel(tmp_path, name).check_name(metrics)
    BestModel(tmp_path, "val/accuracy_gt_boxes/relation").check_name(metrics)  # a family may be missing in a part
    with pytest.raises(ValueError, match="it must be one of val/loss_gt_boxes"):
        BestModel(tmp_path, "val/loss_gt_boxes/relation").check_name({"val/loss_gt_boxes": 0.5})
