"""A run that was stopped and resumed is the run that was never stopped: bit by bit, on one machine with one thread.

`cpu_with_one_thread` in tests/conftest.py says why that holds. A tolerance would say little: Adam turns the rounding of
a gradient near zero into a whole step.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from detector import io as whole_writer
from detector.io import write_json
from e2e_vl.cli.common import StoppedRunError
from e2e_vl.config import RunConfig, load_config
from e2e_vl.io import CHECKSUMS, RunLog, find_damage, read_log, write_checksums
from e2e_vl.run import evaluate as evaluation
from e2e_vl.run import train as training
from e2e_vl.run.train import train
from tests.conftest import cpu_with_one_thread

# Dropout, sampled RoIs, flips, batch statistics and a worker: all that draws random numbers or keeps a state.
# 12 images in batches of 4 are 3 steps an epoch, so the checkpoint of step 4 lies inside the second epoch, and
# inside a logging interval.
SETTINGS = (
    "data.texts_per_image=null",
    "data.flip=0.5",
    "encoder.config.hidden_dropout_prob=0.1",
    "task.config={loss: binary, dropout: 0.1}",
    "data.workers=1",
    "detector.overrides.MODEL.RESNETS.NORM=BN",
    "train.max_steps=8",
    "train.save_every_epochs=1.3333333",
    "train.log_every=3",
    "eval.every_epochs=1.3333333",
    "eval.boxes=[gt]",
    "eval.max_images=3",
)
TENSORS = ("detector", "encoder", "task")

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def uninterrupted(tiny_words, tmp_path_factory, request) -> Path:
    """Run directory of the 8 steps in one go, with the checkpoints of steps 4 and 8."""
    path = tmp_path_factory.mktemp("whole") / "run"
    config = Path(request.config.rootpath) / "configs" / "tiny" / "refcoco.yaml"
    with cpu_with_one_thread():
        train(load_config(config, [*tiny_words, *SETTINGS, f"output={path}"]))
    return path


@pytest.fixture
def stopped(uninterrupted, tiny_config, tmp_path) -> RunConfig:
    """Settings of a run directory that looks as if the run had died after its checkpoint of step 4."""
    config = tiny_config(*SETTINGS)
    run = Path(config.output)
    shutil.copytree(uninterrupted, run)
    shutil.rmtree(run / "checkpoints" / "step_00000008")
    (run / "metrics.json").unlink()
    return config


def changed(config: RunConfig, section: str, **values) -> RunConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def tensors_of(run: str | Path) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": value
        for part in TENSORS
        for name, value in load_file(Path(run) / "model" / part / "model.safetensors").items()
    }


def assert_same_run(one: str | Path, other: str | Path) -> None:
    assert read_log(Path(one) / "log.jsonl") == read_log(Path(other) / "log.jsonl")
    tensors = [tensors_of(run) for run in (one, other)]
    assert set(tensors[0]) == set(tensors[1])
    assert [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])] == []
    metrics = [json.loads((Path(run) / "metrics.json").read_text()) for run in (one, other)]
    assert [value for name, value in metrics[0].items() if "/" in name] == [
        value for name, value in metrics[1].items() if "/" in name
    ]


def test_interrupted_and_resumed_equals_uninterrupted(uninterrupted, tiny_config, monkeypatch):
    config = tiny_config(*SETTINGS)
    update = training.Trainer.train_step

    def interrupt(self, micro_batches):
        if self.step == 5:
            raise KeyboardInterrupt
        return update(self, micro_batches)

    monkeypatch.setattr(training.Trainer, "train_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    run = Path(config.output)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]
    monkeypatch.setattr(training.Trainer, "train_step", update)
    train(config, resume=True)
    assert [line["step"] for line in read_log(run / "log.jsonl")] == [3, 4, 6, 8, 8]
    assert_same_run(uninterrupted, run)


def test_the_official_optimiser_goes_on_exactly_and_ends_with_rate_zero(tiny_config, tmp_path, monkeypatch):
    """In bf16; 3 steps an epoch, so the checkpoint lies at step 3."""
    official = ("optimizer=adamw_official", "schedule=triangle", "schedule_first=true", "warmup_steps=2", "max_steps=5")
    words = [f"train.{word}" for word in (*official, "mixed_precision=bf16")]
    words += ["eval.boxes=[gt]", "eval.every_epochs=0", "train.save_every_epochs=1"]
    train(tiny_config(*words, f"output={tmp_path / 'whole'}"))
    config = tiny_config(*words)
    update = training.Trainer.train_step

    def interrupt(self, micro_batches):
        if self.step == 4:
            raise KeyboardInterrupt
        return update(self, micro_batches)

    monkeypatch.setattr(training.Trainer, "train_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.setattr(training.Trainer, "train_step", update)
    train(config, resume=True)
    assert_same_run(tmp_path / "whole", config.output)
    rates = [line["lr_encoder"] for line in read_log(Path(config.output) / "log.jsonl") if "lr_encoder" in line]
    assert rates == pytest.approx([config.train.lr * factor for factor in (0.5, 1, 2 / 3, 1 / 3, 0)])


def test_a_half_written_checkpoint_is_passed_over(uninterrupted, stopped):
    run = Path(stopped.output)
    half = run / "checkpoints" / "step_00000008"
    shutil.copytree(run / "checkpoints" / "step_00000004", half)
    (half / "step.json").unlink()
    (half / "state" / "optimizer.bin").write_bytes(b"cut")
    train(stopped, resume=True)
    assert_same_run(uninterrupted, run)


def test_without_a_checkpoint_the_run_starts_again(tiny_config):
    config = tiny_config("train.max_steps=2", "eval.boxes=[]")
    Path(config.output).mkdir()
    assert train(config, resume=True)["steps"] == 2


def test_other_settings_are_used_and_logged(stopped, caplog):
    other = changed(stopped, "train", lr=0.125, warmup_steps=0, schedule="constant", weight_decay=0.0)
    with caplog.at_level(logging.WARNING):
        train(other, resume=True)
    [message] = [record.getMessage() for record in caplog.records if "Resuming" in record.getMessage()]
    assert "train.lr: 0.001 -> 0.125" in message
    last = [line for line in read_log(Path(stopped.output) / "log.jsonl") if line["kind"] == "train"][-1]
    assert last["lr_head"] == last["lr_encoder"] == 0.125


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("encoder.config.num_hidden_layers=3", "encoder.num_hidden_layers: 2 -> 3"),
        ("detector.overrides.MODEL.RESNETS.NORM=GN", "NORM: BN -> GN"),
        ("task.config.loss=softmax", "task.loss: binary -> softmax"),
    ],
)
def test_another_architecture_is_refused(stopped, tiny_config, change, message):
    with pytest.raises(ValueError, match=r"Cannot resume from .*step_00000004: its architecture differs") as caught:
        train(tiny_config(*SETTINGS, change), resume=True)
    assert message in str(caught.value)


def test_other_numbers_of_the_wordpieces_are_refused(stopped, tmp_path):
    """A vocabulary of the same size, which no shape shows."""
    words = (Path(stopped.output) / "tokenizer" / "vocab.txt").read_text().split()
    words[-1], words[-2] = words[-2], words[-1]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    other = changed(stopped, "data", vocabulary=str(tmp_path / "vocab.txt"))
    with pytest.raises(ValueError, match=r"its encoder knows the \d+ wordpieces in .*; set data.vocabulary="):
        train(other, resume=True)


def test_another_number_of_processes_is_refused(stopped):
    position = Path(stopped.output) / "checkpoints" / "step_00000004" / "step.json"
    write_json(position, {**json.loads(position.read_text()), "processes": 2})
    sign(position.parent)
    with pytest.raises(ValueError, match=r"saved by 2 processes, and this run has 1; launch it with --num_processes 2"):
        train(stopped, resume=True)


def test_another_trainable_part_is_refused(stopped):
    with pytest.raises(ValueError, match=r"Cannot continue from .*parameter group"):
        train(changed(stopped, "detector", freeze=True), resume=True)


def sign(checkpoint: Path) -> None:
    """Write the checksums of the files as they are now."""
    (checkpoint / CHECKSUMS).unlink()
    write_checksums(checkpoint)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "scheduler.bin"])
def test_a_checkpoint_cannot_run_code(stopped, tmp_path, name):
    """Both as a plain pickle and inside torch's own format."""
    state = Path(stopped.output) / "checkpoints" / "step_00000004" / "state"
    witness = tmp_path / "ran"
    for write in (
        lambda path: path.write_bytes(pickle.dumps(Payload(witness), protocol=2)),
        lambda path: torch.save({"state": Payload(witness)}, path),
    ):
        write(state / name)
        sign(state.parent)
        with pytest.raises(ValueError, match=r"step_00000004") as caught:
            train(stopped, resume=True)
        assert "\n" not in str(caught.value)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Payload(witness)))
    assert witness.exists(), "the payload should work where nothing stops it"


