from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e_vl.cli import train as tool
from e2e_vl.config import load_config
from e2e_vl.io import read_log
from e2e_vl.run import train as training
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]

NO_DROPOUT = tuple(
    f"encoder.config.{name}=0"
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "region_dropout_prob")
)
GT_ONLY = "data.boxes.train=gt", "detector.loss_weight=0", "eval.boxes=[]"
RESNETS = "detector.overrides.MODEL.RESNETS"

pytestmark = pytest.mark.usefixtures("on_cpu")


def parameters_of(run_dir: str | Path) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": value
        for part in ("detector", "encoder", "task")
        for name, value in load_file(Path(run_dir) / "model" / part / "model.safetensors").items()
    }


def logged(run_dir: str | Path, kind: str = "train") -> list[dict]:
    return [line for line in read_log(Path(run_dir) / "log.jsonl") if line["kind"] == kind]


@pytest.fixture
def built(monkeypatch) -> list:
    """Collects the `Run` of every `train` call."""
    runs = []
    build = training.build_run

    def keep(*arguments, **named):
        runs.append(build(*arguments, **named))
        return runs[-1]

    monkeypatch.setattr(training, "build_run", keep)
    return runs


def test_a_run_directory_holds_what_the_docstring_says(trained_run):
    path = trained_run.path
    assert load_config(path / "config.yaml") == trained_run.config
    assert json.loads((path / "metrics.json").read_text()) == trained_run.metrics
    names = {item.name for item in path.iterdir()}
    assert names == {"config.yaml", "log.jsonl", "metrics.json", "tensorboard", "checkpoints", "model", "tokenizer"} | {
        "report.html",
        "predictions_val_gt.json",
        "predictions_val_detections.json",
        "predictions_val_online.json",
    }
    assert any((path / "tensorboard").rglob("events.*"))
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["step_00000008"]
    for part in ("detector", "encoder", "task", "tokenizer"):
        assert any((path / "model" / part).iterdir())


def test_metrics_and_log_agree(trained_run):
    metrics, lines = trained_run.metrics, logged(trained_run.path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    settings = trained_run.config.detector
    weights = dict.fromkeys(("loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg"), settings.loss_weight)
    weights["loss_attribute"] = settings.loss_weight
    weights = {name: value * settings.loss_weights.get(name, 1.0) for name, value in weights.items()}
    weights["referring"] = 1.0
    for line in lines:
        assert line["loss"] == pytest.approx(sum(value * line[name] for name, value in weights.items()), rel=1e-5)
        assert line["grad_norm"] > 0
    [evaluation] = logged(trained_run.path, "eval")
    assert {name: value for name, value in evaluation.items() if "/" in name} == {
        name: value for name, value in metrics.items() if "/" in name
    }
    assert metrics["steps"] == 8
    assert metrics["processes"] == 1
    model = trained_run.model
    assert metrics["parameters"]["detector"] == sum(p.numel() for p in model.detector.parameters())
    assert metrics["seconds"] > metrics["seconds_training"] > 0
    for boxes, count in (("gt", 6), ("detections", 1), ("own", 1)):
        name = {"gt": "gt_boxes", "detections": "detected_boxes", "own": "predicted_boxes"}[boxes]
        assert 0 <= metrics[f"val/accuracy_{name}"] <= metrics[f"val/ceiling_{name}"] <= 1
        assert metrics[f"val/count_{name}"] >= count
    assert metrics["val/ceiling_gt_boxes"] == 1


def test_the_tool_says_what_it_starts_from_and_ends_with_a_table(tiny_words, tmp_path, capsys):
    run = tmp_path / "run"
    words = [*tiny_words, f"output={run}", "train.max_steps=1", "eval.boxes=[gt, online]", "eval.every_epochs=0"]
    assert tool.main(["--config", str(ROOT / "configs" / "tiny" / "refcoco.yaml"), *words]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == str(run) and lines[1].startswith("  device      CPU with 1 of ")
    assert lines[-2:] == [f"last model: {run / 'model'}", f"report: {run / 'report.html'}"]
    assert [line.split() for line in lines if "boxes  own" in line] == [["gt", "boxes", "own", "boxes"]]
    metrics = json.loads((run / "metrics.json").read_text())
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("val/") and "count" not in line}
    expected = {
        name.replace("_gt_boxes", ""): [f"{metrics[name.replace('_gt_', place)]:.3f}" for place in ("_gt_", "_own_")]
        for name in metrics
        if "_gt_boxes" in name and "count" not in name
    }
    assert rows == expected and len(rows) > 3
    assert "arning" not in printed.err and "it/s" not in printed.err, "libraries are silent"


def test_training_fits_a_few_texts(tiny_config):
    config = tiny_config(
        *GT_ONLY,
        *NO_DROPOUT,
        "train.images_per_batch=12",
        "train.max_steps=25",
        "train.lr=3e-3",
        "train.warmup_steps=0",
        "train.schedule=constant",
        "data.texts_per_image=1",
        f"{RESNETS}.NORM=GN",
    )
    train(config)
    losses = [line["referring"] for line in logged(config.output)]
    assert losses[-1] < 0.75 * max(losses[:3])


def test_accumulated_micro_batches_give_the_parameters_of_one_batch(tiny_config, tmp_path):
    # A large epsilon: Adam would blow up the rounding of gradients near zero to whole steps.
    settings = ("train.max_steps=5", "train.lr=1e-2", "train.eps=1e-2", "data.texts_per_image=1")
    runs = {parts: tmp_path / f"accumulate{parts}" for parts in (1, 2)}
    for parts, path in runs.items():
        config = tiny_config(
            *GT_ONLY, *NO_DROPOUT, *settings, f"{RESNETS}.NORM=GN", f"train.accumulate={parts}", f"output={path}"
        )
        train(config)
    one, two = (parameters_of(path) for path in runs.values())
    assert set(one) == set(two)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-5  # of steps of 1e-2
    lines = {parts: logged(path) for parts, path in runs.items()}
    for name in ("lr_head", "lr_detector", "epoch", "step"):
        assert [line[name] for line in lines[1]] == [line[name] for line in lines[2]]
    assert len({line["lr_head"] for line in lines[2]}) > 3  # the schedule moves with optimiser steps


def test_the_logged_rate_is_the_one_the_step_used(tiny_config):
    config = tiny_config(*GT_ONLY, "train.max_steps=4", "train.warmup_steps=2", "train.schedule=linear")
    train(config)
    assert [line["lr_head"] / config.train.lr for line in logged(config.output)] == pytest.approx([0, 0.5, 1, 0.5])


def test_a_weight_for_a_loss_that_does_not_exist(tiny_config):
    with pytest.raises(ValueError, match=r"detector.loss_weights names 'loss_mask'; the losses of this detector are"):
        train(tiny_config("detector.loss_weights={loss_mask: 1.0}", "train.max_steps=1"))


def test_more_micro_batches_than_an_epoch_has(tiny_config):
    config = tiny_config(
        *GT_ONLY, "data.texts_per_image=null", "train.images_per_batch=16", "train.accumulate=16", "train.max_steps=2"
    )
    assert train(config)["steps"] == 2
    assert [line["epoch"] for line in logged(config.output)] == [1.0, 2.0]


def test_epochs_decide_the_number_of_steps(tiny_config):
    config = tiny_config(
        *GT_ONLY,
        "data.texts_per_image=null",
        "train.images_per_batch=5",
        "train.max_steps=null",
        "train.epochs=1.4",
        "eval.every_epochs=0.3",
        "eval.boxes=[gt]",
        "eval.max_images=2",
    )
    assert train(config)["steps"] == 5  # 12 images are 3 batches of 5
    evaluations, [final] = logged(config.output, "eval"), logged(config.output, "final")
    assert [line["step"] for line in evaluations] == [1, 2, 3, 4] and final["step"] == 5
    counts = {line["val/count_gt_boxes"] for line in evaluations}
    assert len(counts) == 1 and max(counts) < final["val/count_gt_boxes"]  # the first images in between, all at the end


def test_a_frozen_detector_does_not_change(tiny_config, built, monkeypatch):
    config = tiny_config("detector.freeze=true", f"{RESNETS}.NORM=BN", "train.max_steps=3", "eval.boxes=[gt]")
    start = {}
    prepare = training.Trainer.__init__

    def remember(self, config, accelerator, run, resume_from):
        start.update({name: value.clone() for name, value in run.model.state_dict().items()})
        prepare(self, config, accelerator, run, resume_from)

    monkeypatch.setattr(training.Trainer, "__init__", remember)
    train(config)
    after = built[0].model.state_dict()
    changed = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, start[name])}
    assert changed == {"encoder", "task"}
    assert set(logged(config.output)[0]) & {"lr_detector", "lr_encoder"} == {"lr_encoder"}


