"""A model folder from elsewhere: loading reads it alone, and writes nothing. Checkpoints of a run: test_resume.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from e2e_vl.run.build import build_examples
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate
from e2e_vl.run.launch import make_accelerator

pytestmark = pytest.mark.usefixtures("on_cpu")


def change(path: Path, **settings: object) -> None:
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | settings))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_saved_model_is_the_model_in_memory(trained_run):
    config, model, tokenizer = load_model(trained_run.path)
    assert not model.training
    assert tokenizer.get_vocab() == trained_run.run.tokenizer.get_vocab()
    saved, kept = model.state_dict(), trained_run.model.state_dict()
    assert set(saved) == set(kept)
    assert all(torch.equal(value, kept[name]) for name, value in saved.items())
    assert model.detector.config == trained_run.model.detector.config
    examples = build_examples(config, model, tokenizer, "val", boxes="online")
    accelerator = make_accelerator("no")
    one, other = (evaluate(config, each, examples, accelerator) for each in (model, trained_run.model))
    assert one == other


def test_paths_in_the_settings_of_a_model_are_not_read(vqa_run, tmp_path):
    """And nothing is written where they lead."""
    shutil.copytree(vqa_run / "model", tmp_path / "shared")
    path = tmp_path / "shared" / "config.yaml"
    task = yaml.safe_load(path.read_text())["task"]
    (tmp_path / "outside.json").write_text("[]")  # reading it would be an error
    task["config"]["answers"] = str(tmp_path / "outside.json")
    change(path, task=task, output=str(tmp_path / "victim"))
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "answers.json").write_text("precious")
    before = files(tmp_path)
    assert load_model(tmp_path / "shared")[1].task.answers == load_model(vqa_run)[1].task.answers
    assert files(tmp_path) == before
    (tmp_path / "shared" / "task" / "answers.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"shared/task/answers.json: the model lacks its list of answers"):
        load_model(tmp_path / "shared")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_attention_heads", 0, "num_attention_heads"), ("intermediate_size", 65, r"encoder/model.safetensors")],
)
def test_sizes_that_are_not_those_of_the_weights(trained_run, tmp_path, field, value, message):
    shutil.copytree(trained_run.path / "model", tmp_path / "shared")
    path = tmp_path / "shared" / "config.yaml"
    encoder = yaml.safe_load(path.read_text())["encoder"]
    encoder["config"][field] = value
    change(path, encoder=encoder)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "shared")
