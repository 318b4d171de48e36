"""A run that was stopped and resumed is the run that was never stopped: bit by bit, on one machine with one thread.

`cpu_with_one_thread` in tests/conftest.py says why that holds. A tolerance would say little: Adam turns the rounding of
a gradient near zero into a whole step. For two processes see test_two_processes.py.
"""

from __future__ import annotations

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

from detector import io as atomic_writes
from detector.errors import StoppedRunError
from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.batching import GroupedBatchSampler
from e2e_vl.io import CHECKSUMS, RunLog, find_damage, read_log, write_checksums
from e2e_vl.run import evaluate as evaluation
from e2e_vl.run import train as training
from e2e_vl.run.train import place_after, steps_to, train
from tests.conftest import cpu_with_one_thread
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
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
    "train.trackers=[]",
    "eval.every_epochs=1.3333333",
    "eval.boxes=[gt]",
    "eval.max_images=3",
)
TENSORS = ("detector", "encoder", "task")

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def uninterrupted(tiny_words, tmp_path_factory) -> Path:
    """Run directory of the 8 steps in one go, with the checkpoints of steps 4 and 8."""
    path = tmp_path_factory.mktemp("whole") / "run"
    with cpu_with_one_thread():
        train(load_config(ROOT / "configs/tiny/refcoco.yaml", [*tiny_words, *SETTINGS, f"output={path}"]))
    return path


@pytest.fixture
def stopped(uninterrupted, tiny_config) -> RunConfig:
    """Settings of a run directory that looks as if the run had died after its checkpoint of step 4."""
    config = tiny_config(*SETTINGS)
    lose_newest(uninterrupted, Path(config.output))
    return config


def lose_newest(run: Path, copy: Path) -> None:
    """Copy a run without its newest checkpoint, as if it had died after the one before."""
    shutil.copytree(run, copy)
    shutil.rmtree(sorted((copy / "checkpoints").iterdir())[-1])
    (copy / "metrics.json").unlink()


def assert_same_run(one: str | Path, other: str | Path) -> None:
    assert read_log(Path(one) / "log.jsonl") == read_log(Path(other) / "log.jsonl")
    for part in TENSORS:
        first, second = (load_file(Path(run) / "model" / part / "model.safetensors") for run in (one, other))
        assert set(first) == set(second)
        assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
    first, second = (json.loads((Path(run) / "metrics.json").read_text()) for run in (one, other))
    assert [value for name, value in first.items() if "/" in name] == [
        value for name, value in second.items() if "/" in name
    ]


# What ends a run


def train_and_die(config: RunConfig, file: str) -> None:
    """Train until a file of a checkpoint of the last step is about to be complete; then die."""
    sync = atomic_writes._sync

    def die(path: Path) -> None:
        if path.name == file and "step_00000008" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    atomic_writes._sync = die
    train(config)


def test_a_run_that_is_killed_while_it_saves(uninterrupted, tiny_config):
    config = tiny_config(*SETTINGS)
    process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(config, "optimizer.bin"))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    run = Path(config.output)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(left) == 2 and left[1] == "step_00000004", "the other one is not complete"
    train(config, resume=True)
    assert [line["step"] for line in read_log(run / "log.jsonl")] == [3, 4, 6, 8, 8]
    assert_same_run(uninterrupted, run)
    assert not [path for path in run.rglob(".*") if path.name != ".lock"], "what was not complete is removed"


