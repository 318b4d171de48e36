from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "e2e_vl", "synthesize", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_command_line(tmp_path):
    output = tmp_path / "data"
    sizes = ("--train", 3, "--val", 1, "--testA", 1, "--testB", 1)
    options = ("--output", output, *sizes, "--max-objects", 6, "--families", "attribute=0.5", "relation=0.5")
    first = run(*options)
    assert first.returncode == 0, first.stderr
    statistics = json.loads(first.stdout)
    assert statistics["images"] == {"train": 3, "val": 1, "testA": 1, "testB": 1}
    assert set(statistics["families"]) <= {"attribute", "relation"}
    assert 5 <= statistics["objects_per_image"] <= 6
    assert not first.stderr or "6/6" in first.stderr  # a progress bar, where drawing took a second

    again = run(*options)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")

    other = run(*options, "--seed", 1)
    assert other.returncode == 2
    assert other.stderr.strip().startswith("error: ")
    assert "other settings (seed)" in other.stderr
    assert "Traceback" not in other.stderr


def test_bad_arguments_are_one_sentence(tmp_path):
    for options, words in (
        (("--min-objects", 12), "min_objects"),
        (("--textures", "furry"), "furry"),
    ):
        result = run("--output", tmp_path / "data", *options)
        assert result.returncode == 2
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "data").exists()
