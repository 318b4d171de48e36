"""Saved models, and resumed runs: a run that was stopped and resumed is the run that was never stopped.

They are equal bit for bit, on one machine with one thread (see `cpu_with_one_thread` in tests/conftest.py). A tolerance
would say little: Adam turns the rounding of a gradient near zero into a whole step. For two processes see
test_launch.py.
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
from types import SimpleNamespace

import msgspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from detector import io as atomic_writes
from detector.errors import StoppedRunError, UserError
from detector.io import read_json, write_json
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.io import CHECKSUMS, find_checksum_mismatch, read_log, write_checksums
from e2e_vl.run import checkpoint
from e2e_vl.run import evaluate as evaluation
from e2e_vl.run import train as training
from e2e_vl.run.build import build_examples
from e2e_vl.run.checkpoint import load_model, translate_full_disk
from e2e_vl.run.ema import WeightAverage
from e2e_vl.run.evaluate import Evaluator
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.train import train
from tests.conftest import ENCODERS, cpu_with_one_thread
from tests.detector.test_io import LYING_DTYPES, scalar
from tests.run.runs import ROOT, assert_same_run, logged, lose_newest
from tests.weights.starts import replaced

# Dropout, sampled RoIs, flips, batch statistics and a worker: all that draws random numbers or keeps a state.
# 12 images in batches of 4, each in two micro-batches, are 3 steps an epoch, so the checkpoint of step 4 lies inside
# the second epoch, and inside a logging interval.
SETTINGS = (
    "data={texts_per_image: null, flip: 0.5, workers: 1}",
    "encoder.config.hidden_dropout_prob=0.1",
    "task.config={loss: binary, dropout: 0.1}",
    "detector.overrides.MODEL.RESNETS.NORM=BN",
    "train={max_steps: 8, save_every_epochs: 1.3333333, log_every: 3, trackers: [], gradient_accumulation_steps: 2}",
    "eval={every_epochs: 1.3333333, boxes: [gt], max_images: 3, report_pictures: 0}",
)

pytestmark = pytest.mark.usefixtures("on_cpu")


# Saved models


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_saved_model_is_the_model_in_memory(trained_run):
    config, model, tokenizer = load_model(trained_run.path)
    assert not model.training
    assert tokenizer.get_vocab() == trained_run.run.tokenizer.get_vocab()
    saved, kept = model.state_dict(), trained_run.model.state_dict()
    assert set(saved) == set(kept)
    assert all(torch.equal(value, kept[name]) for name, value in saved.items())
    for (name, value), (_, buffer) in zip(model.named_buffers(), trained_run.model.named_buffers(), strict=True):
        assert torch.equal(value, buffer), name
    assert model.detector.config == trained_run.model.detector.config
    examples = build_examples(config, model, tokenizer, "val", boxes="online")
    evaluator = Evaluator(config, make_accelerator("no"))
    one, other = (evaluator.predict_texts(each, examples) for each in (model, trained_run.model))
    assert one == other


def test_paths_in_the_settings_of_a_model_are_not_read(vqa_run, tmp_path):
    """And nothing is written where they lead."""
    shutil.copytree(vqa_run / "model", tmp_path / "shared")
    path = tmp_path / "shared" / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["task"]["config"]["answers"] = str(tmp_path / "outside.json")
    path.write_text(yaml.safe_dump(settings | {"output": str(tmp_path / "victim")}))
    (tmp_path / "outside.json").write_text("[]")  # reading it would be an error
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "answers.json").write_text("precious")
    before = files(tmp_path)
    shared, original = (load_model(path)[1].task.answer_vocabulary for path in (tmp_path / "shared", vqa_run))
    assert shared.answers == original.answers
    assert files(tmp_path) == before
    (tmp_path / "shared" / "task" / "answers.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"shared/task/answers\.json"):
        load_model(tmp_path / "shared")


# What ends a run


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


def train_and_die(config: RunConfig, file: str) -> None:
    """Resume until a file of a checkpoint of the last step is about to be complete; then die."""
    sync = atomic_writes.flush_to_disk

    def die(path: Path) -> None:
        if path.name == file and "step_00000008" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    atomic_writes.flush_to_disk = die
    train(config, resume=True)


def test_a_run_that_is_killed_while_it_saves(uninterrupted, stopped):
    process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(stopped, "optimizer.bin"))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    run = Path(stopped.output)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(left) == 2 and left[1] == "step_00000004", "the other one is not complete"
    train(stopped, resume=True)
    assert [line["step"] for line in read_log(run / "log.jsonl")] == [3, 4, 6, 8, 8]
    assert_same_run(uninterrupted, run)
    assert not [path for path in run.rglob(".*") if path.name != ".lock"], "what was not complete is removed"


def test_signals_end_a_run_and_nothing_is_lost(uninterrupted, tiny_config, monkeypatch, request):
    """SIGTERM in a step, to all processes; then in an evaluation without a checkpoint, and Ctrl-C in one with it.

    The evaluation is given up and made again.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    config = tiny_config(*SETTINGS)
    step, predict = training.Trainer.train_step, Evaluator.predict_texts
    add_grounded_phrases = evaluation.add_grounded_phrases

    def terminated(self, micro_batches):
        if self.step == 1:
            for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
                os.kill(process, signal.SIGTERM)
        return step(self, micro_batches)

    def terminated_evaluation(output):
        os.kill(os.getpid(), signal.SIGTERM)
        return add_grounded_phrases(output)

    def interrupted(*arguments, **named):
        os.kill(os.getpid(), signal.SIGINT)
        return predict(*arguments, **named)

    monkeypatch.setattr(training.Trainer, "train_step", terminated)
    with pytest.raises(StoppedRunError, match=r"stopped by SIGTERM. --resume continues from step 2") as caught:
        train(config)
    assert caught.value.status == 143
    monkeypatch.setattr(training.Trainer, "train_step", step)
    with monkeypatch.context() as patch, pytest.raises(StoppedRunError, match="continues from step 4"):
        patch.setattr(evaluation, "add_grounded_phrases", terminated_evaluation)
        train(replaced(config, train={"save_every_epochs": 0}), resume=True)
    assert not logged(config.output, "eval")
    monkeypatch.setattr(Evaluator, "predict_texts", interrupted)
    with pytest.raises(StoppedRunError, match="stopped by SIGINT") as caught:
        train(config, resume=True)
    assert caught.value.status == 130
    newest = max((Path(config.output) / "checkpoints").iterdir())
    assert newest.name == "step_00000004", "saved before the evaluation, which may fail"
    monkeypatch.setattr(Evaluator, "predict_texts", predict)
    train(config, resume=True)
    assert_same_run(uninterrupted, config.output)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_that_torch_hides_is_named(tmp_path, monkeypatch):
    def save(message: str = "basic_ios::clear: iostream error") -> None:
        with translate_full_disk(tmp_path):
            raise RuntimeError(message)

    with pytest.raises(RuntimeError):
        save()
    with pytest.raises(OSError, match="Disk quota exceeded"):
        save(f"Error while serializing: I/O error: Disk quota exceeded (os error {errno.EDQUOT})")
    with pytest.raises(OSError, match="a quota or a limit"):
        save("[enforce fail at inline_container.cc:672] . unexpected pos 1229632 vs 1229524")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="No space left") as caught:
        save()
    assert caught.value.filename == str(tmp_path)


