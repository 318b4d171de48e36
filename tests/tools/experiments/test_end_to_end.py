"""The runs of the experiment, their settings, the tables, and real runs of two steps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from matplotlib.image import imread

import compare
import end_to_end as tool
from detector.errors import UserError
from detector.io import read_yaml
from e2e_vl.cli.run import train
from e2e_vl.config_files import load_config
from e2e_vl.registry import DATASETS, decode
from e2e_vl.run.build import resolve_config
from tests.conftest import ROOT, TINY_DETECTOR, cpu_with_one_thread

EXPERIMENT = decode(read_yaml(tool.EXPERIMENT), tool.Experiment, "experiment")
ALL = {"settings": list(EXPERIMENT.settings), "tasks": list(EXPERIMENT.tasks), "encoders": ["vl_bert"]}


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def make_jobs(cells, folder, overrides=(), detector_overrides=()):
    return tool.make_jobs(EXPERIMENT, cells, folder, tool.CONFIGS, overrides, detector_overrides)


def finish(job: compare.Job, value: float) -> None:
    job.run.mkdir()
    names = [f"{split}/accuracy_{boxes}_boxes" for split in ("val", "testA") for boxes in ("gt", "predicted")]
    metrics = {**dict.fromkeys(names, value), "steps": 600, "seconds_training": 300, "seconds": 360}
    (job.run / "metrics.json").write_text(json.dumps(metrics))


def test_ninety_runs_begin_with_all_of_the_first_seed():
    encoders = ["vl_bert", "visual_bert", "lxmert"]
    cells = tool.plan(EXPERIMENT, ALL["settings"], ALL["tasks"], encoders, [0, 1, 2])
    assert len({cell.name for cell in cells}) == len(cells) == 90
    assert {cell.seed for cell in cells[:30]} == {0}


def test_runs_differ_in_what_their_detector_knows_and_in_the_pictures(tmp_path):
    cells = tool.plan(EXPERIMENT, **ALL, seeds=[0])
    jobs, _ = make_jobs(cells, tmp_path, ["train.log_every=7"], ["train.log_every=8"])
    assert len(jobs) == len(cells) + 2
    configs = {}
    for name, job in jobs.items():
        configs[name] = resolve_config(load_config(job.config, job.all_overrides))
    for cell in cells:
        config = configs[cell.name]
        setting = EXPERIMENT.settings[cell.setting]
        assert (config.task.name, config.encoder.name) == (cell.task, cell.encoder)
        assert config.train.log_every == 7
        assert config.detector.freeze == (cell.variant == "frozen")
        earlier_task = EXPERIMENT.tasks[cell.task].after
        earlier = setting.detector if earlier_task is None else cell._replace(task=earlier_task).name
        assert config.detector.weights == str(jobs[earlier].run / "model")
        assert config.encoder.weights == (None if earlier_task is None else config.detector.weights)
        assert jobs[cell.name].after == (jobs[earlier].run,)
        assert config.data.eval_splits == ["testA"]
        assert config.eval.boxes == (["gt"] if cell.task == "vcr" else ["gt", "online"])
        assert set(DATASETS[cell.task].cls.box_sources).issuperset(config.eval.boxes)
        rendering = config.data.synthetic.config.rendering
        assert (rendering.noise == 8) == (cell.setting == "other_pictures")
        heads = config.detector.overrides["MODEL"].get("ROI_BOX_HEAD", {})
        assert ("NORM" in config.detector.overrides["MODEL"]["RESNETS"]) == (cell.setting != "other_pictures")
        detector_heads = configs[setting.detector].detector.overrides["MODEL"]["ROI_BOX_HEAD"]
        is_classes_only = cell.setting == "classes_only"
        assert (heads == {"ATTRIBUTES": {"NUM_CLASSES": 0}}) == is_classes_only
        assert (detector_heads["ATTRIBUTES"]["NUM_CLASSES"] == 0) == is_classes_only
    roots = {(cell.setting, cell.task): configs[cell.name].data.root for cell in cells}
    assert roots["all_taught", "vqa"] == roots["classes_only", "vqa"] != roots["other_pictures", "vqa"]
    assert configs["detector"].data.root == configs["detector_classes"].data.root
    assert configs["detector"].train.log_every == 8


def test_the_table_has_differences_of_the_same_seeds_and_the_time_of_what_is_left(tmp_path, monkeypatch, capsys):
    cells = tool.plan(EXPERIMENT, ["all_taught", "classes_only"], ["vqa"], ["vl_bert"], [0, 1, 2])
    jobs, configs = make_jobs(cells, tmp_path)
    assert tool.describe_time(cells, jobs, [tmp_path], 1) == "0 of 26 runs are finished."
    assert tool.as_markdown(EXPERIMENT, tool.collect(EXPERIMENT, cells, jobs, configs))[0] == "No run is finished yet."
    for name, value in (
        ("frozen_0", 0.5),
        ("frozen_1", 0.6),
        ("trained_0", 0.7),
        ("trained_1", 0.9),
        ("trained_2", 0.8),
    ):
        finish(jobs[f"classes_only_vqa_vl_bert_{name}"], value)
    monkeypatch.setattr(tool, "read_baselines", lambda *_: {"a/guess": 0.5, "guess": 0.3, "chance": 0.25})
    results = tool.collect(EXPERIMENT, cells, jobs, configs)
    assert [row["boxes"] for row in results] == ["gt", "online"]
    difference = results[-1]["accuracy"]["difference"]
    assert difference["seeds"] == [0, 1]
    assert difference["values"] == pytest.approx([0.2, 0.3])
    lines = tool.as_markdown(EXPERIMENT, results)
    assert "## The detector was taught classes only" in lines
    assert "| | frozen | trained | difference | best shortcut | steps | minutes |" in lines
    cells_of_row = "0.550 ± 0.071 | 0.800 ± 0.100 | +0.250 ± 0.071 | 0.300 | 600 | 25"
    assert f"| VQA, vl_bert, testA, annotated boxes | {cells_of_row} |" in lines
    steps = (7 + 6) * 1800 + 6 * 1200 + 2 * 1125  # half a second each, and a minute beside it per run
    hours = (steps / 2 + 21 * 60) / 2 / 3600
    sentence = f"5 of 26 runs are finished; the others need about {hours:.1f} hours with 2 in parallel."
    assert tool.describe_time(cells, jobs, [tmp_path], 2) == sentence
    words = ["--output", str(tmp_path / "other"), "--dry-run", "--timed", str(tmp_path)]
    assert tool.main([*words, "--tasks", "vqa", "--seeds", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("train.py") == 6 + 6 + 2
    assert "0 of 14 runs are finished; the others need about" in printed


def test_the_closest_runs_give_the_time():
    frozen = (("vqa", "vl_bert", "frozen"), tool.Timing(1.0, 0.0))
    trained = (("vqa", "vl_bert", "trained"), tool.Timing(2.0, 0.0))
    assert tool.most_similar(("refcoco", "vl_bert", "trained"), [frozen, trained]) == [(2.0, 0.0)]
    assert len(tool.most_similar((tool.DETECTOR, "", ""), [frozen, trained])) == 2


def test_real_runs_of_every_setting(tmp_path, monkeypatch, capsys):
    """In this process, whose imports are done; tests of compare.py start processes."""
    calls = []

    def run(command, **_):
        calls.append(command)
        with cpu_with_one_thread():
            return SimpleNamespace(returncode=train(command[command.index("--config") :]))

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=run))
    folder = tmp_path / "runs"
    words = ["--output", str(folder), "--configs", str(ROOT / "configs" / "tiny"), "--tasks", "refcoco"]
    words += ["--encoders", "vl_bert", "--seeds", "0", "--set", TINY_DETECTOR, "train.max_steps=2"]
    words += ["data.synthetic.scenes={train: 8, val: 3, testA: 3}", "data.synthetic.formats=[refcoco+,detections]"]
    words += ["data.boxes.train=gt", "eval.report_pictures=0", "eval.every_epochs=0"]
    assert tool.main(words) == 0
    assert len(calls) == 6
    results = json.loads((folder / "end_to_end.json").read_text())
    assert len(results) == 3 * 2
    for row in results:
        assert row["steps"] == 2
        assert (row["shortcut"] is None) == (row["boxes"] == "online")
        assert set(row["accuracy"]) == {"frozen", "trained", "difference"}
    assert "6 of 6 runs are finished." in (folder / "end_to_end.md").read_text()
    assert imread(folder / "end_to_end.png").std() > 0.05
    drawn = [(folder / "data" / f"{name}_refcoco" / "images" / "train2014").iterdir() for name in ("drawn", "pale")]
    clean, pale = ([path.read_bytes() for path in sorted(images)] for images in drawn)
    assert len(clean) == len(pale)
    assert not set(clean) & set(pale)
    capsys.readouterr()
    assert tool.main(words) == 0
    assert len(calls) == 6, "finished runs are not repeated"
    with pytest.raises(UserError, match="a run with other settings"):
        tool.main.__wrapped__([*words, "train.lr=0.1"])
