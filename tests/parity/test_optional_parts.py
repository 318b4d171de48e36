"""Recorded sets of VisualBERT and LXMERT without one of their optional parts: checks of it are skipped, none fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {  # what is removed -> the checks that read it
    "lxmert": {
        "gqa.safetensors": ("lxmert_finetuning",),
        "vqa.safetensors": ("lxmert_finetuning",),
        "nlvr2.safetensors": ("lxmert_finetuning",),
        "train.safetensors": ("lxmert_training",),
        "optim.safetensors": ("lxmert_adam",),
        "data.json": ("lxmert_data", "lxmert_files"),
        "data.safetensors": ("lxmert_data", "lxmert_files"),
        "data": ("lxmert_data", "lxmert_files"),
        "vocab.txt": ("lxmert_data",),
        "official_state_keys.json": ("lxmert_encoder", "lxmert_keys"),
    },
    "visual_bert": {
        "flickr.safetensors": ("visual_bert_finetuning",),
        "nlvr2.safetensors": ("visual_bert_finetuning",),
        "vcr.safetensors": ("visual_bert_finetuning",),
        "vqa.safetensors": ("visual_bert_finetuning",),
        "vcr_detector.safetensors": ("visual_bert_vcr_detector",),
        "late_fusion.safetensors": ("visual_bert_encoder", "visual_bert_optimiser", "visual_bert_keys"),
        "training.safetensors": ("visual_bert_optimiser",),
        "optim.safetensors": ("visual_bert_adam", "visual_bert_optimiser"),
        "data.json": ("visual_bert_data", "visual_bert_task_rules", "visual_bert_vcr_text"),
        "official_state_keys.json": ("visual_bert_keys",),
    },
}
# One process runs the checks of all parts, because libraries take longer to import than the checks take.
RUNS = """
import json, sys
from collections import Counter
import pytest

class Outcomes:
    def __init__(self):
        self.found, self.said = Counter(), []
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.found["error" if report.failed else report.outcome] += 1
            self.said += [f"{report.nodeid}: {str(report.longrepr)[-300:]}"] if report.failed else []
    def pytest_collectreport(self, report):
        if report.failed:
            self.found["error"] += 1
            self.said.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")

answers = {}
for name, (folder, files) in json.loads(sys.argv[1]).items():
    seen = Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", f"--golden-root={folder}", *files], plugins=[seen])
    answers[name] = {**seen.found, "said": seen.said}
with open(sys.argv[2], "w") as file:
    json.dump(answers, file)
"""


def without(part: str, place: Path, new: Path) -> Path:
    """A root of links to all of a set but one part, whose settings and values are not in meta.json either."""
    folder = new / place.name
    folder.mkdir(parents=True)
    for path in place.iterdir():
        if path.name not in (part, "meta.json"):
            (folder / path.name).symlink_to(path)
    meta = json.loads((place / "meta.json").read_text(encoding="utf-8"))
    for values in meta.values():
        if isinstance(values, dict):
            values.pop(Path(part).stem, None)
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return new


@pytest.mark.parametrize("kind", PARTS)
def test_checks_of_absent_parts_are_skipped(golden_root, kind, tmp_path):
    runs = {}
    for part, checks in PARTS[kind].items():
        if (golden_root / kind / part).exists():
            files = [f"tests/parity/{name}_checks.py" for name in checks]
            runs[part] = [str(without(part, golden_root / kind, tmp_path / part)), files]
    if not runs:
        pytest.skip("the set has no optional part")
    answers = tmp_path / "answers.json"
    command = [sys.executable, "-c", RUNS, json.dumps(runs), str(answers)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for part, found in json.loads(answers.read_text()).items():
        assert "error" not in found, (part, found["said"])
        assert found.get("skipped"), f"no check of {kind} reads {part}"
