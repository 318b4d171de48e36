"""The measurement of reading annotations, on tiny files."""

from __future__ import annotations

from pathlib import Path

import pytest

import start_memory


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux tells the unshared pages")
@pytest.mark.parametrize(
    ("kind", "share", "texts"), [("expressions", 0.0005, 67), ("questions", 0.00005, 21), ("archived", 0.00005, 165)]
)
def test_a_tiny_start_is_measured(tmp_path, capsys, kind, share, texts):
    start_memory.KINDS[kind](tmp_path, share)
    found = start_memory.measure_config(tmp_path / "run.yaml")
    assert found["texts"] == texts  # one broken question is left out, and one ref
    assert found["seconds"] > 0 and found["peak_mib"] >= 0 and found["worker_cpu_seconds"] > 0
    assert start_memory.show({"share": 1, "cases": [{"kind": kind, **found}]}) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"| {kind} | {found['texts']} | ")
