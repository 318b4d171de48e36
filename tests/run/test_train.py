"""The training loop: what a run directory holds, what a step does, and what a log line means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from detector.io import read_json
from e2e_vl.config_files import load_config
from e2e_vl.io import read_log
from e2e_vl.run import train as training
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.metric_names import MetricName, metrics_from_json
from e2e_vl.run.train import BestModel, train
from tests.run.runs import logged, lose_newest
from tests.weights.starts import same

NO_DROPOUT = tuple(
    f"encoder.config.{name}=0"
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "region_dropout_prob")
)
GT_ONLY = "data.boxes.train=gt", "detector.loss_weight=0", "eval.boxes=[]"
DETECTOR_LOSSES = ("loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg", "loss_attribute")
RESNETS = "detector.overrides.MODEL.RESNETS"

pytestmark = pytest.mark.usefixtures("on_cpu")


def weights_of(model: str | Path) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": value
        for part in ("detector", "encoder", "task")
        for name, value in load_file(Path(model) / part / "model.safetensors").items()
    }


@pytest.mark.parametrize("is_bf16", [False, True])
def test_processes_sum_gradients_in_the_precision_of_the_settings(tiny_config, monkeypatch, is_bf16):
    seen = []

    def make(*_, kwargs_handlers, **__):
        seen.append(kwargs_handlers[0].comm_hook.value)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "make_accelerator", make)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(f"train.bf16_gradients={is_bf16}"))
    assert seen == ["bf16" if is_bf16 else "no"]


def test_the_run_directory_metrics_and_log_of_a_run(trained_run):
    path, metrics, lines = trained_run.path, trained_run.metrics, logged(trained_run.path)
    assert load_config(path / "config.yaml") == trained_run.config
    assert read_json(path / "metrics.json") == metrics
    names = {item.name for item in path.iterdir() if not item.name.startswith(".")}
    predictions = {f"predictions_val_{boxes}.json" for boxes in ("gt", "detections", "online")}
    others = {"config.yaml", "log.jsonl", "tensorboard", "checkpoints", "model", "tokenizer", "report.html"}
    assert names == {"metrics.json", *others, *predictions}
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["step_00000008"]

    assert [line["step"] for line in lines] == list(range(1, 9))
    settings = trained_run.config.detector
    weights = {name: settings.loss_weights.get(name, 1.0) * settings.loss_weight for name in DETECTOR_LOSSES}
    weights["referring"] = 1.0
    for line in lines:
        assert line["loss"] == pytest.approx(sum(value * line[name] for name, value in weights.items()), rel=1e-5)
        assert line["grad_norm"] > 0
    [evaluation] = logged(path, "eval")
    assert {name for name in evaluation if "/" in name} == {name for name in metrics if "/" in name}
    assert all(evaluation[name] == value for name, value in metrics.items() if "/" in name)
    assert metrics["steps"] == 8 and metrics["processes"] == 1
    assert metrics["parameters"]["detector"] == sum(p.numel() for p in trained_run.model.detector.parameters())
    for boxes, count in (("gt", 6), ("detected", 1), ("predicted", 1)):
        assert 0 <= metrics[f"val/accuracy_{boxes}_boxes"] <= metrics[f"val/ceiling_{boxes}_boxes"] <= 1
        assert metrics[f"val/count_{boxes}_boxes"] >= count
    assert metrics["val/ceiling_gt_boxes"] == 1


def test_accumulated_micro_batches_give_the_parameters_of_one_batch(tiny_config, tmp_path):
    # A large epsilon: Adam would blow up the rounding of gradients near zero to whole steps.
    words = (
        "train={max_steps: 4, lr: 1.0e-2, eps: 1.0e-2, warmup_steps: 2, schedule: linear, tf32: false}",
        "data.texts_per_image=1",
    )
    runs = {parts: tmp_path / f"accumulate{parts}" for parts in (1, 2)}
    for parts, path in runs.items():
        own = (
            "seed=2",
            f"{RESNETS}.NORM=GN",
            f"train.gradient_accumulation_steps={parts}",
            f"train.log_every={parts}",
            f"output={path}",
        )
        train(tiny_config(*GT_ONLY, *NO_DROPOUT, *words, *own))
    one, two = (weights_of(path / "model") for path in runs.values())
    assert set(one) == set(two)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-3  # of steps of 1e-2
    # on most machines 2e-5; where a ReLU is near its kink, rounding decides, and 2e-4
    single, pairs = logged(runs[1]), logged(runs[2])
    assert [line["lr_head"] for line in single] == pytest.approx([0, 0.005, 0.01, 0.005]), "the rate of this very step"
    assert [line["step"] for line in pairs] == [2, 4]
    for name in ("lr_head", "lr_detector", "epoch"):
        assert [line[name] for line in pairs] == [line[name] for line in single[1::2]], name
    means = [(single[step]["referring"] + single[step + 1]["referring"]) / 2 for step in (0, 2)]
    assert [line["referring"] for line in pairs] == pytest.approx(means, rel=1e-4), "the mean since the last line"


def test_epochs_decide_the_number_of_steps(tiny_config):
    words = ("data.texts_per_image=null", "train={images_per_batch: 5, max_steps: null, epochs: 1.4, trackers: []}")
    config = tiny_config(*GT_ONLY, *words, "eval={every_epochs: 0.6, boxes: [gt], max_images: 2, report_pictures: 0}")
    assert train(config)["steps"] == 5  # 12 images are 3 batches of 5
    evaluations, [final] = logged(config.output, "eval"), logged(config.output, "final")
    assert [line["step"] for line in evaluations] == [2, 4] and final["step"] == 5
    counts = {line["val/count_gt_boxes"] for line in evaluations}
    assert len(counts) == 1 and max(counts) < final["val/count_gt_boxes"]  # the first images in between, all at the end


def test_more_micro_batches_than_an_epoch_has(tiny_config):
    settings = "train={images_per_batch: 16, gradient_accumulation_steps: 16, max_steps: 2, trackers: []}"
    config = tiny_config(*GT_ONLY, "data.texts_per_image=null", settings)
    assert train(config)["steps"] == 2
    assert [line["epoch"] for line in logged(config.output)] == [1.0, 2.0]


@pytest.mark.parametrize("is_channels_last", [True, False])
def test_the_memory_format_of_the_detector_is_that_of_the_settings(tiny_config, monkeypatch, is_channels_last):
    formats = []

    def see_kernels(trainer, *_):
        for name, weight in trainer.model.named_parameters():
            if "detector." in name and weight.ndim == 4 and min(weight.shape[1:]) > 1:  # others have both formats
                formats.append(weight.is_contiguous(memory_format=torch.channels_last))
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "run", see_kernels)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(f"train.channels_last={is_channels_last}", *GT_ONLY))
    assert formats
    assert set(formats) == {is_channels_last}


def test_a_frozen_detector_does_not_change(tiny_config, capsys):
    words = "detector.freeze=true", f"{RESNETS}.NORM=BN", "train={max_steps: 2, save_every_epochs: 0.01}"
    config = tiny_config(*words, "eval.boxes=[]")
    train(config)
    before, after = (weights_of(Path(config.output) / name / "model") for name in ("checkpoints/step_00000001", ""))
    changed = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert any("running_mean" in name for name in before)
    assert changed == {"encoder", "task"}
    assert set(logged(config.output)[0]) & {"lr_detector", "lr_encoder"} == {"lr_encoder"}
    assert "detector    197,982 parameters, frozen, all random" in capsys.readouterr().out


def test_without_detection_losses_what_only_they_train_is_frozen(tiny_config, capsys):
    config = tiny_config(*GT_ONLY, "train={max_steps: 1, trackers: []}")
    train(config)
    _, model, _ = load_model(Path(config.output))
    parts = model.detector.proposal_generator, model.detector.roi_heads.box_predictor
    number = sum(one.numel() for part in parts for one in part.parameters())
    assert f"detector    197,982 parameters, {number:,} of them frozen, " in capsys.readouterr().out


# Numbers that are not finite


@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_a_gradient_that_is_nan_is_not_applied(tiny_config, monkeypatch, clip):
    """The loss is finite. The images of this step are named, and the run goes on from the checkpoint before."""
    short = ("train.max_steps=3", "data.texts_per_image=1", "train.save_every_epochs=0.01")
    config = tiny_config(*GT_ONLY, *short, f"train.max_grad_norm={clip}")
    run, step, before, models, names = Path(config.output), training.Trainer.train_step, {}, [], []

    def poisoned(self, micro_batches):
        if self.step == 1:
            models.append(self.built.model)
            before.update({name: value.clone() for name, value in models[0].named_parameters()})
            names.extend(name for batch in micro_batches for name in batch.images.names)
            models[0].task.head.output.bias.register_hook(lambda gradient: gradient * torch.nan)
        return step(self, micro_batches)

    monkeypatch.setattr(training.Trainer, "train_step", poisoned)
    with pytest.raises(FloatingPointError, match=r"^grad_norm became NaN or infinite in step 2 \(images ") as caught:
        train(config)
    assert all(name in str(caught.value) for name in names) and len(names) == 4
    assert all(torch.equal(value, before[name]) for name, value in models[0].named_parameters())
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000001"]
    monkeypatch.setattr(training.Trainer, "train_step", step)
    assert train(config, resume=True)["steps"] == 3


def test_the_schedule_waits_for_steps_that_fp16_skips(tiny_config, monkeypatch, tmp_path):
    """Also in a run that is resumed after one."""
    monkeypatch.setattr(training, "FiniteCheck", lambda scaled: lambda values, step, batches: step != 2)
    settings = "train={max_steps: 4, warmup_steps: 8, save_every_epochs: 0.01, log_every: 1, trackers: []}"
    words = *GT_ONLY, "data.texts_per_image=1", settings
    config = tiny_config(*words)
    train(config)
    rates = [line["lr_encoder"] for line in logged(config.output)]
    assert rates[1] == rates[2] and rates[0] < rates[1] < rates[3]
    lose_newest(Path(config.output), tmp_path / "resumed")
    train(tiny_config(*words, f"output={tmp_path / 'resumed'}"), resume=True)
    assert [line["lr_encoder"] for line in logged(tmp_path / "resumed")] == rates


def test_weights_that_are_not_finite_are_not_saved(tiny_config, monkeypatch):
    """After the last step no loss would show them."""
    config = tiny_config(*GT_ONLY, "train.max_steps=2", "train.save_every_epochs=0.01")
    step = training.Trainer.train_step

    def poisoned(self, micro_batches):
        values = step(self, micro_batches)
        if self.step == 1:
            torch.nn.init.constant_(self.built.model.task.head.output.bias, torch.inf)
        return values

    monkeypatch.setattr(training.Trainer, "train_step", poisoned)
    with pytest.raises(FloatingPointError, match=r"head.output.bias is NaN.*no checkpoint is saved"):
        train(config)
    assert [path.name for path in (Path(config.output) / "checkpoints").iterdir()] == ["step_00000001"]
    assert not (Path(config.output) / "metrics.json").exists()


# The best model is kept, and training ends when no better one comes; a resumed run does the same.


METRIC = "val/score_gt_boxes"
# 3 steps are an epoch: each step is evaluated, and steps 4 and 8 are saved
SETTINGS = (
    f"train={{metric_for_best_model: {METRIC}, max_steps: 8, save_every_epochs: 1.3333333, trackers: []}}",
    "eval={every_epochs: 0.3333333, boxes: [gt], report_pictures: 0}",
    "data.texts_per_image=null",
)


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

    def metrics_of_step(self, *arguments, **options):
        return metrics_from_json({METRIC: values[step], "val/count_gt_boxes": 6.0})

    monkeypatch.setattr(training.Evaluator, "evaluate_splits", metrics_of_step)
    return values


def test_the_best_model_is_kept_and_a_resumed_run_keeps_the_same(scores, tiny_config, tmp_path):
    metrics = train(tiny_config(*SETTINGS, f"output={tmp_path / 'whole'}"))
    run = tmp_path / "whole"
    best = {"metric": METRIC, "value": 0.5, "step": 5}
    assert read_json(run / "best" / "best.json") == best
    own = {"metrics": {METRIC: 0.45, "val/count_gt_boxes": 6.0}}  # what every evaluation gives after step 8
    assert metrics["best"] == {**best, "images": 6, **own} and "stopped_early" not in metrics
    assert not same(weights_of(run / "best"), weights_of(run / "model"))

    config = tiny_config(*SETTINGS)
    lose_newest(run, Path(config.output))  # the model of step 5 is there already, and the run goes on from step 4
    assert train(config, resume=True)["best"] == metrics["best"]
    assert same(weights_of(run / "best"), weights_of(Path(config.output) / "best"))
    assert read_log(run / "log.jsonl") == read_log(Path(config.output) / "log.jsonl")


def test_a_best_model_whose_files_are_gone_is_replaced(scores, tiny_config, tmp_path, caplog):
    scores[2] = 0.9
    train(tiny_config(*SETTINGS, f"output={tmp_path / 'whole'}"))
    config = tiny_config(*SETTINGS)
    lose_newest(tmp_path / "whole", Path(config.output))
    shutil.rmtree(Path(config.output) / "best")
    best = train(config, resume=True)["best"]
    assert (best["step"], best["value"]) == (5, 0.5) and "of step 2, is lost" in caplog.text


def test_only_evaluations_of_the_same_images_compare(scores, tiny_config):
    """The last model is evaluated on the first images, too, and then on all; here it is the best."""
    scores[8] = 0.9
    config = tiny_config(*SETTINGS, "eval.max_images=2", "eval.every_epochs=1")
    metrics = train(config)
    lines = [(line["kind"], line["step"]) for line in read_log(Path(config.output) / "log.jsonl")]
    evaluations = [line for line in lines if line[0] != "train"]
    assert evaluations == [("eval", 3), ("eval", 6), ("eval", 8), ("final", 8)]
    assert metrics["best"] == {"metric": METRIC, "value": 0.9, "step": 8, "images": 2}
    assert same(weights_of(Path(config.output) / "best"), weights_of(Path(config.output) / "model"))


def test_training_ends_when_no_better_model_comes(scores, tiny_config):
    config = tiny_config(*SETTINGS, "train.patience=2")
    metrics = train(config)
    assert (metrics["steps"], metrics["stopped_early"]) == (4, 2)  # steps 3 and 4 are not better than step 2
    assert read_json(Path(config.output) / "best" / "best.json")["step"] == 2
    assert train(config, resume=True)["steps"] == 4  # it has ended
    assert train(tiny_config(*SETTINGS, "train.patience=3"), resume=True)["steps"] == 8  # 5 is better, 6 to 8 are not


def test_a_run_keeps_the_model_of_the_least_loss(tiny_config, tmp_path):
    """Only the split and the boxes that are judged have a loss."""
    words = "train={metric_for_best_model: val/loss_gt_boxes, max_steps: 2, trackers: []}", "data.texts_per_image=null"
    evaluation = "eval={every_epochs: 0.3333333, boxes: [gt, detections], report_pictures: 0}"
    metrics = train(tiny_config(*words, evaluation))
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
        ("val/score_gt_boxes", [None, 0.2, 0.2, None, 0.1], [False, True, False, False, False]),
        ("val/loss_gt_boxes", [0.7, 0.4, 0.4, 0.3, 0.5], [True, True, False, True, False]),
        ("val/loss_gt_boxes", [float("nan"), float("inf"), 0.7, float("-inf"), 0.6], [False, False, True, False, True]),
    ],
)
def test_more_is_better_but_of_a_loss_less(tmp_path, metric, values, expected):
    name = MetricName.read(metric)
    best = BestModel(tmp_path / "best", name, patience=3)
    assert [best.judge(step, {name: value}) for step, value in enumerate(values)] == expected
    last = max(step for step, is_best in enumerate(expected) if is_best)
    assert best.summary == {"metric": metric, "value": values[last], "step": last}
    assert best.waited == len(values) - 1 - last and best.is_over is (best.waited >= 3)
    assert not best.judge(4, {name: 9.0}), "a step is judged once"
    again = BestModel(tmp_path / "best", name)
    again.load_state_dict(best.state_dict())
    assert again.state_dict() == best.state_dict()
    other = BestModel(tmp_path / "best", MetricName.read("val/another_gt_boxes"))
    other.load_state_dict(best.state_dict())
    assert other.summary is None, "what was measured by another metric is forgotten"
