"""The runs of the plateau, their curves, the tables, and real runs of two steps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest
from matplotlib.image import imread

import compare
import end_to_end
import plateau as tool
from detector.io import read_yaml
from e2e_vl.cli.run import train
from e2e_vl.config_files import load_config
from e2e_vl.registry import decode
from tests.conftest import ROOT, TINY_DETECTOR, cpu_with_one_thread

PLATEAU = decode(read_yaml(tool.PLATEAU), tool.Plateau, "plateau")
EXPERIMENT = tool.add_runs(decode(read_yaml(end_to_end.EXPERIMENT), end_to_end.Experiment, "experiment"), PLATEAU)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def load_runs(folder, *, seeds, overrides=()):
    """Return the cells, and the config of each of their runs by its name."""
    cells = end_to_end.plan(EXPERIMENT, [PLATEAU.setting], [PLATEAU.task], [PLATEAU.encoder], seeds)
    jobs, _ = end_to_end.make_jobs(EXPERIMENT, cells, folder, end_to_end.CONFIGS, overrides, [])
    jobs |= tool.add_overrides(PLATEAU, cells, jobs, overrides)
    configs = {}
    for cell in cells:
        configs[cell.name] = load_config(jobs[cell.name].config, jobs[cell.name].all_overrides)
    return cells, configs


def test_runs_are_those_of_the_setting_with_evaluations_between(tmp_path):
    cells, configs = load_runs(tmp_path, seeds=[0, 1])
    assert len(configs) == 6
    for cell in cells:
        config = configs[cell.name]
        steps_per_epoch = 1500 // config.train.images_per_batch + 1
        assert round(config.eval.every_epochs * steps_per_epoch) == 100
        assert (config.data.eval_splits, config.eval.boxes) == (["val"], ["gt"])
        assert config.detector.freeze == (cell.variant == "frozen")
        is_probed = cell.seed == 0 and cell.variant != "trained_long_path"
        assert (config.train.save_total_limit == 100) == is_probed
        assert (round(config.train.save_every_epochs * steps_per_epoch) == 200) == is_probed
        assert config.train.max_steps == (2400 if cell.variant == "trained_long_path" else 1800)
    recipe = configs["classes_only_refcoco_vl_bert_trained_1"]
    assert (recipe.train.detector_lr, recipe.train.head_lr, recipe.phrases.weight) == (2e-3, 5e-3, 3.0)


def test_without_the_short_path_a_run_has_the_settings_of_the_pairs(tmp_path):
    _, configs = load_runs(tmp_path, seeds=[0])
    run = configs["classes_only_refcoco_vl_bert_trained_long_path_0"]
    pair = load_config(ROOT / "configs" / "pairs" / "refcoco.yaml")
    assert run.phrases == pair.phrases
    changes = {"max_steps": 2400, "detector_lr": 1e-3}
    assert run.train == msgspec.structs.replace(pair.train, **changes)


def test_settings_of_the_command_line_come_last(tmp_path):
    _, configs = load_runs(tmp_path, seeds=[0], overrides=["train.max_steps=5", "train.save_total_limit=3"])
    assert {config.train.max_steps for config in configs.values()} == {5}
    assert {config.train.save_total_limit for config in configs.values()} == {3}


def test_a_step_has_the_mean_of_all_seeds():
    curve = tool.average_steps({0: {100: 0.5, 200: 0.6}, 1: {100: 0.7, 200: 0.8, 300: 0.9}})
    assert curve["seeds"] == [0, 1]
    assert list(curve["steps"]) == [100, 200], "at step 300 a seed is missing"
    assert curve["steps"][200]["values"] == [0.6, 0.8]
    assert curve["steps"][200]["mean"] == pytest.approx(0.7)
    assert curve["steps"][200]["std"] == pytest.approx(0.02**0.5)


def test_tables_have_a_row_per_step():
    accuracy = {
        "frozen": tool.average_steps({0: {100: 0.5}, 1: {100: 0.7}}),
        "trained": tool.average_steps({0: {100: 0.4, 200: 0.9}, 1: {100: 0.4, 200: 0.9}}),
    }
    probed = {"colour": {"chance": 0.15, "runs": {"trained": {0: 0.21, 200: 0.67}, "frozen": {0: 0.21, 200: 0.21}}}}
    results = {"metric": "accuracy", "accuracy": accuracy, "probes": {"images": 198, "labels": probed}}
    lines = tool.as_markdown(results)
    assert "| 100 | 0.600 ± 0.141 | 0.400 ± 0.000 |" in lines
    assert "| 200 | – | 0.900 ± 0.000 |" in lines
    assert "| | colour, trained | colour, frozen |" in lines
    assert "| chance | 0.15 | 0.15 |" in lines
    assert "| 200 | 0.67 | 0.21 |" in lines


def test_real_runs_are_probed_over_their_steps(tmp_path, monkeypatch, capsys):
    """In this process, whose imports are done; tests of compare.py start processes."""
    calls = []

    def run(command, **_):
        calls.append(command)
        with cpu_with_one_thread():
            return SimpleNamespace(returncode=train(command[command.index("--config") :]))

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    folder = tmp_path / "runs"
    words = ["--output", str(folder), "--configs", str(ROOT / "configs" / "tiny"), "--seeds", "0"]
    words += ["--figure", str(tmp_path / "figures" / "steps.png"), "--set", TINY_DETECTOR, "train.max_steps=2"]
    words += ["data.synthetic.scenes={train: 8, val: 4, testA: 3}", "data.synthetic.formats=[refcoco+,detections]"]
    words += ["data.boxes.train=gt", "eval.every_epochs=0.01", "train.save_every_epochs=0.01", "data.workers=0"]
    with cpu_with_one_thread():
        assert tool.main(words) == 0
    assert len(calls) == 3
    results = json.loads((folder / "plateau.json").read_text())
    assert results["metric"] == "accuracy, val, annotated boxes"
    for title in ("detector frozen", "trained", "trained, without the short path"):
        assert list(results["accuracy"][title]["steps"]) == ["1", "2"]
    assert list(results["probes"]["labels"]) == ["colour", "texture", "size", "class"]
    for entry in results["probes"]["labels"].values():
        assert 0 <= entry["chance"] <= 1
        frozen = list(entry["runs"]["detector frozen"].values())
        assert len(frozen) == len(entry["runs"]["trained"]) == 3, "steps 0, 1 and 2"
        assert len(set(frozen)) == 1
    assert imread(tmp_path / "figures" / "steps.png").std() > 0.05
    assert "## linear probe, by step" in (folder / "plateau.md").read_text()
    capsys.readouterr()
    assert tool.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.strip() == "3 of 3 runs are finished."
