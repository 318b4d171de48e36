"""Runs of version 1 of the settings (before objectives and samples) are evaluated and asked, but not resumed.

A run of today is written back by hand: its settings without `version`, its parameters under the names of that time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from e2e_vl.cli import evaluate as evaluation_tool
from e2e_vl.cli import predict as prediction_tool
from e2e_vl.cli import train as training_tool
from e2e_vl.config import load_config, saved_version
from e2e_vl.parts import TASKS
from e2e_vl.run.checkpoint import load_model, saved_settings
from tests.cli.calls import ask, first_image, saved, told
from tests.same import assert_same

ROOT = Path(__file__).parents[2]
NEW_KEYS = ("mirror_precomputed", "mean_image_feature", "skip_broken")  # of `data`, in version 2
FORMER_NAMES = {  # of pre-training's parameters: today -> then
    "word_head.": "mlm.",
    "masked_regions.": "region_classifier.",
    "relationship.head.": "relationship.",
}

pytestmark = pytest.mark.usefixtures("on_cpu")


def earlier_vqa(task: dict, data: dict) -> None:
    data["config"] |= {"mirror_precomputed": False, "mean_image_feature": True}


def earlier_vcr(task: dict, data: dict) -> None:
    data["config"] |= {"mask_size": task.pop("mask_size"), "people_names": ["kim", "lee"], "turn_names": False}


def earlier_pretraining(task: dict, data: dict) -> None:
    objectives = task.pop("objectives")
    task |= {"region_classes": objectives["masked_regions"]["classes"], "relationship": 1.0}
    corpus = objectives["masked_text"]
    lengths = {"corpus_words": corpus["min_words"], "corpus_length": corpus["max_length"]}
    data["config"] |= {**lengths, "relationship": 0.5, "word_probability": 0.15, "skip_broken": True}


EARLIER: dict[str, Callable[[dict, dict], None]] = {
    "refcoco": lambda task, data: None,
    "vqa": earlier_vqa,
    "vcr": earlier_vcr,
    "pretraining": earlier_pretraining,
}


@pytest.fixture
def run_of(request) -> Callable[[str], Path]:
    """The tiny run of a task."""

    def find(task: str) -> Path:
        names = {"refcoco": "trained_run", "vqa": "vqa_run", "vcr": "vcr_runs", "pretraining": "pretraining_run"}
        found = request.getfixturevalue(names[task])
        return {"refcoco": lambda: found.path, "vcr": lambda: found[0]}.get(task, lambda: found)()

    return find


def written_back(run: Path, copy: Path) -> Path:
    """A copy of a run as version 1 wrote it."""
    shutil.copytree(run, copy)
    for folder in (copy / "model", *copy.glob("checkpoints/*/model")):
        write_back(folder)
    for path in copy.glob("checkpoints/*/checksums.json"):
        path.unlink()
        position = json.loads((path.parent / "step.json").read_text())
        (path.parent / "step.json").write_text(json.dumps({k: v for k, v in position.items() if k != "checksums"}))
    (copy / "config.yaml").write_bytes((copy / "model" / "config.yaml").read_bytes())
    return copy


def write_back(folder: Path) -> None:
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings.pop("version") == 2
    for key in NEW_KEYS:
        del settings["data"][key]
    resize = settings["data"]["resize"]
    resize["rounding"] = {"truncate": "vl_bert"}.get(resize["rounding"], resize["rounding"])
    EARLIER[settings["task"]["name"]](settings["task"]["config"], settings["data"])
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    path = folder / "task" / "model.safetensors"
    tensors = {}
    for name, value in load_file(path).items():
        new = next((new for new in FORMER_NAMES if name.startswith(new)), "")
        is_other = settings["task"]["name"] != "pretraining"
        tensors[name if is_other else FORMER_NAMES.get(new, "") + name.removeprefix(new)] = value
    if (folder / "teacher").is_dir():
        tensors |= {f"teacher.{name}": value for name, value in load_file(folder / "teacher/model.safetensors").items()}
        shutil.rmtree(folder / "teacher")
    save_file(tensors, path)


@pytest.mark.parametrize("task", EARLIER)
def test_an_earlier_run_is_evaluated(run_of, task, tmp_path, capsys):
    run = run_of(task)
    earlier = written_back(run, tmp_path / "earlier")
    assert saved_version(earlier / "model" / "config.yaml") == 1
    words = ["--run", str(earlier), "--split", "val", "--boxes", "gt", "--output", str(tmp_path / "val.json")]
    names = []
    if task == "vcr":  # with other names of people every question would be another text
        settings = saved_settings(earlier)
        assert settings.task.config["people_names"] == ["kim", "lee"] and settings.task.config["turn_names"] is False
        names = [f"task.config.people_names=[{', '.join(TASKS['vcr'][0]().people_names)}]"]
    capsys.readouterr()  # what a training printed
    assert evaluation_tool.main([*words, *names]) == 0
    assert_same(json.loads((tmp_path / "val.json").read_text()), saved(run))
    metrics = json.loads((run / "metrics.json").read_text())
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    assert printed
    for name, value in printed.items():
        assert float(value) == pytest.approx(metrics[name.strip()], abs=1e-4), name


@pytest.mark.parametrize("task", ["refcoco", "vqa", "pretraining"])
def test_an_earlier_run_is_asked(run_of, task, tmp_path):
    run = run_of(task)
    earlier = written_back(run, tmp_path / "earlier")
    more = ("--hide", "5,6,40,50") if task == "pretraining" else ()
    answers = []
    for number, one in enumerate((run, earlier)):
        words = ask(one, first_image(run), "a [MASK] circle", *more, "--output", tmp_path / str(number))
        assert prediction_tool.main(words) == 0
        answers.append(told(tmp_path / str(number)))
    assert_same(*answers)


def test_an_earlier_run_is_not_resumed(trained_run, tiny_words, tmp_path, capsys):
    earlier = written_back(trained_run.path, tmp_path / "earlier")
    (earlier / "metrics.json").unlink()
    for config in (ROOT / "configs" / "tiny" / "refcoco.yaml", earlier / "config.yaml"):
        words = ["--config", str(config), "--resume", *tiny_words, f"output={earlier}"]
        assert training_tool.main(words) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(f"error: Cannot resume from {earlier}/checkpoints/step_00000008: it was saved by an")
        assert f"encoder.weights={earlier}" in message
    path = earlier / "checkpoints" / "step_00000008" / "model"
    assert load_model(path)[1].task.config == trained_run.model.task.config  # but it is read


def test_a_later_version_is_refused(trained_run, tmp_path):
    shutil.copytree(trained_run.path / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.yaml"
    path.write_text(path.read_text().replace("version: 2", "version: 3"))
    with pytest.raises(ValueError, match=r"version is 3; this code reads settings of version 2"):
        load_model(tmp_path)


def test_every_former_setting_has_its_place():
    """Settings that the tiny runs leave at their defaults."""
    former: dict[str, Any] = {
        "masked_words": 0.5,
        "masked_text": 0.0,
        "masked_regions": 2.0,
        "relationship": 0.25,
        "region_classes": 9,
        "region_labels": "class",
        "max_length": 40,
    }
    options = {"source": "vl_bert", "word_probability": 0.3, "always_mask": True, "relationship": 0.4}
    corpus = {"corpus_words": 7, "corpus_length": 8, "corpus_special_tokens": True}
    data = {"config": {**options, **corpus, "skip_broken": True}}
    TASKS["pretraining"][1].upgrade(former, data)
    masking = {"probability": 0.3, "always_mask": True}
    assert former == {
        "max_length": 40,
        "objectives": {
            "masked_words": {"weight": 0.5, **masking},
            "masked_text": {"weight": 0.0, **masking, "min_words": 7, "max_length": 8, "special_tokens": True},
            "masked_regions": {"weight": 2.0, "classes": 9, "labels": "class"},
            "relationship": {"weight": 0.25, "probability": 0.4},
        },
    }
    assert data == {"config": {"source": "json_lines"}, "skip_broken": True}
    pronounced = {"join_word": None, "ground_words": False, "max_pieces": 9, "blank_question": True}
    task, data = {"loss": "softmax"}, {"config": {"question": "rationale", **pronounced}}
    TASKS["vcr"][1].upgrade(task, data)
    assert task == {"loss": "softmax", **pronounced} and data == {"config": {"question": "rationale"}}
    task, data = {}, {}
    TASKS["vqa"][1].upgrade(task, data)
    assert data == {"config": {}, "mirror_precomputed": False, "mean_image_feature": True}  # its default was True


def test_settings_of_today_are_not_upgraded(pretraining_run):
    path = pretraining_run / "model" / "config.yaml"
    assert saved_version(path) == 2 and saved_settings(pretraining_run) == load_config(path)