ADAMW = (
    "optimizer: adamw_official, schedule: triangle, schedule_skips_zero: true, warmup_steps: 1, mixed_precision: bf16"
)
BERT_ADAM = (
    "optimizer: bert_adam, warmup_steps: 0, warmup_ratio: 0.5, max_grad_norm: null, max_grad_norm_per_tensor: 1.0, "
    "decay_norm_and_bias: false, decay_bn_scales: true"
)


@pytest.mark.parametrize(
    ("settings", "factors", "encoder"),
    [(ADAMW, [1, 2 / 3, 1 / 3, 0], "vl_bert"), (BERT_ADAM, [0, 0.5, 1, 0.5], "visual_bert")],
)
def test_the_official_optimisers_go_on_exactly(tiny_config, tmp_path, settings, factors, encoder):
    """3 steps an epoch, so the checkpoint lies at step 3 of 4."""
    words = "train={max_steps: 4, trackers: [], save_every_epochs: 1}", f"train={{{settings}}}", "eval.boxes=[]"
    config = tiny_config(*words)
    if ENCODERS[encoder] is not None:
        config = replaced(config, encoder=ENCODERS[encoder])
    whole = msgspec.structs.replace(config, output=str(tmp_path / "whole"))
    train(whole)
    lose_newest(tmp_path / "whole", Path(config.output))
    train(config, resume=True)
    assert_same_run(tmp_path / "whole", config.output)
    rates = [line["lr_encoder"] for line in logged(config.output)]
    assert rates == pytest.approx([config.train.lr * factor for factor in factors])


