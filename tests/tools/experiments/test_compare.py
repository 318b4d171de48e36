"""Runs that need each other: order, failures and what goes on; and variants of a run in one table."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import compare as tool
from detector.io import read_yaml
from e2e_vl.config_files import differences, load_config, save_config
from tests.conftest import ROOT

DEMO = ROOT / "configs" / "demo" / "refcoco.yaml"

TINY = ROOT / "configs" / "tiny" / "refcoco.yaml"
# Stands in for the Python that runs tools/train.py: notes its arguments and writes what a run leaves behind.
FAKE = """
import json, sys, time
from pathlib import Path
from e2e_vl.config_files import load_config, save_config

def note(*words):
    with Path(__file__).with_suffix(".log").open("a") as log:
        log.write(json.dumps(words) + "\\n")

words = sys.argv[2:]
config = load_config(words[words.index("--config") + 1], [word for word in words if "=" in word])
run = Path(config.output)
note("start", run.name, *sys.argv[1:])
if config.seed == 13:
    print("error: the thirteenth seed cannot be trained")
    sys.exit(2)
time.sleep(0.2)
run.mkdir(parents=True, exist_ok=True)
save_config(config, run / "config.yaml")
accuracy = 0.3 if config.detector.freeze else 0.9 - config.seed / 100 * (config.seed > 1)
metrics = {"val/accuracy_gt_boxes": accuracy, "val/accuracy_gt_boxes/relation": None, "val/ceiling_gt_boxes": 1.0}
metrics["test/accuracy_gt_boxes"] = 0.5  # is not compared
(run / "metrics.json").write_text(json.dumps({**metrics, "steps": 7, "seconds_training": 90.0}))
note("end", run.name)
"""


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def launch(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(ROOT)
    (tmp_path / "fake.py").write_text(FAKE)
    return shlex.join([sys.executable, str(tmp_path / "fake.py")])


def noted(folder: Path) -> list[list[str]]:
    log = folder / "fake.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def job(folder: Path, name: str, after: tuple[str, ...] = (), seed: int = 1) -> tool.Job:
    return tool.Job(TINY, (f"seed={seed}",), folder / name, tuple(folder / other for other in after))


def test_a_job_waits_for_those_it_needs_and_runs_once(launch, tmp_path):
    jobs = [job(tmp_path, "a"), job(tmp_path, "b"), job(tmp_path, "c", ("a", "b")), job(tmp_path, "d", ("c",))]
    tool.run_jobs(jobs, launch=launch, parallel=2)
    lines = [line[:2] for line in noted(tmp_path)]
    assert [one.metrics["steps"] for one in jobs] == [7] * 4
    assert sorted(lines[:2]) == [["start", "a"], ["start", "b"]]  # at the same time
    for later, earlier in (("c", "a"), ("c", "b"), ("d", "c")):
        assert lines.index(["end", earlier]) < lines.index(["start", later])
    tool.run_jobs(jobs, launch=launch)
    assert len(noted(tmp_path)) == len(lines)
    assert "--config" in (tmp_path / "a.log").read_text()


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_failure_names_the_log_and_stops_what_needs_it(launch, tmp_path, keep_going):
    jobs = [job(tmp_path, "bad", seed=13), job(tmp_path, "next", after=("bad",)), job(tmp_path, "other")]
    with pytest.raises(ValueError, match=r"bad failed with exit status 2.*bad\.log"):
        tool.run_jobs(jobs, launch=launch, keep_going=keep_going)
    assert "thirteenth" in (tmp_path / "bad.log").read_text()
    assert [one.metrics is not None for one in jobs] == [False, False, keep_going]
    assert not (tmp_path / "next").exists()


def test_a_folder_with_another_run_is_refused_before_anything_starts(launch, tmp_path):
    jobs = [job(tmp_path, "first"), job(tmp_path, "taken")]
    (tmp_path / "taken").mkdir()
    save_config(load_config(TINY, ["seed=5", f"output={tmp_path / 'taken'}"]), tmp_path / "taken" / "config.yaml")
    with pytest.raises(ValueError, match=r"taken contains a run with other settings \(seed: 5 -> 1\)"):
        tool.run_jobs(jobs, launch=launch)
    assert not (tmp_path / "first").exists()
    job(tmp_path, "taken", seed=5).check()


def test_an_interrupted_run_goes_on(tmp_path):
    one = job(tmp_path, "a")
    start = ["accelerate", "launch", str(tool.TRAIN), "--config", str(TINY)]
    assert one.command("accelerate launch") == [*start, "seed=1", f"output={one.run}"]
    one.run.mkdir()
    assert one.command("accelerate launch") == [*start, "--resume", "seed=1", f"output={one.run}"]


@pytest.fixture
def compare(tmp_path, output, launch) -> Callable[..., list[list[str]]]:
    """`compare("--variant", ...)`: calls the tool with the fake run and returns the arguments of all runs so far."""
    required = ["--config", str(DEMO), "--output", str(output), "--launch", launch]

    def call(*words: str, status: int = 0) -> list[list[str]]:
        assert tool.main([*required, *words]) == status
        return [line[2:] for line in noted(tmp_path) if line[0] == "start"]

    return call


def test_each_seed_is_a_run_of_its_own_and_the_table_has_mean_and_spread(compare, output, capsys):
    frozen, train = "detector.freeze=true", [str(ROOT / "tools" / "train.py"), "--config", str(DEMO), "train.lr=2e-3"]
    words = ("--set", "train.lr=2e-3", "--variant", "joint", "--variant", "as it is", frozen, "--jobs", "2")
    runs = [[str(output / f"{name}_{seed}") for seed in (2, 4)] for name in ("joint", "as_it_is")]
    assert sorted(compare(*words, "--seeds", "2", "4")) == [
        [*train, frozen, "seed=2", f"output={runs[1][0]}"],
        [*train, frozen, "seed=4", f"output={runs[1][1]}"],
        [*train, "seed=2", f"output={runs[0][0]}"],
        [*train, "seed=4", f"output={runs[0][1]}"],
    ]
    comparison = json.loads((output / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["common_overrides"] == ["train.lr=2e-3"]
    assert comparison["variants"]["joint"]["metrics"] == {"val/accuracy_gt_boxes": [0.88, 0.86]}
    assert comparison["variants"]["as it is"] == {
        "overrides": [frozen],
        "runs": runs[1],
        "metrics": {"val/accuracy_gt_boxes": [0.3, 0.3]},
        "steps": [7, 7],
        "training_minutes": [1.5, 1.5],
    }
    lines = (output / "comparison.md").read_text(encoding="utf-8").splitlines()
    assert lines[2:4] == ["| joint | 0.870 (0.860 to 0.880) | 1.5 |", "| as it is | 0.300 (0.300 to 0.300) | 1.5 |"]
    compare("--variant", "joint", "--metrics", "val/ceiling_gt_boxes", "val/accuracy_gt_boxes/relation")
    assert (output / "joint").is_dir() and "| joint | 1.000 | – | 1.5 |" in capsys.readouterr().out


def test_a_wrong_setting_is_found_before_anything_is_trained(compare, capsys):
    assert compare("--variant", "a", "detector.frozen=true", status=2) == []
    assert "detector.frozen" in capsys.readouterr().err


def test_the_variants_of_the_demo_change_what_their_names_say(monkeypatch):
    monkeypatch.chdir(ROOT)

    def changes(file: str) -> list[list[str]]:
        first, *others = (load_config(DEMO, words) for words in read_yaml(ROOT / "configs" / "demo" / file).values())
        return [differences(first, other) for other in others]

    tiny = "configs/detector/tiny"
    assert changes("variants.yaml") == [
        ["detector.freeze: False -> True"],
        ["data.blank_text: False -> True"],
        [f"detector.config: {tiny}.yaml -> {tiny}_fpn.yaml"],
    ]
    phrases, geometry = "phrases.weight: 1.0 -> 0.0", "encoder.config.relative_geometry: True -> False"
    assert changes("ablation.yaml") == [[phrases], [geometry], [geometry, phrases]]
