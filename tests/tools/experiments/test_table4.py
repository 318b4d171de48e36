"""The plan and the table of tools/experiments/table4.py; tests/run trains such runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import table4 as tool
from e2e_vl.config import load_config
from e2e_vl.run.build import build_objectives
from e2e_vl.tasks.objectives.base import Sizes
from tests.conftest import ROOT


def make_plan(folder: Path, rows=("none", "b", "full"), seeds=(0, 1), tasks=("refcoco", "vqa")):
    settings = ["train.log_every=5", f"data.root={folder / 'data'}"]
    return tool.plan(ROOT / "configs" / "table4", folder, settings, seeds, rows, tasks)


def test_every_run_starts_from_the_row_it_belongs_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the detector is found from any folder
    jobs = make_plan(tmp_path)
    assert len(jobs) == 1 + 2 * 2 + 2 * 2 * 3 + 2 * 2
    by_run = {job.run: name for name, job in jobs.items()}
    names = list(jobs)
    for name, job in jobs.items():
        assert all(names.index(by_run[other]) < names.index(name) for other in job.after)
        assert load_config(job.config, job.all_overrides).detector.config == str(
            ROOT / "configs" / "detector" / "tiny.yaml"
        )
    row = tmp_path / "pretrain_b_1"
    assert f"encoder.weights={row}" in jobs["vqa_b_1"].overrides and jobs["vqa_b_1"].after == (row,)
    assert f"detector.weights={row / 'model'}" in jobs["vqa_b_1"].overrides
    assert not any(word.startswith("encoder.weights") for word in jobs["vqa_none_1"].overrides)
    assert "data.blank_text=true" in jobs["vqa_text_blind_0"].overrides and "vqa_text_blind_1" not in jobs


@pytest.mark.parametrize(
    "name", sorted({path.name for path in (ROOT / "configs" / "table4").glob("*.yaml")} - {"common.yaml"})
)
def test_rows_are_switches_of_one_configuration(tmp_path, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "configs" / "table4" / name, ["output=unused"])
    assert config.data.resize.short_edge == [192]
    if name.startswith("pretrain"):
        letter = name.removeprefix("pretrain").removesuffix(".yaml")
        sizes = Sizes(hidden_size=8, vocab_size=9, feature_dim=8, num_classes=6)
        objectives = build_objectives(config.task.config.objectives, sizes)
        assert ("masked_regions" in objectives) == (letter != "_a")
        assert ("relationship" in objectives) == (letter == "_c")
        assert ("masked_text" in objectives) == (letter in ("_d", "")) == ("corpus" in config.data.files)
        assert config.detector.freeze == (letter != "")


def test_table_has_mean_and_spread(tmp_path):
    jobs = make_plan(tmp_path, tasks=("refcoco",))
    values = {"none": (0.2, 0.4), "b": (0.5, 0.5), "full": (0.7, 0.8)}
    numbers = {f"{row}_{seed}": number for row, pair in values.items() for seed, number in enumerate(pair)}
    for name, number in (numbers | {f"{control}_0": 0.15 for control in tool.CONTROLS}).items():
        run = jobs[f"refcoco_{name}"].run
        run.mkdir()
        (run / "metrics.json").write_text(json.dumps({"val/accuracy_gt_boxes": number}))
    table = tool.collect(jobs, (0, 1), ("none", "b", "full"), ("refcoco",))
    tool.write_table(tmp_path / "table", table, tool.as_markdown(table))
    markdown = (tmp_path / "table.md").read_text("utf-8")
    assert "| without pre-training | 30.0 ± 14.1 |" in markdown
    assert "| full, without the text | 15.0 |" in markdown
    assert json.loads((tmp_path / "table.json").read_text()) == table
    tool.draw(table, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"