def test_counts_of_updates_move_to_the_device_of_a_fused_optimiser(tmp_path):
    """A GPU needs them there; checkpoints made without the fused optimiser have them on the CPU."""
    (tmp_path / "state").mkdir()
    write_json(tmp_path / checkpoint.POSITION_FILE, {})
    parameter = torch.zeros(2, device="meta", requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.state[parameter] = {"step": torch.tensor(3.0)}
    (tmp_path / checkpoint.RAW_WEIGHTS_FILE).touch()
    checkpoint.load_state(SimpleNamespace(load_state=lambda folder: None), None, optimizer, tmp_path)
    assert optimizer.state[parameter]["step"].device == parameter.device


def test_a_checkpoint_replaces_older_and_later_ones(tmp_path, monkeypatch):
    """Later ones were passed over as damaged; if they stayed, the newest good one would be removed."""
    monkeypatch.setattr(checkpoint, "save_model", lambda *_: None)
    for step in (2, 3, 8):
        write_json(tmp_path / "checkpoints" / f"step_{step}" / checkpoint.POSITION_FILE, {"step": step})
    folder, model = tmp_path / "checkpoints" / "step_4", torch.nn.Linear(1, 1)
    average = WeightAverage(model, None)
    checkpoint.save_state(
        make_accelerator("no"), folder, None, model, None, average=average, position={"step": 4}, keep=2
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", "step_4"]


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
    assert "step_00000008" in sentence and "state/optimizer.bin" in sentence
    assert_same_run(uninterrupted, run)
    assert find_checksum_mismatch(newest) is None

    before = files(run)
    assert train(stopped, resume=True) == json.loads((run / "metrics.json").read_text())
    assert files(run) == before, "a finished run stays as it is"


def test_only_damaged_checkpoints(stopped):
    path = Path(stopped.output) / "checkpoints" / "step_00000004" / "step.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"step_00000004 is damaged"):
        train(stopped, resume=True)
    path.unlink()
    with pytest.raises(ValueError, match=r"step_00000004 is damaged \(step.json is missing\)"):
        train(stopped, resume=True)
    with pytest.raises(ValueError, match="contains a run; continue with --resume"):
        train(stopped)
    shutil.rmtree(path.parent)
    write_json(Path(stopped.output) / "metrics.json", {})
    with pytest.raises(ValueError, match="no checkpoint"):
        train(stopped, resume=True)


def test_training_data_that_changed_are_not_resumed_with(stopped, tmp_path):
    """The same data in another folder are, and a checkpoint that says nothing of its data is resumed as it is."""
    root = tmp_path / "data"
    shutil.copytree(stopped.data.root, root)
    refs, instances = root / stopped.data.files["refs"], root / stopped.data.files["instances"]
    config = replaced(stopped, data={"root": str(root)}, train={"max_steps": 5})
    original = instances.read_text()
    content = json.loads(original)
    content["annotations"][0]["bbox"][0] += 0.5
    write_json(instances, content)
    with pytest.raises(ValueError, match=r"records of the training split .* changed"):
        train(config, resume=True)
    instances.write_text(original)
    assert train(config, resume=True)["steps"] == 5
    refs.write_bytes(pickle.dumps(pickle.loads(refs.read_bytes())[::-1]))
    config = replaced(config, train={"max_steps": 6})
    with pytest.raises(ValueError, match=r"records of the training split .* changed"):
        train(config, resume=True)
    position = Path(stopped.output) / "checkpoints" / "step_00000005" / "step.json"
    values = read_json(position)
    values["order"] = {name: value for name, value in values["order"].items() if "records" not in name}
    write_json(position, values)
    sign(position.parent)
    assert train(config, resume=True)["steps"] == 6


def test_which_folders_a_run_may_use(tiny_config):
    config = tiny_config("train.max_steps=1", "eval.boxes=[]", "train.trackers=[]")
    run = Path(config.output)
    with pytest.raises(FileNotFoundError, match=r"run directory .* does not exist"):
        train(config, resume=True)
    run.mkdir()
    (run / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="contains other files, but no run"):
        train(config)
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]
    (run / "thesis.tex").unlink()
    assert train(config, resume=True)["steps"] == 1, "a run without a checkpoint begins again"
    with pytest.raises(ValueError, match="contains a run; continue with --resume"):
        train(config)


def test_a_checkpoint_has_the_weights_once(uninterrupted):
    """Twice the weights are AdamW's moments; the rest is the tokenizer, settings and headers of files."""
    folder = uninterrupted / "checkpoints" / "step_00000008"
    weights = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    everything = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert weights < everything < 3.2 * weights
    assert not (folder / checkpoint.RAW_WEIGHTS_FILE).exists()


def test_a_checkpoint_of_before_is_resumed(uninterrupted, stopped):
    """It has all weights in the state too, under the names that Accelerate gave them; those are the ones to read."""
    folder = Path(stopped.output) / "checkpoints" / "step_00000004"
    raw_weights = {}
    for part in ("detector", "encoder", "task"):
        path = folder / "model" / part / "model.safetensors"
        weights = load_file(path)
        save_file({name: torch.zeros_like(value) for name, value in weights.items()}, path)
        raw_weights |= {f"model.{part}.{name}": value for name, value in weights.items()}
    save_file(raw_weights, folder / checkpoint.RAW_WEIGHTS_FILE)
    sign(folder)
    train(stopped, resume=True)
    assert_same_run(uninterrupted, stopped.output)


def test_other_settings_are_used_and_logged(stopped, caplog):
    """And of the checkpoints only the newest are kept."""
    other = {"lr": 0.125, "warmup_steps": 0, "schedule": "constant", "max_steps": 5, "save_total_limit": 1}
    with caplog.at_level(logging.WARNING):
        train(replaced(stopped, train=other), resume=True)
    assert "train.lr: 0.001 -> 0.125" in caplog.text
    last = logged(stopped.output)[-1]
    assert last["lr_head"] == last["lr_encoder"] == 0.125
    assert [path.name for path in (Path(stopped.output) / "checkpoints").iterdir()] == ["step_00000005"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("detector.overrides.MODEL.RESNETS.NORM=GN", "NORM: BN -> GN"),
        ("detector.freeze=true", "parameter group"),
        ("train.images_per_batch=6", "train.images_per_batch changed"),
        ("seed=2", "seed changed"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint(stopped, tiny_config, change, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_config(*SETTINGS, change), resume=True)


def test_wordpieces_that_do_not_fit_the_checkpoint_are_refused(stopped, tmp_path):
    """The vocabulary has the same size, which no shape shows."""
    words = (Path(stopped.output) / "tokenizer" / "vocab.txt").read_text().split()
    words[-1], words[-2] = words[-2], words[-1]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(ValueError, match=r"set data.vocabulary="):
        train(replaced(stopped, data={"vocabulary": str(tmp_path / "vocab.txt")}), resume=True)


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
    torch.save({"numpy_random_seed": scalar(LYING_DTYPES["record of objects"])}, state / "random_states_0.pkl")
    sign(state.parent)
    with pytest.raises(UserError, match=r"random_states_0\.pkl: .*dtype 'V8' is not allowed"):
        train(stopped, resume=True)
    pickle.loads(pickle.dumps(Payload(witness)))
    assert witness.exists(), "the payload should work where nothing stops it"
