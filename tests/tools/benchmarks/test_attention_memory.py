"""`benchmark.py attention` with a tiny encoder on a few images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import attention_memory
import benchmark
from e2e_vl.config import load_config
from e2e_vl.data.base import open_options
from e2e_vl.data.features import open_features
from e2e_vl.run.build import named_parts

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "benchmark" / "attention.yaml"
TINY = [
    "detector.config=configs/detector/tiny.yaml",
    "encoder.config={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 16}",
]


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """The config names the detector's relative to the repository, where the tool is run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_time_and_memory_after_a_quarter_and_all(tmp_path, capsys):
    result = attention_memory.benchmark_attention(CONFIG, tmp_path, images=4, images_per_batch=1, words=TINY)
    opened, quarter, every = result["stages"]
    assert [row["stage"] for row in result["stages"]] == ["everything is open", "a quarter", "all"]
    assert (opened["images"], quarter["images"], every["images"]) == (0, 1, 4)
    assert 0 == opened["captions"] < quarter["captions"] <= 5 < every["captions"] <= 20
    assert 0 <= opened["seconds"] <= quarter["seconds"] <= every["seconds"] and every["cpu_seconds"] > 0
    assert 100 < opened["peak_mib"] <= quarter["peak_mib"] <= every["peak_mib"]
    json.dumps(result)
    assert attention_memory.show(result) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"| all | 4 | {every['captions']} | ")

    config = load_config(CONFIG, [*TINY, f"data.root={tmp_path / '4_images'}"])
    files, _ = open_options(named_parts(config).dataset, config.data)
    store = open_features(files.path("features", split="val"))
    assert len(store.ids) == 4
    for image in store.ids:  # reading checks that boxes lie in their image and confidences are probabilities
        found = store[image]
        assert found.boxes.shape == (attention_memory.REGIONS, 4) and found.scores.std() > 0.1
        assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()


def test_the_config_is_of_base_size():
    config = load_config(CONFIG, ["data.root=DATA"])
    assert (config.encoder.config["num_hidden_layers"], config.encoder.config["num_attention_heads"]) == (12, 12)


def test_numbers_that_are_not_positive_are_refused(tmp_path, capsys):
    assert benchmark.main(["attention", "--folder", str(tmp_path), "--images", "0"]) == 2
    assert "--images and --images-per-batch must be positive" in capsys.readouterr().err
