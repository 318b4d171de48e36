"""Of three processes one builds the vocabulary and the list of answers, and all read the same."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from e2e_vl.cli import train as tool
from e2e_vl.config import load_config
from e2e_vl.data.answer_lists import ANSWERS_FILE
from e2e_vl.run import build as build_data
from e2e_vl.run.build import make_synthetic_data, training_texts
from e2e_vl.text import build_vocabulary
from tests.campaign.disturbed import run_disturbed
from tests.run.two_processes import start, wait

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny" / "vqa.yaml"
SHORT = (
    *("train.max_steps=1", "train.trackers=[]", "train.images_per_batch=3", "detector.loss_weight=0"),
    *("data.boxes.train=gt", "eval.boxes=[]", "eval.report_pictures=0"),
)
PROCESSES, STARTS, CAMPAIGN = 3, 2, 20


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """The data are there already, so that the processes meet at the vocabulary."""
    root = tmp_path_factory.mktemp("vqa") / "data"
    words = [f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}", f"data.root={root}", *SHORT]
    make_synthetic_data(load_config(CONFIG, [*words, "output=unused"]))
    return words


@pytest.fixture(scope="module")
def expected(words, tmp_path_factory) -> list[str]:
    """The wordpieces, as one process builds them."""
    path = tmp_path_factory.mktemp("expected") / "vocab.txt"
    return build_vocabulary(training_texts(load_config(CONFIG, [*words, "output=unused"])), path)


def assert_built(run: Path, expected: list[str]) -> None:
    """The run has ended, with the whole vocabulary, and nothing else lies beside it."""
    assert (run / "tokenizer" / "vocab.txt").read_text(encoding="utf-8").splitlines() == expected
    assert {path.name for path in (run / "tokenizer").iterdir()} == {
        *("vocab.txt", "tokenizer.json", "tokenizer_config.json")
    }
    assert len(json.loads((run / ANSWERS_FILE).read_text(encoding="utf-8"))) > 2
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert (metrics["processes"], metrics["steps"]) == (PROCESSES, 1)


@pytest.mark.parametrize("number", range(STARTS))
def test_one_of_three_processes_builds_it(words, expected, tmp_path, number):
    command = functools.partial(tool.main, ["--config", str(CONFIG), *words, f"output={tmp_path / 'run'}"])
    ended = run_disturbed(command, [(build_data, "build_vocabulary")], tmp_path, processes=PROCESSES)
    assert ended.statuses == [0] * PROCESSES, ended.texts
    counted = [[line for line in text.splitlines() if line.startswith("moments: ")] for text in ended.texts]
    assert counted == [["moments: 1"], ["moments: 0"], ["moments: 0"]]
    assert_built(tmp_path / "run", expected)


@pytest.mark.campaign
def test_many_starts_of_three_processes_have_it(words, expected, tmp_path):
    """Of `torchrun`, each with processes of its own."""
    for number in range(CAMPAIGN):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = (CONFIG, [*words, f"output={folder / 'run'}"])
        wait(start([job], folder, "--only-train", processes=PROCESSES))
        assert_built(folder / "run", expected)