def test_signals_end_a_run_and_nothing_is_lost(uninterrupted, tiny_config, monkeypatch, request):
    """SIGTERM in a step, to all processes; then Ctrl-C in an evaluation, which is given up and made again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    config = tiny_config(*SETTINGS)
    step, evaluate = training.Trainer.train_step, evaluation.evaluate

    def terminated(self, micro_batches):
        if self.step == 1:
            for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
                os.kill(process, signal.SIGTERM)
        return step(self, micro_batches)

    def interrupted(*arguments, **named):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments, **named)

    monkeypatch.setattr(training.Trainer, "train_step", terminated)
    with pytest.raises(StoppedRunError, match=r"stopped by SIGTERM. --resume continues from step 2") as caught:
        train(config)
    assert caught.value.status == 143
    monkeypatch.setattr(training.Trainer, "train_step", step)
    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    with pytest.raises(StoppedRunError, match="stopped by SIGINT") as caught:
        train(config, resume=True)
    assert caught.value.status == 130
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    train(config, resume=True)
    assert_same_run(uninterrupted, config.output)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_loses_nothing_before(uninterrupted, stopped, monkeypatch):
    checkpoints, sync = Path(stopped.output) / "checkpoints", atomic_writes._sync

    def full(path):
        if path.name == "optimizer.bin":
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    monkeypatch.setattr(atomic_writes, "_sync", full)
    with pytest.raises(OSError, match=r"step_00000008 cannot be written: the disk or a quota is full"):
        train(stopped, resume=True)
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000004"]
    monkeypatch.setattr(atomic_writes, "_sync", sync)
    train(stopped, resume=True)
    assert_same_run(uninterrupted, stopped.output)


def test_the_official_optimiser_goes_on_exactly_and_ends_with_rate_zero(tiny_config, tmp_path):
    """In bf16; 3 steps an epoch, so the checkpoint lies at step 3."""
    official = ("optimizer=adamw_official", "schedule=triangle", "schedule_first=true", "warmup_steps=2", "max_steps=5")
    words = [f"train.{word}" for word in (*official, "mixed_precision=bf16", "trackers=[]", "save_every_epochs=1")]
    words += ["eval.boxes=[gt]", "eval.every_epochs=0"]
    train(tiny_config(*words, f"output={tmp_path / 'whole'}"))
    config = tiny_config(*words)
    lose_newest(tmp_path / "whole", Path(config.output))
    train(config, resume=True)
    assert_same_run(tmp_path / "whole", config.output)
    rates = [line["lr_encoder"] for line in read_log(Path(config.output) / "log.jsonl") if "lr_encoder" in line]
    assert rates == pytest.approx([config.train.lr * factor for factor in (0.5, 1, 2 / 3, 1 / 3, 0)])


# What a run resumes from


def test_a_damaged_checkpoint_is_passed_over(uninterrupted, stopped, caplog):
    """And written anew. A checkpoint without step.json was never complete."""
    run = Path(stopped.output)
    newest = run / "checkpoints" / "step_00000008"
    shutil.copytree(uninterrupted / "checkpoints" / newest.name, newest)
    shutil.copytree(newest, run / "checkpoints" / "step_00000009")
    (run / "checkpoints" / "step_00000009" / "step.json").unlink()
    path = newest / "state" / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    train(stopped, resume=True)
    [sentence] = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert "step_00000008 is damaged (state/optimizer.bin is not as it was written); the run goes on from " in sentence
    assert_same_run(uninterrupted, run)
    assert find_damage(newest) is None

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    metrics = train(stopped, resume=True)
    assert metrics == json.loads((run / "metrics.json").read_text())
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before, "a finished run stays as it is"


def test_only_damaged_checkpoints(stopped):
    for name in ("state/random_states_0.pkl", "step.json"):
        path = Path(stopped.output) / "checkpoints" / "step_00000004" / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=r"Cannot resume: .*step_00000004 is damaged \(.*\); copy another"):
            train(stopped, resume=True)


def test_a_missing_run_and_a_run_without_a_checkpoint(tiny_config):
    config = tiny_config("train.max_steps=1", "eval.boxes=[]", "train.trackers=[]")
    with pytest.raises(FileNotFoundError, match=r"run directory .* does not exist; start without --resume"):
        train(config, resume=True)
    Path(config.output).mkdir()
    assert train(config, resume=True)["steps"] == 1
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        train(config)


def test_other_settings_are_used_and_logged(stopped, caplog):
    other = replaced(stopped, train={"lr": 0.125, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0})
    with caplog.at_level(logging.WARNING):
        train(other, resume=True)
    [message] = [record.getMessage() for record in caplog.records if "Resuming" in record.getMessage()]
    assert "train.lr: 0.001 -> 0.125" in message
    last = [line for line in read_log(Path(stopped.output) / "log.jsonl") if line["kind"] == "train"][-1]
    assert last["lr_head"] == last["lr_encoder"] == 0.125


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("encoder.config.num_hidden_layers=3", "architecture differs .*num_hidden_layers: 2 -> 3"),
        ("detector.overrides.MODEL.RESNETS.NORM=GN", "architecture differs .*NORM: BN -> GN"),
        ("task.config.loss=softmax", "architecture differs .*task.loss: binary -> softmax"),
        ("detector.freeze=true", r"Cannot continue from .*parameter group"),
        ("train.images_per_batch=3", r"images_per_batch=3.* no whole number of batches"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint(stopped, tiny_config, change, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_config(*SETTINGS, change), resume=True)


def test_wordpieces_and_processes_that_do_not_fit_the_checkpoint(stopped, tmp_path):
    """The vocabulary has the same size, which no shape shows."""
    words = (Path(stopped.output) / "tokenizer" / "vocab.txt").read_text().split()
    words[-1], words[-2] = words[-2], words[-1]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(ValueError, match=r"its encoder knows the \d+ wordpieces in .*; set data.vocabulary="):
        train(replaced(stopped, data={"vocabulary": str(tmp_path / "vocab.txt")}), resume=True)
    position = Path(stopped.output) / "checkpoints" / "step_00000004" / "step.json"
    position.write_text(json.dumps({**json.loads(position.read_text()), "processes": 2}))
    sign(position.parent)
    with pytest.raises(ValueError, match=r"saved by 2 processes, and this run has 1; launch it with --num_processes 2"):
        train(stopped, resume=True)


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


def test_a_checkpoint_cannot_run_code(stopped, tmp_path):
    state, witness = Path(stopped.output) / "checkpoints" / "step_00000004" / "state", tmp_path / "ran"
    torch.save({"state": Payload(witness)}, state / "optimizer.bin")
    sign(state.parent)
    with pytest.raises(pickle.UnpicklingError):
        train(stopped, resume=True)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Payload(witness)))
    assert witness.exists(), "the payload should work where nothing stops it"


def test_only_the_newest_checkpoints_are_kept(tiny_config):
    own = "train.max_steps=4", "train.save_every_epochs=0.01", "train.keep_checkpoints=2", "eval.boxes=[]"
    config = tiny_config(*own, "train.trackers=[]")
    train(config)
    kept = sorted(path.name for path in (Path(config.output) / "checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000004"]


# The place of a run in its data, counted in images


GROUPS = [[number] for number in range(12)]


def sampler(images: int, accumulate: int = 1, groups=GROUPS, **options) -> GroupedBatchSampler:
    return GroupedBatchSampler(groups, images // accumulate, accumulate=accumulate, **options)


def seen(one: GroupedBatchSampler, first: int, last: int) -> list[int]:
    """Images of steps of several epochs."""
    per_epoch = one.batches_per_epoch // one.accumulate
    images = []
    for step in range(first, last):
        epoch, done = divmod(step, per_epoch)
        one.set_epoch(epoch, start_batch=done * one.accumulate)
        batches = iter(one)
        images += [request.group for _ in range(one.accumulate) for request in next(batches)]
    return images


@pytest.mark.parametrize(("images", "accumulate"), [(4, 1), (4, 2), (2, 1), (1, 1)])
def test_a_batch_of_another_size_goes_on_with_the_next_image(images, accumulate):
    """After 8 images of the second epoch no image is repeated and none left out."""
    before, after = sampler(4), sampler(images, accumulate)
    steps = steps_to(place_after(5, before), after)
    assert sorted(seen(before, 3, 5) + seen(after, steps, 2 * 12 // images)) == list(range(12))


def test_a_place_that_cannot_be_reached():
    one = sampler(5)  # an epoch is filled up to 15 images
    assert [steps_to(place_after(steps, one), one) for steps in range(9)] == list(range(9))
    place = place_after(5, sampler(4))
    with pytest.raises(ValueError, match=r"images_per_batch=3.* after 8 images of epoch 2.*a divisor of 8.* earlier 4"):
        steps_to(place, sampler(3))
    for other, name in (
        (sampler(4, seed=1), "seed differ"),
        (sampler(4, texts_per_image=1), "data.texts_per_image differ"),
        (sampler(4, groups=[*GROUPS, [12]]), "number of images differ"),
    ):
        with pytest.raises(ValueError, match=rf"inside of epoch 2, after 8 of its images.*\({name}\)"):
            steps_to(place, other)
        assert steps_to(place_after(6, sampler(4)), other) > 0, "between epochs everything goes on"
    assert steps_to(place_after(6, sampler(4)), sampler(3)) == 8


# The log


def test_the_log_drops_lines_that_will_be_computed_again(tmp_path):
    path = tmp_path / "log.jsonl"
    log = RunLog(path, enabled=True)
    for step in (1, 2, 3):
        log.write(step, "train", {"loss": step / 2})
    log.write(1, "eval", {"x": None})
    log.write(2, "eval", {"x": 1.0})  # it is made again
    with path.open("a") as file:
        file.write('{"step": 2, "kind": "tra')  # it was cut off
    RunLog(path, enabled=True, resume_step=2).write(3, "train", {"loss": 9.0})
    assert [(line["step"], line["kind"], line.get("loss")) for line in read_log(path)] == [
        (1, "train", 0.5),
        (2, "train", 1.0),
        (1, "eval", None),
        (3, "train", 9.0),
    ]
    RunLog(path, enabled=True)
    assert read_log(path) == []
