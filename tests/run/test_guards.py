"""Guards of a run, each alone."""

from __future__ import annotations

import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from detector.errors import StoppedRunError, UserError
from e2e_vl.run.guards import FiniteCheck, StopSignals, run_lock, warn_of_shared_images
from e2e_vl.run.train import train

BATCHES = [SimpleNamespace(images=SimpleNamespace(names=["a.jpg", "b.jpg"]))]


def test_a_run_directory_belongs_to_one_training(tiny_config, on_cpu):
    config = tiny_config("train.max_steps=1", "eval.boxes=[]")
    run = Path(config.output)
    with run_lock(run):
        with pytest.raises(UserError, match="in use by another training"):
            train(config)
        assert [path.name for path in run.iterdir()] == [".lock"]
        with run_lock(run.with_name("other")):
            pass
    with run_lock(run):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.metric_for_best_model=val/acuracy_gt_boxes"], r"did you mean 'val/accuracy_gt_boxes'"),
        (["train.metric_for_best_model=val/loss_gt_boxes/relation"], r"did you mean 'val/loss_gt_boxes'"),
        (["train.trackers=[board]"], r"train.trackers has 'board'"),
        (["detector.weights=./nowhere.pth"], r"nowhere.pth"),
        (["data.files.detections=nowhere.json", "eval.boxes=[detections]"], r"nowhere\.json"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(tiny_config, monkeypatch, on_cpu, words, message):
    monkeypatch.setattr("e2e_vl.run.train.Trainer.train_step", lambda *_: pytest.fail("training has begun"))
    with pytest.raises(UserError, match=message):
        train(tiny_config("eval.boxes=[gt]", "train.max_steps=1", *words))


def test_a_batch_that_the_processes_cannot_share_evenly_is_refused(tiny_config, monkeypatch, on_cpu):
    """Their equal shares would leave images out."""
    monkeypatch.setattr(Accelerator, "num_processes", 3)
    with pytest.raises(UserError, match=r"images_per_batch is 8; it must be a multiple of 6, the number of processes"):
        train(tiny_config("train.images_per_batch=8", "train.gradient_accumulation_steps=2"))


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        ({"val": "def"}, None),
        ({"val": "cde"}, "1 of 3 images of val are trained on, such as c."),
        (
            {"train": "abc", "val": "bcd"},
            "train is the training split; 2 of 3 images of val are trained on, such as b.",
        ),
        ({"train": ""}, "train is the training split."),  # a data set that does not list its images
    ],
)
def test_images_that_are_trained_on_and_evaluated_cause_one_warning(splits, sentence, caplog):
    def examples(images: str) -> SimpleNamespace:
        return SimpleNamespace(
            dataset=SimpleNamespace(image_locations=lambda: ((Path("folder"), name) for name in images))
        )

    data = {(split, boxes): examples(images) for split, images in splits.items() for boxes in ("gt", "online")}
    run = SimpleNamespace(train_data=examples("abc"), eval_data=data)
    warn_of_shared_images(SimpleNamespace(data=SimpleNamespace(train_split="train")), run)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [sentence] * (sentence is not None)


def test_missing_images_of_the_evaluation_are_found_before_training(tiny_config, tmp_path, on_cpu):
    shutil.copytree(tiny_config().data.root, tmp_path / "data")
    for path in sorted((tmp_path / "data" / "images" / "train2014").iterdir())[-2:]:
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing.*\(2 of 6 images of the split val are missing\)"):
        train(tiny_config(f"data.root={tmp_path / 'data'}", "train.max_steps=1", "eval.boxes=[gt]"))


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_is_remembered_and_a_second_one_ends_at_once(monkeypatch, name, status):
    number = getattr(signal, name)
    monkeypatch.setattr(StopSignals, "PATIENCE", 0.0)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), number)
            assert stop.number == number
            with pytest.raises(StoppedRunError, match=f"stopped by {name}") as caught:
                os.kill(os.getpid(), number)
        assert caught.value.status == status and signal.getsignal(number) is signal.SIG_DFL
        with StopSignals() as stop, pytest.raises(StoppedRunError):
            stop.at_once = True  # there is a checkpoint
            os.kill(os.getpid(), number)
        assert stop.number == number  # for the end of the batch, if Python drops the error in a finaliser
    finally:
        signal.signal(number, before)


@pytest.mark.usefixtures("default_signals")
def test_a_signal_of_another_kind_is_no_second_ctrl_c(monkeypatch):
    """After Ctrl-C `accelerate launch` dies first, and the terminal then sends SIGHUP, also when it has gone."""
    monkeypatch.setattr(StopSignals, "PATIENCE", 0.0)
    with StopSignals() as stop:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.received() == signal.SIGTERM
        with pytest.raises(StoppedRunError, match="stopped by SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_whose_launcher_was_killed_ends(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    stop = StopSignals()
    assert stop.received() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.received() == signal.SIGHUP


def test_losses_and_images_are_named():
    check = FiniteCheck(scaled=False)
    assert check({"loss": 1.0, "grad_norm": 2.0}, 1, BATCHES)
    with pytest.raises(FloatingPointError, match=r"^words became NaN or infinite in step 7 \(images a.jpg, b.jpg\)"):
        check({"words": math.nan, "loss": math.nan, "grad_norm": math.nan}, 7, BATCHES)
    with pytest.raises(FloatingPointError, match=r"^grad_norm"):
        check({"loss": 1.0, "grad_norm": math.inf}, 1, BATCHES)


def test_the_scaler_of_fp16_may_skip_some_steps_but_not_all():
    check, overflow = FiniteCheck(scaled=True), {"loss": 1.0, "grad_norm": math.inf}
    assert not check(overflow, 1, BATCHES) and check({"loss": 1.0, "grad_norm": 3.0}, 2, BATCHES)
    with pytest.raises(FloatingPointError, match="loss became"):  # a loss is not scaled
        check({"loss": math.nan, "grad_norm": math.nan}, 3, BATCHES)
    assert not any(check(overflow, step, BATCHES) for step in range(FiniteCheck.MAX_OVERFLOWS - 1))
    with pytest.raises(FloatingPointError, match="grad_norm became"):
        check(overflow, 60, BATCHES)
