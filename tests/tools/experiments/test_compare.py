from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import compare as tool
from detector.io import read_yaml
from e2e_vl.config import differences, load_config

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "configs" / "demo" / "refcoco.yaml"

# Stands in for the Python that runs tools/train.py: notes its arguments and writes what a run leaves behind.
FAKE = """
import json, sys
from pathlib import Path
from e2e_vl.config import load_config, save_config

words = sys.argv[2:]
config = load_config(words[words.index("--config") + 1], [word for word in words if "=" in word])
run = Path(config.output)
run.mkdir(parents=True, exist_ok=True)
save_config(config, run / "config.yaml")
with Path(__file__).with_suffix(".log").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
accuracy = 0.3 if config.detector.freeze else 0.9 - config.seed / 100 * (config.seed > 1)
metrics = {"val/accuracy_gt_boxes": accuracy, "val/accuracy_gt_boxes/relation": None, "val/ceiling_gt_boxes": 1.0}
(run / "metrics.json").write_text(json.dumps({**metrics, "steps": 7, "seconds_training": 90.0}))
"""


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def compare(tmp_path, output, monkeypatch) -> Callable[..., list[list[str]]]:
    """`compare("--variant", ...)`: calls the tool with the fake run and returns the arguments of all runs so far."""
    monkeypatch.chdir(ROOT)
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE, encoding="utf-8")
    required = ["--config", str(DEMO), "--output", str(output), "--launch", shlex.join([sys.executable, str(fake)])]

    def call(*words: str, status: int = 0) -> list[list[str]]:
        assert tool.main([*required, *words]) == status
        log = fake.with_suffix(".log")
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []

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
    assert lines[2:4] == [
        "| joint | 0.870 (0.860 to 0.880) | 1.5 |",
        "| as it is | 0.300 (0.300 to 0.300) | 1.5 |",
    ]
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