@pytest.mark.parametrize(
    "name", ["state/optimizer.bin", "state/random_states_0.pkl", "state/model.safetensors", "step.json"]
)
def test_a_damaged_checkpoint_is_named(stopped, name):
    path = Path(stopped.output) / "checkpoints" / "step_00000004" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        ValueError, match=r"Cannot resume: .*step_00000004 is damaged \(.*\); copy another ch"
    ) as caught:
        train(stopped, resume=True)
    assert "\n" not in str(caught.value)


def test_of_an_earlier_version_damage_is_found_where_it_is_read(stopped):
    """Its checkpoints have no checksums."""
    folder = Path(stopped.output) / "checkpoints" / "step_00000004"
    (folder / CHECKSUMS).unlink()
    position = json.loads((folder / "step.json").read_text())
    for name in ("checksums", "place", "images_seen"):
        del position[name]
    write_json(folder / "step.json", position)
    with pytest.raises(ValueError, match=r"Cannot resume with train.images_per_batch=2.*with the earlier 4"):
        train(changed(stopped, "train", images_per_batch=2), resume=True)
    path = folder / "state" / "optimizer.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"step_00000004.*another checkpoint"):
        train(stopped, resume=True)


def test_a_flipped_bit_sends_the_run_to_the_last_whole_checkpoint(uninterrupted, stopped, caplog):
    """Which makes the damaged one anew."""
    run = Path(stopped.output)
    shutil.copytree(uninterrupted / "checkpoints" / "step_00000008", run / "checkpoints" / "step_00000008")
    path = run / "checkpoints" / "step_00000008" / "state" / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    train(stopped, resume=True)
    [sentence] = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert "step_00000008 is damaged (state/optimizer.bin is not as it was written); the run goes on from " in sentence
    assert_same_run(uninterrupted, run)
    assert find_damage(run / "checkpoints" / "step_00000008") is None


