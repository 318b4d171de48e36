from __future__ import annotations

import json
import shlex
import sys
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


class Compare:
    """Calls the tool with the fake run."""

    def __init__(self, folder: Path):
        self.output, self.fake = folder / "runs", folder / "fake.py"
        self.fake.write_text(FAKE, encoding="utf-8")
        self.launch = shlex.join([sys.executable, str(self.fake)])

    def __call__(self, *words: str) -> int:
        required = ["--config", str(DEMO), "--output", str(self.output), "--launch", self.launch]
        return tool.main([*required, *words])

    @property
    def calls(self) -> list[list[str]]:
        log = self.fake.with_suffix(".log")
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


@pytest.fixture
def compare(tmp_path, monkeypatch) -> Compare:
    monkeypatch.chdir(ROOT)
    return Compare(tmp_path)


def test_variants_are_trained_once_and_compared(compare, capsys):
    words = ("--set", "train.lr=2e-3", "--variant", "joint", "--variant", "kept as it is", "detector.freeze=true")
    assert compare(*words) == 0
    run = compare.output / "kept_as_it_is"
    train = str(ROOT / "tools" / "train.py")
    assert compare.calls == [
        [train, "--config", str(DEMO), "train.lr=2e-3", f"output={compare.output / 'joint'}"],
        [train, "--config", str(DEMO), "train.lr=2e-3", "detector.freeze=true", f"output={run}"],
    ]
    comparison = json.loads((compare.output / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["metrics"] == ["val/accuracy_gt_boxes"]
    assert comparison["common_overrides"] == ["train.lr=2e-3"]
    assert comparison["variants"]["kept as it is"] == {
        "overrides": ["detector.freeze=true"],
        "runs": [str(run)],
        "metrics": {"val/accuracy_gt_boxes": [0.3]},
        "steps": [7],
        "training_minutes": [1.5],
    }
    lines = (compare.output / "comparison.md").read_text(encoding="utf-8").splitlines()
    assert lines[:4] == [
        "| | val/accuracy_gt_boxes | minutes of training |",
        "|---|---:|---:|",
        "| joint | 0.900 | 1.5 |",
        "| kept as it is | 0.300 | 1.5 |",
    ]
    assert "--variant joint --variant 'kept as it is' detector.freeze=true" in lines[-1]

    assert compare(*words, "--metrics", "val/ceiling_gt_boxes", "val/accuracy_gt_boxes/relation") == 0
    assert len(compare.calls) == 2, "finished runs must not be run again"
    assert "| joint | 1.000 | – | 1.5 |" in capsys.readouterr().out


def test_each_seed_is_a_run_of_its_own_and_the_table_has_mean_and_spread(compare):
    words = ("--variant", "joint", "--variant", "frozen", "detector.freeze=true", "--seeds", "2", "4")
    assert compare(*words, "--jobs", "2") == 0
    runs = [[str(compare.output / f"{name}_{seed}") for seed in (2, 4)] for name in ("joint", "frozen")]
    settings = sorted(call[3:] for call in compare.calls)
    frozen = "detector.freeze=true"
    assert settings == [
        [frozen, "seed=2", f"output={runs[1][0]}"],
        [frozen, "seed=4", f"output={runs[1][1]}"],
        ["seed=2", f"output={runs[0][0]}"],
        ["seed=4", f"output={runs[0][1]}"],
    ]
    comparison = json.loads((compare.output / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["seeds"] == [2, 4]
    assert [row["runs"] for row in comparison["variants"].values()] == runs
    assert comparison["variants"]["joint"]["metrics"] == {"val/accuracy_gt_boxes": [0.88, 0.86]}
    lines = (compare.output / "comparison.md").read_text(encoding="utf-8").splitlines()
    assert lines[2:4] == ["| joint | 0.870 (0.860 to 0.880) | 1.5 |", "| frozen | 0.300 (0.300 to 0.300) | 1.5 |"]
    assert "Means over the seeds 2, 4, and the spread." in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", "train.lr=1"], "needs a name"),
        (["--variants", "absent.yaml"], "absent.yaml"),
        (["--variant", "a", "detector.frozen=true"], "detector.frozen"),
    ],
)
def test_bad_arguments_are_one_sentence(compare, capsys, words, message):
    assert compare(*words) == 2
    assert message in capsys.readouterr().err
    assert compare.calls == []


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
