"""Guards of a run, each alone."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from detector.errors import DiskError, StoppedRunError, UserError
from e2e_vl.run.guards import FiniteCheck, StopSignals, disk_errors_named, run_lock
from e2e_vl.run.train import train

BATCHES = [SimpleNamespace(images=SimpleNamespace(names=["a.jpg", "b.jpg"]))]


def test_a_run_directory_belongs_to_one_training(tmp_path):
    with run_lock(tmp_path / "run"):
        with pytest.raises(UserError, match="run is in use by another training"), run_lock(tmp_path / "run"):
            pytest.fail("it is locked")
        with run_lock(tmp_path / "other"):
            pass
    with run_lock(tmp_path / "run"):
        pass


def test_a_second_training_is_refused_and_changes_nothing(tiny_config, on_cpu):
    config = tiny_config("train.max_steps=1", "eval.boxes=[]")
    with run_lock(Path(config.output)), pytest.raises(UserError, match="in use by another training"):
        train(config)
    assert [path.name for path in Path(config.output).iterdir()] == [".lock"]


# What is checked before a run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.images_per_batch=4", "train.accumulate=4", "data.workers=0"], None),
        (["train.keep_best=val/acuracy_gt_boxes"], r"val/acuracy_gt_boxes'; it must be one of .*val/accuracy_gt_boxes"),
        (["train.keep_best=val/count_gt_boxes"], r"train.keep_best is 'val/count_gt_boxes'"),
        (["train.keep_best=test/accuracy_gt_boxes"], r"train.keep_best is 'test/accuracy_gt_boxes'"),
        (["train.trackers=[board]"], r"train.trackers has 'board'"),
        (["encoder.weights=./nowhere"], r"nowhere: no such weights file or folder"),
        (["detector.weights=./nowhere.pth"], r"nowhere.pth"),
        (["data.files.detections=nowhere.json", "eval.boxes=[detections]"], r"nowhere\.json"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(tiny_config, monkeypatch, on_cpu, words, message):
    config = tiny_config("eval.boxes=[gt]", "train.max_steps=1", *words)
    if message is None:
        train(config)
        return
    monkeypatch.setattr("e2e_vl.run.train.Trainer.train_step", lambda *_: pytest.fail("training has begun"))
    with pytest.raises(UserError, match=message):
        train(config)


def test_a_folder_that_is_not_a_run_is_not_written_into(tiny_config, on_cpu):
    config = tiny_config("train.max_steps=1", "eval.boxes=[]")
    run = Path(config.output)
    run.mkdir()
    (run / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        train(config)
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]
    shutil.rmtree(run)
    run.write_text("precious")
    with pytest.raises(UserError, match="is a file; choose another"):
        train(config)


def test_a_missing_image_of_the_evaluation_is_found_before_training(tiny_config, tiny_words, tmp_path, on_cpu):
    [root] = [word.partition("=")[2] for word in tiny_words if word.startswith("data.root=")]
    shutil.copytree(root, tmp_path / "data")
    images = sorted((tmp_path / "data" / "images" / "train2014").iterdir())
    for path in images[-2:]:
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing.*\(2 of 6 images of the split val are missing\)"):
        train(tiny_config(f"data.root={tmp_path / 'data'}", "train.max_steps=1", "eval.boxes=[gt]"))


def test_a_disk_that_is_too_small_is_found_before_training(tiny_config, monkeypatch, on_cpu):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("e2e_vl.run.guards.shutil.disk_usage", lambda _: usage(1, 1, 1 << 20))
    with pytest.raises(UserError, match=r"the disk has 0.0 GiB left, .* \(up to 3 at a time\).*keep_checkpoints \(2\)"):
        train(tiny_config("train.max_steps=1", "eval.boxes=[]"))


def test_a_full_disk_is_named():
    for error in (OSError(errno.ENOSPC, "x"), RuntimeError("[enforce fail] PytorchStreamWriter failed writing file")):
        with (
            pytest.raises(DiskError, match="step_1 cannot be written: the disk or a"),
            disk_errors_named(Path("step_1")),
        ):
            raise error
    with pytest.raises(KeyError), disk_errors_named(Path("step_1")):
        raise KeyError("a mistake in the program keeps its traceback")


# Signals


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
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
    finally:
        signal.signal(number, before)


# Numbers that are not finite


def test_losses_and_images_are_named():
    check = FiniteCheck(scaled=False)
    assert check({"loss": 1.0, "grad_norm": 2.0}, 1, BATCHES)
    with pytest.raises(FloatingPointError, match=r"^words became NaN or infinite in step 7 \(images a.jpg, b.jpg\)"):
        check({"words": math.nan, "loss": math.nan, "grad_norm": math.nan}, 7, BATCHES)
    with pytest.raises(FloatingPointError, match=r"^grad_norm .* \(images a.jpg, b.jpg, a.jpg, b.jpg, \.\.\.\)"):
        check({"loss": 1.0, "grad_norm": math.inf}, 1, BATCHES * 3)


def test_the_scaler_of_fp16_may_skip_some_steps_but_not_all():
    check, overflow = FiniteCheck(scaled=True), {"loss": 1.0, "grad_norm": math.inf}
    assert not check(overflow, 1, BATCHES) and check({"loss": 1.0, "grad_norm": 3.0}, 2, BATCHES)
    with pytest.raises(FloatingPointError, match="loss became"):  # a loss is not scaled
        check({"loss": math.nan, "grad_norm": math.nan}, 3, BATCHES)
    assert not any(check(overflow, step, BATCHES) for step in range(FiniteCheck.MAX_OVERFLOWS - 1))
    with pytest.raises(FloatingPointError, match="grad_norm became"):
        check(overflow, 60, BATCHES)
