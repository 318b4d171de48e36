"""The best model is kept, and training ends when no better one comes; a resumed run does the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from e2e_vl.config import RunConfig
from e2e_vl.io import read_log
from e2e_vl.run import train as training
from e2e_vl.run.best import BestModel
from e2e_vl.run.checkpoint import load_model
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


def stop_in(monkeypatch, config: RunConfig, step: int) -> None:
    """Train until the update after so many steps, which is interrupted."""
    update = training.Trainer.train_step

    def interrupt(self, micro_batches):
        if self.step == step:
            raise KeyboardInterrupt
        return update(self, micro_batches)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "train_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def best_of(run: str | Path) -> dict:
    return json.loads((Path(run) / "best" / "best.json").read_text())


def weights_of(model: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(model) / "encoder" / "model.safetensors")


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_best_model_is_kept_with_its_step_and_value(scores, tiny_config):
    config = tiny_config(*SETTINGS)
    metrics = train(config)
    run = Path(config.output)
    assert best_of(run) == {"metric": METRIC, "value": 0.5, "step": 5}
    own = {"metrics": {METRIC: 0.45, "val/count_gt_boxes": 6.0}}  # what every evaluation gives after step 8
    assert metrics["best"] == {**best_of(run), "images": 6, **own} and "stopped_early" not in metrics
    report = (run / "report.html").read_text()
    assert "The last model, of step 8:" in report and "It is the model of step 5, chosen by val/score_gt" in report
    assert "0.500 over 6 images.\nOver all images:" in report
    assert json.loads((run / "metrics.json").read_text())["best"]["step"] == 5
    assert not is_equal(weights_of(run / "best"), weights_of(run / "model"))
    assert sorted(path.name for path in run.glob("best*")) == ["best"]
    # step 2 was the best when step 4 was saved
    assert json.loads((run / "checkpoints" / "step_00000004" / "best" / "best.json").read_text())["step"] == 2
    load_model(run / "best")


def test_the_last_model_can_be_the_best(scores, tiny_config):
    scores[8] = 0.9
    config = tiny_config(*SETTINGS)
    assert train(config)["best"] == {"metric": METRIC, "value": 0.9, "step": 8, "images": 6}
    assert "It is the last model." in (Path(config.output) / "report.html").read_text()
    assert is_equal(weights_of(Path(config.output) / "best"), weights_of(Path(config.output) / "model"))


def test_only_evaluations_of_the_same_images_compare(scores, tiny_config):
    """The last model is evaluated on the first images, too, and then on all."""
    scores[8] = 0.9
    config = tiny_config(*SETTINGS, "eval.max_images=2", "eval.every_epochs=1")
    metrics = train(config)
    lines = [(line["kind"], line["step"]) for line in read_log(Path(config.output) / "log.jsonl")]
    evaluations = [line for line in lines if line[0] != "train"]
    assert evaluations == [("eval", 3), ("eval", 6), ("eval", 8), ("final", 8)]
    assert best_of(config.output)["step"] == 8 and metrics["best"]["images"] == 2
    folder = Path(config.output) / "tensorboard"
    steps = []
    for path in folder.rglob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        if METRIC in events.Tags()["scalars"]:
            steps += [event.step for event in events.Scalars(METRIC)]
    assert steps == [3, 6, 8]  # the last evaluation, of all images, is left out of the series


def test_a_limit_that_leaves_no_image_out_is_none(scores, tiny_config):
    config = tiny_config(*SETTINGS, "eval.max_images=6", "eval.every_epochs=1")
    train(config)
    lines = [line["step"] for line in read_log(Path(config.output) / "log.jsonl") if line["kind"] == "eval"]
    assert lines == [3, 6, 8]


@pytest.mark.parametrize("stop", [5, 7])
def test_a_resumed_run_keeps_the_same_model(scores, tiny_config, tmp_path, monkeypatch, stop):
    whole = tiny_config(*SETTINGS, f"output={tmp_path / 'whole'}")
    train(whole)
    config = tiny_config(*SETTINGS)
    stop_in(monkeypatch, config, stop)
    metrics = train(config, resume=True)
    assert best_of(config.output) == best_of(whole.output)
    assert {name: metrics["best"][name] for name in best_of(config.output)} == best_of(config.output)
    assert is_equal(weights_of(tmp_path / "whole" / "best"), weights_of(Path(config.output) / "best"))
    assert read_log(tmp_path / "whole" / "log.jsonl") == read_log(Path(config.output) / "log.jsonl")


def test_a_model_that_is_not_reached_again_is_not_kept(scores, tiny_config, tmp_path, monkeypatch):
    """After the interruption, training goes on from step 4 in another way, where step 2 stays the best."""
    config = tiny_config(*SETTINGS)
    stop_in(monkeypatch, config, 5)
    run = Path(config.output)
    assert best_of(run)["step"] == 5
    second = weights_of(run / "checkpoints" / "step_00000004" / "best")
    scores.update({5: 0.0, 6: 0.0, 7: 0.0, 8: 0.0})
    train(config, resume=True)
    assert best_of(run) == {"metric": METRIC, "value": 0.3, "step": 2}
    assert is_equal(weights_of(run / "best"), second)


def test_training_ends_when_no_better_model_comes(scores, tiny_config):
    config = tiny_config(*SETTINGS, "train.patience=2")
    metrics = train(config)
    assert (metrics["steps"], metrics["stopped_early"]) == (4, 2)  # steps 3 and 4 are not better than step 2
    assert "stopped early: 2 evaluations without a better value" in (Path(config.output) / "report.html").read_text()
    assert best_of(config.output)["step"] == 2
    assert train(config, resume=True)["steps"] == 4  # it has ended
    assert train(tiny_config(*SETTINGS, "train.patience=3"), resume=True)["steps"] == 8  # 5 is better, 6 to 8 are not


def test_patience_survives_a_resume(scores, tiny_config, monkeypatch):
    config = tiny_config(*SETTINGS, "train.patience=2", "train.save_every_epochs=0.3333333")
    stop_in(monkeypatch, config, 3)
    assert train(config, resume=True)["steps"] == 4


def test_a_wrong_name_is_found_before_training_and_answered_with_the_metrics(tiny_config, monkeypatch):
    monkeypatch.setattr(training.Trainer, "train_step", lambda *a: pytest.fail("training has begun"))
    config = tiny_config("train.keep_best=val/acuracy_predicted_boxes", "eval.boxes=[online]")
    message = r"train.keep_best is 'val/acuracy_predicted_boxes'; it must be one of .*val/accuracy_predicted_boxes, .*ceiling_predicted_boxes"
    with pytest.raises(ValueError, match=message):
        train(config)


@pytest.mark.parametrize(
    "name",
    [
        *("accuracy", "train/accuracy_gt_boxes", "val/accuracy_predicted_boxes"),  # not evaluated
        *("val/count_gt_boxes", "val/ceiling_gt_boxes", "val/ceiling_gt_boxes/relation"),  # constants
    ],
)
def test_a_name_that_cannot_be_right_is_found_before_drawing(tiny_config, tmp_path, name):
    config = tiny_config(f"train.keep_best={name}", "eval.boxes=[gt]", f"data.root={tmp_path / 'data'}")
    with pytest.raises(ValueError, match=f"train.keep_best is '{name}'; it must be .*: val/METRIC_gt_boxes"):
        train(config)
    assert not (tmp_path / "data").exists()
    metrics = {"val/accuracy_gt_boxes": 0.5, "val/count_gt_boxes": 6.0, "val/ceiling_gt_boxes": 1.0}
    with pytest.raises(ValueError, match=r"it must be one of val/accuracy_gt_boxes\.$"):
        BestModel(tmp_path, name).check_name(metrics)


def test_a_real_metric_of_a_family(tiny_config, tmp_path):
    config = tiny_config("train.keep_best=val/accuracy_gt_boxes/attribute", "eval.boxes=[gt]", "train.max_steps=3")
    metrics = train(config)
    assert metrics["best"]["value"] == metrics["val/accuracy_gt_boxes/attribute"]
    again, path = evaluate_run(Path(config.output) / "best", split="val", boxes="gt")
    assert again["val/accuracy_gt_boxes/attribute"] == metrics["best"]["value"]
    assert path == Path(config.output) / "best" / "evaluations" / "val_gt.json"


def test_settings_that_need_each_other(tiny_config):
    with pytest.raises(ValueError, match=r"train\.patience needs train\.keep_best"):
        tiny_config("train.patience=2")
    with pytest.raises(ValueError, match=r"train\.patience counts the evaluations of eval\.every_epochs, which is 0"):
        tiny_config("train.patience=2", "train.keep_best=x", "eval.every_epochs=0")


# The judge alone


def test_values_that_are_equal_or_unknown_are_not_better(tmp_path):
    best = BestModel(tmp_path / "best", "m", patience=3)
    judged = [best.judge(step, {"m": value}) for step, value in enumerate([None, 0.2, 0.2, None, 0.1])]
    assert judged == [False, True, False, False, False]
    assert best.found == {"metric": "m", "value": 0.2, "step": 1} and best.is_over
    assert not best.judge(4, {"m": 9.0}), "a step is judged once"


def test_a_value_that_is_no_number_is_never_the_best(tmp_path):
    best = BestModel(tmp_path / "best", "val/loss_gt_boxes")
    values = [float("nan"), float("inf"), 0.7, float("-inf"), 0.6]
    assert [best.judge(step, {"val/loss_gt_boxes": value}) for step, value in enumerate(values)] == [
        *(False, False, True, False, True),
    ]


def test_a_loss_has_no_details(tmp_path):
    best = BestModel(tmp_path / "best", "val/loss_gt_boxes/relation")
    with pytest.raises(ValueError, match="it must be one of val/loss_gt_boxes"):
        best.check_name({"val/loss_gt_boxes": 0.5})


def test_a_checkpoint_that_lost_the_best_model(tmp_path, caplog):
    best = BestModel(tmp_path / "best", "m")
    position = {"metric": "m", "step": 3, "value": 0.25, "judged_step": 4, "waited": 1}
    best.prepare(position, tmp_path)
    best.go_on(is_writer=True)
    assert "The best model, of step 3, is lost" in caplog.text and "more than 0.25 for m" in caplog.text
    assert best.position() == position
    other = BestModel(tmp_path / "best", "another")
    other.prepare(position, tmp_path)
    other.go_on(is_writer=True)
    assert other.found is None and other.metric == "another"


def test_of_a_loss_less_is_better(tmp_path, caplog):
    best = BestModel(tmp_path / "best", "val/loss_gt_boxes", patience=2)
    values = [0.7, 0.4, 0.4, 0.3, 0.5]
    judged = [best.judge(step, {"val/loss_gt_boxes": value}) for step, value in enumerate(values)]
    assert judged == [True, True, False, True, False]
    assert best.found == {"metric": "val/loss_gt_boxes", "value": 0.3, "step": 3} and best.waited == 1
    best.prepare(best.position(), tmp_path)
    best.go_on(is_writer=True)
    assert "less than 0.3 for val/loss_gt_boxes" in caplog.text
