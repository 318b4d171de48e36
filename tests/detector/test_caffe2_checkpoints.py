"""Checkpoints with Caffe2's blobs, as in Detectron2's model zoo."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from detector.checkpoint import load_checkpoint
from detector.faster_rcnn import FasterRCNN


@pytest.mark.parametrize("norms", ["NEW_NORMS", "OLD_NORMS"])
@pytest.mark.parametrize("wrap", ["bare", "blobs", "model"])
def test_caffe2_blobs(published: ModuleType, tmp_path: Path, plain: FasterRCNN, norms: str, wrap: str):
    blobs: dict = published.caffe2_blobs(plain, getattr(published, norms))
    blobs["conv1_b"] = np.zeros(8, np.float32)
    blobs["fc1000_w"] = np.zeros((10, 64), np.float32)
    content = {"model": {"model": blobs, "__author__": "Caffe2", "matching_heuristics": True}, "bare": blobs}
    content["blobs"] = {"blobs": {**blobs, "conv1_w_momentum": blobs["conv1_w"]}, "cfg": "text"}
    model = published.make(published.WITHOUT_ATTRIBUTES, 3)
    report = load_checkpoint(model, published.write_pickle(tmp_path / "a.pkl", content[wrap]))
    assert report.layout == "Caffe2"
    assert sorted(report.unexpected) == ["fc1000.weight", "stem.conv1.bias"]
    assert not report.missing and not report.mismatched
    published.assert_same_outputs(plain, model)


def test_folded_norms_of_caffe2(published: ModuleType, tmp_path: Path):
    """Detectron saved scale and bias alone. What statistics the model had before does not matter."""
    source = published.make(published.WITHOUT_ATTRIBUTES, 2)
    for name, value in source.state_dict().items():
        if "running" in name:
            value.fill_(0.0 if name.endswith("mean") else 1 - 1e-5)
    blobs = {
        name: v
        for name, v in published.caffe2_blobs(source, published.OLD_NORMS).items()
        if not name.endswith(("_rm", "_riv"))
    }
    model = published.make(published.WITHOUT_ATTRIBUTES, 3)
    assert load_checkpoint(model, published.write_pickle(tmp_path / "a.pkl", blobs)).is_complete
    published.assert_same_outputs(source, model)
