"""Devices and precisions that a user may choose, and what runs on a Mac."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from detector.errors import UserError
from e2e_vl.run.devices import choose_device, choose_precision, default_device
from tests.run.runs import ROOT, TINY_DETECTOR
from tests.run.test_gpu_waits import needs_known_torch


@pytest.mark.parametrize("device", ["gpu", "CPU", "", "cuda", "cuda:7", 0, "mps", "xla", "meta", True, 1.5])
def test_a_device_that_is_not_there_is_one_sentence(device, monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^device=[^\n]*\.$"):
        choose_device(device)


def test_names_of_devices_and_precisions(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert choose_device(None) == choose_device("cpu") == default_device() == torch.device("cpu")
    assert choose_precision("bf16") == choose_precision(torch.bfloat16) == choose_precision("torch.bfloat16")
    for wrong in ("int8", torch.float64, 3):
        with pytest.raises(UserError, match="dtype="):
            choose_precision(wrong)


@needs_known_torch
def test_a_mac_trains_on_the_cpu_and_asks_on_mps_without_float64(tmp_path: Path):
    words = [
        *("train={max_steps: 1, images_per_batch: 2, warmup_steps: 0, trackers: []}", "data.workers=0"),
        *("data.synthetic.scenes={train: 4, val: 1}", "data.resize={short_edge: [64], long_edge: 80}"),
        *("eval.every_epochs=0", "eval.report_pictures=0", "eval.boxes=[gt]"),
        *(TINY_DETECTOR, f"data.root={tmp_path / 'data'}", f"output={tmp_path / 'run'}"),
    ]
    command = [sys.executable, "-m", "tests.pretended_mac", str(ROOT / "configs" / "tiny" / "refcoco.yaml"), *words]
    # fixtures that choose the CPU may be alive, and a chosen CPU is not announced
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "uses the CPU and not this machine's mps" in done.stderr
    answers = json.loads(done.stdout)
    on_cpu, on_mps = answers["default"], answers["mps"]
    assert (on_cpu.pop("device"), on_mps.pop("device")) == ("cpu", "mps")
    for name, values in on_cpu.items():
        assert np.allclose(values, on_mps[name], atol=1e-3), name
