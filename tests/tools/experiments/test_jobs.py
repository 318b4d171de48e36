"""Runs that need each other: order, what is finished is not run again, and failures."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from compare import TRAIN, Job, run_jobs
from e2e_vl.config import load_config, save_config

CONFIG = Path(__file__).parents[3] / "configs" / "tiny" / "refcoco.yaml"
FAKE = """
import json, pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv if "=" in word)
run = pathlib.Path(words["output"])
log = run.parent / "order.txt"
with log.open("a") as file:
    file.write(f"start {run.name}\\n")
if words["seed"] == "13":
    print("error: the thirteenth seed cannot be trained")
    sys.exit(2)
time.sleep(0.2)
run.mkdir(exist_ok=True)
(run / "metrics.json").write_text(json.dumps({"seed": int(words["seed"])}))
with log.open("a") as file:
    file.write(f"end {run.name}\\n")
"""


@pytest.fixture
def launch(tmp_path: Path) -> str:
    """Starts a fake instead of tools/train.py."""
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return shlex.join([sys.executable, str(path)])


def job(folder: Path, name: str, after: tuple[str, ...] = (), seed: int = 1) -> Job:
    return Job(CONFIG, (f"seed={seed}",), folder / name, tuple(folder / other for other in after))


def test_a_job_waits_for_those_it_needs_and_runs_once(launch, tmp_path):
    jobs = [job(tmp_path, "a"), job(tmp_path, "b"), job(tmp_path, "c", ("a", "b")), job(tmp_path, "d", ("c",))]
    run_jobs(jobs, launch=launch, parallel=2)
    lines = (tmp_path / "order.txt").read_text().splitlines()
    assert [one.metrics for one in jobs] == [{"seed": 1}] * 4
    assert {lines[0], lines[1]} == {"start a", "start b"}  # at the same time
    for later, earlier in (("c", "a"), ("c", "b"), ("d", "c")):
        assert lines.index(f"end {earlier}") < lines.index(f"start {later}")
    run_jobs(jobs, launch=launch)
    assert len((tmp_path / "order.txt").read_text().splitlines()) == len(lines)
    assert "--config" in (tmp_path / "a.log").read_text()


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_failure_names_the_log_and_stops_what_needs_it(launch, tmp_path, keep_going):
    jobs = [job(tmp_path, "bad", seed=13), job(tmp_path, "next", after=("bad",)), job(tmp_path, "other")]
    with pytest.raises(ValueError, match=r"bad failed with exit status 2.*bad\.log"):
        run_jobs(jobs, launch=launch, keep_going=keep_going)
    assert "thirteenth" in (tmp_path / "bad.log").read_text()
    assert [one.metrics is not None for one in jobs] == [False, False, keep_going]
    assert not (tmp_path / "next").exists()


def test_a_folder_with_another_run_is_refused_before_anything_starts(launch, tmp_path):
    jobs = [job(tmp_path, "first"), job(tmp_path, "taken")]
    (tmp_path / "taken").mkdir()
    save_config(load_config(CONFIG, ["seed=5", f"output={tmp_path / 'taken'}"]), tmp_path / "taken" / "config.yaml")
    with pytest.raises(ValueError, match=r"taken holds a run with other settings \(seed: 5 -> 1\)"):
        run_jobs(jobs, launch=launch)
    assert not (tmp_path / "first").exists()
    job(tmp_path, "taken", seed=5).check()


def test_an_interrupted_run_goes_on(tmp_path):
    one = job(tmp_path, "a")
    start = ["accelerate", "launch", str(TRAIN), "--config", str(CONFIG)]
    assert one.command("accelerate launch") == [*start, "seed=1", f"output={one.run}"]
    one.run.mkdir()
    assert one.command("accelerate launch") == [*start, "--resume", "seed=1", f"output={one.run}"]
