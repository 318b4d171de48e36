"""Checkpoints of Detectron2, written here from a tiny detector: loaded, they give its numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from detector.checkpoint import load_checkpoint, load_pretrained, save_pretrained, save_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import CELL_ANCHORS


def test_detectron2_pickle_and_its_own_anchors(published: ModuleType, tmp_path: Path, original: FasterRCNN):
    """Also the layout of py-bottom-up-attention, which has our attribute head's names and an old anchor buffer."""
    content = published.arrays(original.state_dict())
    content[f"{CELL_ANCHORS}0"] = original.proposal_generator.anchor_generators[0].cell_anchors.numpy()
    model = published.make(published.TREE, 3)
    report = load_checkpoint(
        model, published.write_pickle(tmp_path / "a.pkl", {"model": content, "__author__": "someone"})
    )
    assert report.is_complete and report.layout == "Detectron2"
    published.assert_same_outputs(original, model)

    content[f"{CELL_ANCHORS}0"] = 2 * content[f"{CELL_ANCHORS}0"]
    with pytest.raises(ValueError, match=r"a\.pkl: its .*cell_anchors.* contradicts MODEL.ANCHOR_GENERATOR"):
        load_checkpoint(model, published.write_pickle(tmp_path / "a.pkl", {"model": content}))


@pytest.mark.parametrize("heuristics", [False, True])
def test_saved_as_detectron2_reads_it(published: ModuleType, tmp_path: Path, plain: FasterRCNN, heuristics: bool):
    save_weights(plain.state_dict(), tmp_path / "a.pth")
    content = torch.load(tmp_path / "a.pth", weights_only=True)
    assert set(content) == {"model"} and set(content["model"]) == set(plain.state_dict())
    torch.save(
        {**content, "iteration": 3, "optimizer": {"state": {}}, "matching_heuristics": heuristics}, tmp_path / "b.pth"
    )
    for name in ("a.pth", "b.pth"):
        model = published.make(published.WITHOUT_ATTRIBUTES, 3)
        assert load_checkpoint(model, tmp_path / name).is_complete
        published.assert_same_outputs(plain, model)


def test_partial_names(published: ModuleType, tmp_path: Path, plain: FasterRCNN):
    """What Detectron2's converter of torchvision models writes."""
    content = {
        published.without_prefix(name): value.numpy()
        for name, value in plain.state_dict().items()
        if published.is_trunk(name)
    }
    content["stem.fc.weight"] = np.zeros((10, 64), np.float32)
    content = {"model": content, "__author__": "torchvision", "matching_heuristics": True}
    model = published.make(published.WITHOUT_ATTRIBUTES, 3)
    report = load_checkpoint(model, published.write_pickle(tmp_path / "a.pkl", content), expect="backbone")
    assert report.layout == "Detectron2 without prefixes" and report.unexpected == ["stem.fc.weight"]
    after, wanted = model.state_dict(), plain.state_dict()
    assert all(torch.equal(after[name], wanted[name]) for name in after if published.is_trunk(name))


def test_a_torch_archive_called_pkl(published: ModuleType, tmp_path: Path, plain: FasterRCNN):
    torch.save({"model": plain.state_dict()}, tmp_path / "a.pkl")
    assert load_checkpoint(published.make(published.WITHOUT_ATTRIBUTES, 3), tmp_path / "a.pkl").is_complete


def test_golden_weights_survive_every_form(published: ModuleType, tmp_path: Path, golden_root: Path):
    """A state dict that the real Detectron2 saved: through .pth, .pkl and Caffe2's names and back, bit for bit."""
    folder = golden_root / "detectron2"
    config = DetectorConfig.from_yaml(folder / "config.yaml")
    model = FasterRCNN(config)
    load_checkpoint(model, folder / "state_dict.safetensors")
    state = copy.deepcopy(model.state_dict())
    save_weights(state, tmp_path / "a.pth")
    published.write_pickle(tmp_path / "b.pkl", {"model": published.arrays(state), "__author__": "Detectron2 Model Zoo"})
    names = ["a.pth", "b.pkl"]
    if len(config.rpn.conv_dims) == 1:  # Caffe2 had a single convolution
        published.write_pickle(tmp_path / "c.pkl", published.caffe2_blobs(model, published.NEW_NORMS))
        names.append("c.pkl")
    for name in names:
        again = FasterRCNN(config)
        assert load_checkpoint(again, tmp_path / name).is_complete
        assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


def test_folders(published: ModuleType, tmp_path: Path, plain: FasterRCNN):
    save_pretrained(plain, tmp_path / "run" / "model" / "detector")
    for folder in ("run", "run/model", "run/model/detector"):
        model = published.make(published.WITHOUT_ATTRIBUTES, 3)
        assert load_checkpoint(model, tmp_path / folder).is_complete
    published.assert_same_outputs(plain, model)
    published.assert_same_outputs(plain, load_pretrained(tmp_path / "run" / "model" / "detector"))
    with pytest.raises(FileNotFoundError, match="holds no detector's weights"):
        load_checkpoint(model, tmp_path)
