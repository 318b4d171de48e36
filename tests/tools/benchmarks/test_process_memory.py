"""Memory of a whole pre-training run, and of reading alone: what is measured, and how it is summed up and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from process_memory import KINDS, benchmark_memory, draw_memory, summary

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "benchmark" / "memory.yaml"
ALLOWED = 48  # MiB beyond what the imported packages take


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """The config names the detector's relative to the repository, where the tool is run."""
    monkeypatch.chdir(ROOT)


def test_growth_is_from_the_settled_part_to_the_end():
    steps = list(range(10, 1001, 10))
    warm_up = [min(step, 200) for step in steps]  # 200 from step 200 on
    leak = [value + step / 100 for value, step in zip(warm_up, steps, strict=True)]
    values = {"rss": [*warm_up[:-1], 900], "pss": leak, "uss": warm_up}  # a peak in one step is not growth
    result = summary(steps, values)
    assert result["peak"] == 900
    assert (result["rss_early"], result["rss_late"], result["rss_growth"]) == (200, 200, 0)
    assert result["uss_growth"] == 0
    assert result["pss_growth"] == pytest.approx(7.0, abs=0.1)  # from step 255 to 955


def test_a_run_is_measured_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "files"
    sizes = [(1, 40)]
    result = benchmark_memory(CONFIG, folder, sizes=sizes, steps=12, images_per_batch=2, workers=1, training=True)
    [case] = result["cases"]
    assert (case["corpus_mib"], case["records"]) == (1, 40) and case["files"]["corpus"] >= 1
    assert case["steps"] == sorted(set(case["steps"])) and 1 <= len(case["steps"]) <= 12
    assert len(case["workers"]) == 1
    for process in (case["main"], *case["workers"]):
        assert all(len(process[kind]) == len(case["steps"]) for kind in KINDS)
        assert all(0 < uss <= pss <= rss for rss, pss, uss in zip(*(process[kind] for kind in KINDS), strict=True))
    assert case["main"]["summary"]["peak"] > case["start"] > 100
    # a worker is forked: the model and all imports are shared, and reading takes little of its own
    assert case["workers"][0]["summary"]["uss_late"] < 100
    assert not [path for path in folder.iterdir() if path.name.startswith("run_")]

    draw_memory(result, tmp_path / "new" / "memory.png")
    with Image.open(tmp_path / "new" / "memory.png") as picture:
        assert picture.size == (1100, 400) and len(set(picture.convert("RGB").getdata())) > 10


def test_memory_does_not_follow_the_size_of_the_files(tmp_path):
    sizes = [(128, 2000)]
    result = benchmark_memory(CONFIG, tmp_path, sizes=sizes, steps=300, images_per_batch=4, workers=1, training=False)
    [case] = result["cases"]
    assert case["files"]["corpus"] >= 128
    assert len(case["workers"]) == 1 and len(case["steps"]) >= 10
    for process in (case["main"], *case["workers"]):
        assert 0 < process["summary"]["peak"] < case["start"] + ALLOWED
        assert process["summary"]["rss_growth"] < 8
    assert case["start"] < case["index"] < case["start"] + ALLOWED
    assert not list(tmp_path.rglob("*.unfinished*"))


def test_errors_of_the_run_are_those_of_the_user(tmp_path):
    sizes, small = [(1, 2)], {"images_per_batch": 1, "workers": 0}
    for training in (True, False):
        with pytest.raises(ValueError, match="must be positive"):
            benchmark_memory(CONFIG, tmp_path, sizes=[(1, 0)], steps=1, training=training, **small)
        with pytest.raises(ValueError, match="must be positive"):
            benchmark_memory(CONFIG, tmp_path, sizes=sizes, steps=0, training=training, **small)
    config = tmp_path / "config.yaml"
    config.write_text(f"base: {CONFIG}\ntask: {{config: {{objectives: {{masked_regions: {{classes: 3}}}}}}}}\n")
    with pytest.raises(ValueError, match=r"masked_regions\.classes is 3"):
        benchmark_memory(config, tmp_path, sizes=sizes, steps=1, training=True, **small)