def test_bfloat16_trains_with_finite_losses(tiny_config):
    config = tiny_config("train.mixed_precision=bf16", "train.max_steps=3", "eval.boxes=[gt, online]")
    metrics = train(config)
    lines = logged(config.output)
    assert len(lines) == 3
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert metrics["val/count_gt_boxes"] == metrics["val/count_predicted_boxes"] > 0
    assert {value.dtype for value in parameters_of(config.output).values()} <= {torch.float32, torch.int64}


def test_logged_losses_are_averages_since_the_last_line(tiny_config, tmp_path):
    words = [*GT_ONLY, "train.max_steps=5"]
    for every in (1, 3):
        train(tiny_config(*words, f"train.log_every={every}", f"output={tmp_path / f'every{every}'}"))
    single = [line["referring"] for line in logged(tmp_path / "every1")]
    thirds = logged(tmp_path / "every3")
    assert [line["step"] for line in thirds] == [3, 5]
    assert [line["referring"] for line in thirds] == pytest.approx([sum(single[:3]) / 3, sum(single[3:]) / 2], rel=1e-5)


def test_losses_that_become_nan_stop_the_run_and_name_images(tiny_config, monkeypatch):
    config = tiny_config(*GT_ONLY, "train.max_steps=3")
    build = training.build_run

    def poisoned(*arguments, **named):
        run = build(*arguments, **named)
        torch.nn.init.constant_(run.model.task.head.output.bias, math.nan)
        return run

    monkeypatch.setattr(training, "build_run", poisoned)
    with pytest.raises(ValueError, match=r"referring, loss became NaN or infinite in step 1 \(images .*COCO_.*lower"):
        train(config)


def test_batches_that_cannot_be_split_are_refused(tiny_config):
    config = tiny_config(*GT_ONLY)
    with pytest.raises(ValueError, match=r"images_per_batch \(4\) must be a multiple of train\.accumulate \(3\)"):
        dataclasses.replace(config.train, accumulate=3)
