from __future__ import annotations

import pytest

from reading_memory import benchmark_memory

ALLOWED = 48  # MiB beyond what the imported packages take


def test_memory_does_not_follow_the_size_of_the_files(tmp_path):
    result = benchmark_memory(tmp_path, corpus_mib=128, records=2000, batches=60, images_per_batch=4, workers=1)
    assert result["files"]["corpus"] >= 128
    memory = result["memory"]
    assert len(memory["workers"]) == 1
    for name, values in {"main": memory["main"], "worker": memory["workers"][0]}.items():
        assert 0 < values["peak"] < memory["start"] + ALLOWED, name
        assert values["growth"] < 8, name
    assert memory["index"] < memory["start"] + ALLOWED
    assert not list(tmp_path.rglob("*.unfinished*"))


def test_sizes_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match="must be positive"):
        benchmark_memory(tmp_path, batches=0)