def test_a_finished_run_stays_as_it_is(uninterrupted, tiny_config, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    metrics = train(tiny_config(*SETTINGS), resume=True)
    assert metrics == json.loads((run / "metrics.json").read_text())
    assert "is finished after 8 steps and stays as it is" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# What ends a run


def test_a_signal_ends_a_run_after_its_step_and_nothing_is_lost(uninterrupted, tiny_config, monkeypatch, request):
    """SIGTERM in a step, then Ctrl-C in an evaluation, which is given up and made again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    config = tiny_config(*SETTINGS)
    update, evaluate = training.Trainer.train_step, evaluation.evaluate

    def terminated(self, micro_batches):
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, micro_batches)

    def interrupted(*arguments, **named):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments, **named)

    monkeypatch.setattr(training.Trainer, "train_step", terminated)
    with pytest.raises(StoppedRunError, match=r"stopped by SIGTERM after step 2. --resume continues from .*_00000002"):
        train(config)
    monkeypatch.setattr(training.Trainer, "train_step", update)
    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    with pytest.raises(StoppedRunError, match="stopped by SIGINT after step 4") as caught:
        train(config, resume=True)
    assert caught.value.status == 130
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    train(config, resume=True)
    assert_same_run(uninterrupted, config.output)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_and_a_dead_worker_lose_nothing(uninterrupted, tiny_config, monkeypatch):
    config = tiny_config(*SETTINGS)
    update, reach = training.Trainer.train_step, whole_writer._sync

    def full(path):
        if path.name == "optimizer.bin":
            raise OSError(errno.ENOSPC, "No space left on device")
        reach(path)

    def kill_worker(self, micro_batches):
        if self.step == 2:
            for child in multiprocessing.active_children():
                child.kill()
        return update(self, micro_batches)

    monkeypatch.setattr(training.Trainer, "train_step", kill_worker)
    with pytest.raises(
        ChildProcessError, match=r"a data worker died \(.*lower data.workers. Nothing that was saved is"
    ):
        train(config)
    checkpoints = Path(config.output) / "checkpoints"
    saved = [path.name for path in checkpoints.iterdir()]
    assert len(saved) == 1 and saved[0] >= "step_00000003", "a process alone saves what it has"
    monkeypatch.setattr(training.Trainer, "train_step", update)
    monkeypatch.setattr(whole_writer, "_sync", full)
    with pytest.raises(
        OSError, match=r"cannot be written \(the disk or a quota is full\).*continues from .*"
    ) as caught:
        train(config, resume=True)
    assert saved[0] in str(caught.value) and [path.name for path in checkpoints.iterdir()] == saved
    monkeypatch.setattr(whole_writer, "_sync", reach)
    train(config, resume=True)
    assert_same_run(uninterrupted, config.output)


def test_only_the_newest_checkpoints_are_kept(tiny_config):
    config = tiny_config(
        "train.max_steps=4", "train.save_every_epochs=0.01", "train.keep_checkpoints=2", "eval.boxes=[]"
    )
    train(config)
    kept = sorted(path.name for path in (Path(config.output) / "checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000004"]


# The log


def test_the_log_drops_lines_that_will_be_computed_again(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RunLog(path, enabled=True)
    for step in (1, 2, 3):
        log.write(step, "train", {"loss": step / 2})
    log.write(1, "eval", {"x": None})
    log.write(2, "eval", {"x": 1.0})  # it is made again
    RunLog(path, enabled=True, resume_step=2).write(3, "train", {"loss": 9.0})
    assert [(line["step"], line["kind"], line.get("loss")) for line in read_log(path)] == [
        (1, "train", 0.5),
        (2, "train", 1.0),
        (1, "eval", None),
        (3, "train", 9.0),
    ]
    RunLog(path, enabled=True)
    assert read_log(path) == []


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    path = tmp_path / "log.jsonl"
    RunLog(path, enabled=True).write(1, "train", {"loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 2, "kind": "tra')
    assert [line["step"] for line in read_log(path)] == [1]


def test_other_processes_write_nothing(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", enabled=False)
    log.write(1, "train", {})
    assert list(tmp_path.iterdir()) == []
