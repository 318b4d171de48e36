"""Commands answer `--help` and wrong words before anything is imported that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e_vl.cli.main import COMMANDS
from e2e_vl.config import load_config, save_config

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if path.stem != "benchmark")
SLOW = ("torch", "torchvision", "transformers", "accelerate", "matplotlib", "tensorboard", "scipy")

# Runs a module or script as __main__ and says what it left behind.
CALL = f"""
import json, runpy, sys
way, name, *words = json.loads(sys.argv[1])
sys.argv = [name, *words]
status = None
try:
    runpy.run_module(name, run_name="__main__") if way == "module" else runpy.run_path(name, run_name="__main__")
except SystemExit as stopped:
    status = stopped.code
print()
print(json.dumps([status, [library for library in {SLOW} if library in sys.modules]]))
"""


def call(way: str, name: str, *words: object) -> tuple[int, list[str], str]:
    """Exit status, the slow libraries that were imported, and what was printed."""
    line = json.dumps([way, str(name), *map(str, words)])
    done = subprocess.run([sys.executable, "-c", CALL, line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    status, imported = json.loads(last)
    return status or 0, imported, printed + done.stderr


def console(*words: object) -> tuple[int, list[str], str]:
    return call("module", "e2e_vl", *words)


def script(name: str, *words: object) -> tuple[int, list[str], str]:
    return call("script", f"tools/{name}.py", *words)


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["predict", "split"], ["predict", "ask"]])
def test_help_of_the_console_script(words):
    status, imported, printed = console(*words, "--help")
    assert (status, imported) == (0, [])
    assert f"usage: {' '.join(['e2e-vl', *words])} " in printed


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_a_script(name):
    status, imported, printed = script(name, "--help")
    assert (status, imported) == (0, [])
    assert f"usage: {name}.py " in printed


REQUIRED = {
    "check-data": "--config x",
    "train": "--config x",
    "evaluate": "--run x",
    "predict split": "--run x --split x --boxes gt --output x",
    "predict ask": "--run x --image x --text x",
    "ask": "--run x --image x --text x",
    "explore": "--run x",
    "extract": "x --output x",
    "import-features": "ban x --output x",
    "analyze-attention": "--run x",
    "convert": "x --output x",
    "synthesize": "--output x",
}


@pytest.mark.parametrize("name", REQUIRED)
def test_a_wrong_option_is_answered_at_once(name):
    assert set(COMMANDS) == {key.split()[0] for key in REQUIRED}
    status, imported, printed = console(*f"{name} {REQUIRED[name]} --nonsense".split())
    assert (status, imported) == (2, [])
    assert printed.rstrip().endswith("error: unrecognized arguments: --nonsense")


TINY = "configs/tiny/refcoco.yaml"
NEAR = "there is no setting 'train.learning_rate'; did you mean 'train.lr'?"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder that is taken for a run until its settings are read."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    save_config(load_config(ROOT / TINY), folder / "model" / "config.yaml")
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"train --config {TINY} train.learning_rate=1", NEAR),
        (f"train --config {TINY} train.lr=fast", "train.lr: Expected `float`"),
        (f"train --config {TINY} detector.expect=some", "must be one of all, no_attributes, backbone"),
        (f"train --config {TINY} detector.overrides.MODEL.RESNETS.DEPHT=50", "MODEL.RESNETS.DEPHT"),
        (f"train --config {TINY} encoder.config.hidden_sise=1", "did you mean 'encoder.config.hidden_size'?"),
        (f"train --config {TINY} task.config.dropuot=1", "did you mean 'task.config.dropout'?"),
        (f"train --config {TINY} task.name=refcco", "name 'refcco' is unknown; there is refcoco"),
        (f"train --config {TINY} detector.config=nowhere.yaml", "Detector config nowhere.yaml does not exist"),
        ("train --config nowhere.yaml", "nowhere.yaml"),
        ("train --config pyproject.toml", "pyproject.toml"),
        (f"check-data --config {TINY} train.learning_rate=1", NEAR),
        (f"check-data --config {TINY} --with nowhere.yaml", "nowhere.yaml"),
        ("evaluate --run RUN train.learning_rate=1", NEAR),
        ("evaluate --run nowhere", "nowhere holds no trained model"),
        ("analyze-attention --run nowhere", "nowhere holds no trained model"),
        ("analyze-attention --run RUN --min-iou 2", "min_iou"),
        ("analyze-attention --run RUN --heads ten", "write a head as LAYER-HEAD"),
        ("predict split --run RUN --split val --boxes gt --output x train.learning_rate=1", NEAR),
        ("predict split --run nowhere --split val --boxes gt --output x", "nowhere holds no trained model"),
        ("ask --run nowhere --image x --text y", "nowhere holds no trained model"),
        ("ask --run RUN --image x --text y --boxes 3,2,1", "[3.0, 2.0, 1.0] is no box"),
        ("extract x.jpg --output x --text y", "--text needs --run"),
        ("extract x.jpg --output x --max-regions 0", "max_regions 0"),
        ("extract --images nowhere.txt --output x", "nowhere.txt"),
        ("extract configs --output x", "configs: there are no images"),
        ("convert x --output y train.lr=1", "train.lr=1: settings are for --run."),
        (f"convert README.md --run {TINY} --output y train.learning_rate=1", NEAR),
        ("synthesize --output x --families attribute", "NAME=SHARE"),
    ],
)
def test_bad_words_are_one_sentence_at_once(run, words, message):
    status, imported, printed = console(*words.replace("RUN", str(run)).split())
    assert (status, imported) == (2, [])
    assert printed.startswith("error: ") and printed.strip().count("\n") == 0 and message in printed
