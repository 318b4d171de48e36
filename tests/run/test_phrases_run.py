"""Phrases beside a task, from files to an answer: trained, resumed, evaluated, reported, asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import e2e_vl
from e2e_vl.config import load_config, save_config
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.io import CHECKSUMS, read_log, write_checksums
from e2e_vl.run.build import build_model, build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.trackers import start_text
from e2e_vl.run.train import train
from tests.same import assert_same
from tests.weights.starts import replaced

FILES = "refcoco+_phrases/Sentences", "refcoco+_phrases/Annotations"
PHRASES = (
    "phrases={weight: 1.0, layer: 1, size: 8}",
    f"data.files.phrases={FILES[0]}",
    f"data.files.phrase_boxes={FILES[1]}",
    "encoder.config.relative_geometry=true",
)
SHORT = ("train.max_steps=2", "train.save_every_epochs=0.01", "eval.every_epochs=0", "eval.boxes=[gt]")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_run_with_phrases(tiny_config):
    config = tiny_config(*PHRASES, *SHORT)
    metrics = train(config)
    run = Path(config.output)
    log = read_log(run / "log.jsonl")
    assert all(line[name] > 0 for line in log if line["kind"] == "train" for name in ("phrases", "phrase_tags"))
    assert 0 <= metrics["val/phrase_accuracy_gt_boxes"] <= 1
    states = [load_model(run / "checkpoints" / f"step_{step:08}" / "model")[1].state_dict() for step in (1, 2)]
    moved = {name for name, value in states[1].items() if not torch.equal(value, states[0][name])}
    assert {"phrase_head.query.weight", "phrase_head.tags.weight"} <= moved
    assert any(name.startswith("encoder.relative_geometry.output") for name in moved)

    shutil.rmtree(run / "checkpoints" / "step_00000002")
    (run / "metrics.json").unlink()
    forget_flag(run / "checkpoints" / "step_00000001")  # as it was saved before there was one
    train(config, resume=True)
    again = load_model(run)[1].state_dict()
    assert all(torch.equal(value, again[name]) for name, value in states[1].items())
    evaluated, path = evaluate_run(run, split="val", boxes="gt")
    assert_same(evaluated, {name: metrics[name] for name in evaluated})
    records = json.loads(path.read_text(encoding="utf-8"))
    related = [record for record in records if record.get("family") == "relation"]
    assert related and all(len(record["grounded"]) == 2 for record in related)
    assert {type(phrase["correct"]) for record in records for phrase in record["grounded"]} == {bool}
    assert "phrases: " in (run / "report.html").read_text(encoding="utf-8")

    starts_from_another_run(tiny_config, run, metrics["parameters"]["phrases"])
    with pytest.raises(ValueError, match=r"architecture differs .*phrases.size: 8 -> 9"):
        train(replaced(config, phrases={"size": 9}), resume=True)

    assert states[1]["phrase_head.finds_phrases"] == 1
    model = e2e_vl.load(run)
    with torch.no_grad():  # every word is a phrase of its own
        model.network.phrase_head.tags.weight.zero_()
        model.network.phrase_head.tags.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    answer = model.ask(records[0]["file_name"], "the red star")
    assert [phrase.text for phrase in answer.phrases] == ["the", "red", "star"]
    assert all(answer.text[slice(*phrase.characters)] == phrase.text for phrase in answer.phrases)
    assert all(phrase.box is None or 0 < phrase.score <= 1 for phrase in answer.phrases)
    answer.draw()


def forget_flag(checkpoint: Path) -> None:
    """Take `finds_phrases` out of both files of a checkpoint that hold it."""
    count = 0
    for path in checkpoint.rglob("model.safetensors"):
        tensors = load_file(path)
        kept = {name: value for name, value in tensors.items() if not name.endswith("finds_phrases")}
        count += len(tensors) - len(kept)
        save_file(kept, path)
    assert count == 2
    (checkpoint / CHECKSUMS).unlink()
    write_checksums(checkpoint)


def test_processes_that_saw_no_whole_text_learn_of_it_from_the_others(tiny_config, monkeypatch):
    """The head must remember what any process saw. Here another one, imitated by larger sums, saw two words."""
    reduce = Accelerator.reduce

    def with_another(self, tensor, *args, **kwargs):
        return reduce(self, tensor, *args, **kwargs) + torch.tensor([0.5, 2.0])

    monkeypatch.setattr(Accelerator, "reduce", with_another)
    without_files = (PHRASES[0], "train.max_steps=1", "eval.every_epochs=0", "eval.boxes=[gt]", "data.boxes.train=gt")
    config = tiny_config(*without_files)  # each expression is one phrase, and is not said to have no others
    train(config)
    saved = load_file(Path(config.output) / "model" / "phrases" / "model.safetensors")
    assert saved["finds_phrases"] == 1


def starts_from_another_run(tiny_config, run: Path, count: int) -> None:
    """The head of a run as the start of another one, and what does not fit."""
    words = f"data.vocabulary={run / 'model' / 'tokenizer'}", "output=unused"
    built = build_run(tiny_config(*PHRASES, *words, f"phrases.weights={run}"))
    saved = load_file(run / "model" / "phrases" / "model.safetensors")
    own = built.model.phrase_head.state_dict()
    assert own.keys() == saved.keys() and all(torch.equal(value, saved[name]) for name, value in own.items())
    [start] = built.starts
    assert start.part == "phrases" and start.report.is_complete and len(start.report.matched) == len(saved)
    text = start_text(tiny_config(*PHRASES, *words), built, make_accelerator("no"), 0, 1)
    assert f"phrases     {count:,} parameters, {len(saved)} tensors from {run} (this project names)" in text
    for change, sentence in (
        ("phrases.layer=2", r"reads the states after 1 layers, and phrases.layer is 2; set phrases.layer=1"),
        ("phrases.size=9", "does not fit the model's config"),
        (f"phrases.weights={run / 'model' / 'tokenizer'}", "holds no phrase head's weights"),
        (f"phrases.weights={run / 'model' / 'task'}", "does not fit the model's config"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            build_model(tiny_config(*PHRASES, f"phrases.weights={run}", change), vocab_size=50)
    with pytest.raises(ValueError, match=r"phrases.weights is set, but phrases.weight is 0"):
        tiny_config(f"phrases.weights={run}")
    started = replaced(load_config(run / "model" / "config.yaml"), phrases={"weights": str(run)})
    save_config(started, run / "model" / "config.yaml")
    assert load_model(run)[1].phrase_head is not None
    assert load_model(run, overrides=["phrases.weight=0"])[1].phrase_head is None
    with pytest.raises(ValueError, match=r"phrases.weights=here: a trained model brings its own"):
        load_model(run, overrides=["phrases.weights=here"])


def test_data_that_state_no_phrases_are_refused(tiny_config, monkeypatch):
    monkeypatch.setattr(RefCOCODataset, "has_phrases", False)
    with pytest.raises(ValueError, match=r"phrases.weight is 1.0, but no text of refcoco says what its phrases name"):
        build_run(tiny_config("phrases={weight: 1, layer: 1}", "data.boxes.train=gt"))


def test_a_run_without_phrases_has_no_such_head(tiny_config):
    model = build_model(tiny_config(), vocab_size=50)
    assert model.phrase_head is None and "phrases" not in [name for name, _ in model.named_children()]


def test_a_layer_that_the_encoder_lacks_is_refused(tiny_config):
    with pytest.raises(ValueError, match=r"phrases.layer is 3, but the encoder has 2 layers"):
        build_model(tiny_config("phrases={weight: 1, layer: 3}"), vocab_size=50)
    with pytest.raises(ValueError, match=r"phrases.weight needs an encoder with states between its layers"):
        build_model(replaced(tiny_config("phrases.weight=1"), encoder={"name": "none", "config": {}}), vocab_size=50)
    with pytest.raises(ValueError, match=r"phrases.size is 0"):
        load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", ["phrases.size=0"])
