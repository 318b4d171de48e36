"""The tiny run with either detector backend: train, save, load, evaluate, and continue in the other one."""

from __future__ import annotations

import pytest
import torch

from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_tiny_run_trains_with_detectron2_and_goes_on_without(tiny_config, tmp_path):
    pytest.importorskip("detectron2", reason="Detectron2 is not installed")
    short = ("train.max_steps=2", "eval.boxes=[online]", "eval.max_images=2", "eval.report_pictures=0")
    metrics = train(tiny_config("detector.backend=detectron2", *short))
    assert 0 <= metrics["val/accuracy_predicted_boxes"] <= 1
    _, theirs, _ = load_model(tmp_path / "run")
    assert type(theirs.detector).__name__ == "Detectron2Detector"
    _, ours, _ = load_model(tmp_path / "run", overrides=["detector.backend=builtin"])
    assert type(ours.detector).__name__ == "FasterRCNN"
    weights = theirs.detector.state_dict()
    assert weights.keys() == ours.detector.state_dict().keys()
    for name, value in ours.detector.state_dict().items():
        assert torch.equal(value, weights[name]), name
    goes_on = tiny_config(
        f"detector.weights={tmp_path / 'run' / 'model' / 'detector' / 'model.safetensors'}",
        f"output={tmp_path / 'second'}",
        *short,
    )
    train(goes_on)
