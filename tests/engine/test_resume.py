"""A run that was stopped and resumed is the run that was never stopped: bit by bit, on one machine with one thread.

`cpu_with_one_thread` in tests/conftest.py says why that holds. A tolerance would say little: Adam turns the rounding of
a gradient near zero into a whole step.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e_vl.config import RunConfig, load_config
from e2e_vl.engine import train as training
from e2e_vl.engine.train import train
from e2e_vl.run_files import RunLog, read_log, write_json
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
    update = training._Training._update

    def interrupt(self, micro_batches):
        if self.step == 5:
            raise KeyboardInterrupt
        return update(self, micro_batches)

    monkeypatch.setattr(training._Training, "_update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    run = Path(config.output)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]
    monkeypatch.setattr(training._Training, "_update", update)
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
    update = training._Training._update

    def interrupt(self, micro_batches):
        if self.step == 4:
            raise KeyboardInterrupt
        return update(self, micro_batches)

    monkeypatch.setattr(training._Training, "_update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.setattr(training._Training, "_update", update)
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
    with pytest.raises(ValueError, match=r"saved by 2 processes, and this run has 1; launch it with --num_processes 2"):
        train(stopped, resume=True)


def test_another_trainable_part_is_refused(stopped):
    with pytest.raises(ValueError, match=r"Cannot continue from .*parameter group"):
        train(changed(stopped, "detector", freeze=True), resume=True)


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
        if name == "scheduler.bin":  # nobody reads it
            continue
        with pytest.raises(ValueError, match=r"step_00000004") as caught:
            train(stopped, resume=True)
        assert "\n" not in str(caught.value)
    if name == "scheduler.bin":
        train(stopped, resume=True)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Payload(witness)))
    assert witness.exists(), "the payload should work where nothing stops it"


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl", "model.safetensors"])
def test_a_damaged_checkpoint_is_named(stopped, name):
    path = Path(stopped.output) / "checkpoints" / "step_00000004" / "state" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"step_00000004") as caught:
        train(stopped, resume=True)
    assert "another checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lost_file_is_named(stopped):
    (Path(stopped.output) / "checkpoints" / "step_00000004" / "state" / "random_states_0.pkl").unlink()
    with pytest.raises(ValueError, match=r"random_states_0\.pkl"):
        train(stopped, resume=True)


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
    log.write(2, "eval", {"x": None})
    RunLog(path, enabled=True, resume_step=2).write(3, "train", {"loss": 9.0})
    assert [(line["step"], line["kind"], line.get("loss")) for line in read_log(path)] == [
        (1, "train", 0.5),
        (2, "train", 1.0),
        (2, "eval", None),
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
