"""A model folder from outside: loading reads it alone, and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from detector.errors import UserError
from e2e_vl.extraction.regions import detector_of_run
from e2e_vl.run import checkpoint as saving
from e2e_vl.run.checkpoint import load_model, saved_settings

pytestmark = pytest.mark.usefixtures("on_cpu")


def change(path: Path, **settings: object) -> None:
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | settings))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_without_its_answers_is_refused_and_writes_nothing(vqa_run, tmp_path):
    shutil.copytree(vqa_run / "model", tmp_path / "shared")
    (tmp_path / "shared" / "task" / "answers.json").unlink()
    change(tmp_path / "shared" / "config.yaml", output=str(tmp_path / "victim"))
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "answers.json").write_text("precious")
    before = files(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"shared/task/answers.json: the model lacks its list of answers"):
        load_model(tmp_path / "shared")
    assert files(tmp_path) == before


def test_paths_in_the_settings_of_a_model_are_not_read(vqa_run, tmp_path):
    shutil.copytree(vqa_run / "model", tmp_path / "shared")
    path = tmp_path / "shared" / "config.yaml"
    task = yaml.safe_load(path.read_text())["task"]
    (tmp_path / "outside.json").write_text("[]")  # reading it would be an error
    task["config"]["answers"] = str(tmp_path / "outside.json")
    change(path, task=task)
    assert load_model(tmp_path / "shared")[1].task.answers == load_model(vqa_run)[1].task.answers


@pytest.mark.parametrize("file", ["config.yaml", "detector/config.yaml"])
def test_settings_that_name_other_files_are_refused(trained_run, tmp_path, file):
    shutil.copytree(trained_run.path / "model", tmp_path / "shared")
    key = "base" if file == "config.yaml" else "_BASE_"
    change(tmp_path / "shared" / file, **{key: str(trained_run.path / "model" / file)})
    for load in (load_model, detector_of_run):
        with pytest.raises(ValueError, match=f"{file}: has '{key}:', but the settings of a saved model"):
            load(tmp_path / "shared")


def test_environment_variables_are_not_resolved(trained_run, tmp_path):
    shutil.copytree(trained_run.path / "model", tmp_path / "shared")
    change(tmp_path / "shared" / "config.yaml", output="${oc.env:HOME}")
    with pytest.raises(ValueError, match=r"has '\$\{oc.env:HOME\}'"):
        load_model(tmp_path / "shared")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("task", None, {"a": 1}),
        ("task", None, 5),
        ("task", "name", None),
        ("task", "name", "nope"),
        ("task", "config", -1),
        ("task", "config", [1]),
        ("data", None, [1]),
        ("data", None, 10**19),
        ("data", "config", "x"),
        ("data", "resize", [[]]),
        ("data", "resize", {"rounding": []}),
    ],
)
def test_damaged_settings_of_an_earlier_version_are_one_sentence(trained_run, tmp_path, section, key, value):
    shutil.copytree(trained_run.path / "model", tmp_path / "shared")
    path = tmp_path / "shared" / "config.yaml"
    content = yaml.safe_load(path.read_text())
    content = {name: value for name, value in content.items() if name not in ("version", "revision")}
    content[section] = value if key is None else content[section] | {key: value}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=str(path)) as told:
        saved_settings(tmp_path / "shared")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 100_000, "num_hidden_layers is 100000; it must be a whole number from 0 to 500"),
        ("num_attention_heads", 0, "num_attention_heads is 0; it must be a whole number from 1"),
        ("hidden_size", -4, "hidden_size is -4; it must be a whole number from 1"),
        (
            "intermediate_size",
            1 << 16,
            r"its settings ask for \d{7} parameters, and its weights have \d+ bytes",
        ),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_memory_is_taken(trained_run, tmp_path, field, value, message):
    shutil.copytree(trained_run.path / "model", tmp_path / "shared")
    path = tmp_path / "shared" / "config.yaml"
    encoder = yaml.safe_load(path.read_text())["encoder"]
    encoder["config"][field] = value
    change(path, encoder=encoder)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "shared")


def test_looking_at_the_sizes_leaves_random_states_alone(trained_run):
    config, _, tokenizer = load_model(trained_run.path)
    state = torch.get_rng_state()
    saving._check_size(config, tokenizer, trained_run.path / "model")
    assert torch.equal(torch.get_rng_state(), state)
