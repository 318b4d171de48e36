"""The cells of the table, their settings, what is run again, and two real cells of two steps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import yaml

import compare
import pairs as tool
from e2e_vl.cli.run import train
from e2e_vl.config_files import differences, load_config
from e2e_vl.run.build import resolve_config
from tests.conftest import ROOT, cpu_with_one_thread

ENCODERS = yaml.safe_load(tool.ENCODERS.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_only_joint_runs_of_the_seeded_tasks_have_several_seeds():
    cells = tool.plan(list(ENCODERS), list(tool.TASKS), list(tool.VARIANTS), [0, 1, 2])
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names)) == 3 * (3 * 6 + 3 * 4 + 3)
    assert "vqa_lxmert_joint_2" in names and "vqa_lxmert_frozen_2" not in names and "gqa_lxmert_joint_1" not in names
    assert not [name for name in names if name.startswith("pretraining") and "text_blind" in name]


def test_every_cell_is_a_run_of_its_task_with_its_encoder(tmp_path):
    cells = tool.plan(list(ENCODERS), list(tool.TASKS), ["joint"], [0])
    cells += tool.plan(["vl_bert"], ["refcoco", "vcr"], list(tool.VARIANTS)[1:], [0])
    jobs, configs = tool.make_jobs(cells, ENCODERS, tmp_path, tool.CONFIGS, ["train.log_every=7"])
    assert set(jobs) - {tool.DETECTOR} == {cell.name for cell in cells}
    for cell in cells:
        config = resolve_config(load_config(jobs[cell.name].config, jobs[cell.name].all_overrides))
        assert (config.task.name, config.encoder.name) == (cell.task, cell.encoder)
        assert config.train.log_every == 7
        own = {"joint": "", "frozen": "freeze", "image_blind": "blank_image freeze", "text_blind": "blank_text"}
        if cell.task == "vcr":
            own["text_blind"] = "blank_question"
        changed = [line.split(":")[0].split(".")[-1] for line in differences(configs[cell.task, cell.encoder], config)]
        also = {"seed", "output", "loss_weight", "weights", "resize"}
        assert set(changed) - also == set(own[cell.variant].split())
        job = jobs[cell.name]
        assert job.after == (tmp_path / tool.DETECTOR,)
        assert f"detector.weights={tmp_path / tool.DETECTOR / 'model'}" in job.overrides
        assert config.detector.loss_weight == 0, "the task alone trains the detector"
        rates = {("nlvr2", "vl_bert"): 5e-4, ("nlvr2", "lxmert"): 3e-4, ("vcr", "visual_bert"): 1e-3}
        assert config.train.lr == rates.get((cell.task, cell.encoder), 1e-3 if cell.encoder == "vl_bert" else 5e-4)


def test_encoders_have_the_sizes_of_the_task():
    own = load_config(tool.CONFIGS / "nlvr2.yaml")
    settings = {name: tool.with_encoder(own, name, ENCODERS[name], "nlvr2").encoder for name in ENCODERS}
    assert settings["vl_bert"] == own.encoder
    assert {one.config.hidden_size for one in settings.values()} == {96}
    assert settings["visual_bert"].config.num_hidden_layers == 3 and settings["lxmert"].config.max_images == 2


def test_the_table_has_means_and_what_is_finished(tmp_path, monkeypatch):
    cells = tool.plan(["lxmert"], ["vqa"], list(tool.VARIANTS), [0, 1])
    jobs, configs = tool.make_jobs(cells, ENCODERS, tmp_path, tool.CONFIGS, [])
    for name, value in (("joint_0", 0.7), ("joint_1", 0.8), ("image_blind_0", 0.1)):
        run = jobs[f"vqa_lxmert_{name}"].run
        run.mkdir()
        metrics = {"val/accuracy_gt_boxes": value, "steps": 6, "seconds_training": 30}
        (run / "metrics.json").write_text(json.dumps(metrics))
    monkeypatch.setattr(tool, "read_baselines", lambda *_: {"a/guess": 0.5, "guess": 0.3, "chance": 0.25})
    table = tool.collect(cells, jobs, configs)
    joint = table["vqa"]["encoders"]["lxmert"]["joint"]
    assert joint["seeds"] == [0, 1] and joint["mean"] == pytest.approx(0.75) and joint["steps"] == 6
    lines = tool.as_markdown(table)
    columns = [
        "detector trained",
        "chance",
        "best shortcut",
        "detector frozen",
        "without the image",
        "without the text",
    ]
    assert lines[0].startswith(f"| | {' | '.join(columns)} |")
    assert "| VQA, lxmert | 0.750 ± 0.071 | 0.250 | 0.300 | – | 0.100 | – | 6 | 2 |" in lines


def test_two_real_cells(tiny_words, tmp_path, monkeypatch, capsys):
    """In this process, whose imports are done; tests of compare.py start processes."""

    def run(command, **_):
        words = command[command.index("--config") :]
        with cpu_with_one_thread():
            return SimpleNamespace(returncode=train(words))

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    words = ["--output", str(tmp_path / "runs"), "--configs", str(ROOT / "configs" / "tiny"), "--tasks", "refcoco"]
    words += ["--encoders", "visual_bert", "lxmert", "--variants", "text_blind", "--set", *tiny_words]
    assert tool.main([*words, "train.max_steps=2", "eval.boxes=[gt]", "eval.report_pictures=0"]) == 0
    table = json.loads((tmp_path / "runs" / "pairs.json").read_text())["refcoco"]
    assert set(table["encoders"]) == {"visual_bert", "lxmert"}
    for variants in table["encoders"].values():
        assert variants["text_blind"]["steps"] == 2 and 0 <= variants["text_blind"]["mean"] <= 1
    assert "RefCOCO+, lxmert" in capsys.readouterr().out
