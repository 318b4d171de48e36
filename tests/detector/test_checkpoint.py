from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from detector.checkpoint import (
    load_checkpoint,
    load_pretrained,
    load_weights,
    read_tensors,
    save_pretrained,
    save_weights,
)
from detector.config import DetectorConfig
from detector.errors import MissingFileError, UserError
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import CELL_ANCHORS
from tests.detector import published

TREE = {
    "RESNETS": {"DEPTH": 18, "NORM": "BN", "STEM_OUT_CHANNELS": 8, "RES2_OUT_CHANNELS": 8, "WIDTH_PER_GROUP": 4},
    "BACKBONE": {"FREEZE_AT": 0},
    "ROI_HEADS": {"NUM_CLASSES": 3},
}


def make(**sections) -> FasterRCNN:
    return FasterRCNN(DetectorConfig.from_yaml({"MODEL": {**TREE, **sections}}))


def test_saved_and_loaded_again(tmp_path: Path):
    model = make(ROI_BOX_HEAD={"ATTRIBUTES": {"NUM_CLASSES": 2, "EMBEDDING_DIM": 4, "HIDDEN_DIM": 4}})
    save_pretrained(model, tmp_path / "folder")
    loaded = load_pretrained(tmp_path / "folder")
    assert loaded.config == model.config
    assert not loaded.training
    states = model.state_dict(), loaded.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert loaded.class_names is None


def test_class_names_are_saved_with_the_detector(tmp_path: Path):
    model = make()
    model.class_names = tuple(f"größe {number}" for number in range(model.num_classes))
    save_pretrained(model, tmp_path)
    assert load_pretrained(tmp_path).class_names == model.class_names
    started, from_backbone = make(), make()
    load_checkpoint(started, tmp_path)
    assert started.class_names == model.class_names
    load_checkpoint(from_backbone, tmp_path, expect="backbone")
    assert from_backbone.class_names is None  # its classifier is its own
    model.class_names = None
    save_pretrained(model, tmp_path)
    assert load_pretrained(tmp_path).class_names is None


@pytest.mark.parametrize("content", ["[", "[1, 2]", '["a", "b", "c", "d", "e", "f", "g"]'])
def test_class_names_that_do_not_fit_are_rejected(tmp_path: Path, content: str):
    save_pretrained(make(), tmp_path)
    (tmp_path / "class_names.json").write_text(content)
    with pytest.raises(UserError, match=r"class_names\.json"):
        load_pretrained(tmp_path)


def test_misfits_are_counted_and_named_and_nothing_is_loaded():
    model, other = make(), make(ROI_HEADS={"NUM_CLASSES": 5})
    tensors = other.state_dict()
    del tensors["backbone.stem.conv1.weight"]
    tensors["roi_heads.mask_head.weight"] = torch.zeros(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = (
        r"x\.pth does not fit .* 1 missing \(backbone\.stem\.conv1\.weight\), 1 unexpected \(roi_heads\.mask_head"
        r".*4 mismatched \(roi_heads\.box_predictor\.cls_score\.weight \[6, 64\] -> \[4, 64\]"
    )
    with pytest.raises(ValueError, match=message):
        load_weights(model, tensors, "x.pth")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batch_norm_weights_fit_frozen_batch_norms():
    trained = make()
    frozen = make(BACKBONE={"FREEZE_AT": 2})
    load_weights(frozen, trained.state_dict(), "x.pth")
    load_weights(trained, frozen.state_dict(), "y.pth")
    assert torch.equal(frozen.backbone.res2[0].conv1.weight, trained.backbone.res2[0].conv1.weight)


def test_buffers_of_old_checkpoints_must_agree_with_the_config():
    model = make()
    tensors = model.state_dict()
    tensors[f"{CELL_ANCHORS}0"] = model.proposal_generator.anchor_generators[0].cell_anchors.clone()
    tensors["pixel_mean"] = torch.tensor(model.config.input.pixel_mean).reshape(3, 1, 1)
    load_weights(model, tensors, "x.pth")
    tensors[f"{CELL_ANCHORS}0"][3] += 1
    with pytest.raises(ValueError, match=r"x\.pth: its proposal_generator.* contradicts MODEL.ANCHOR_GENERATOR"):
        load_weights(model, tensors, "x.pth")
    del tensors[f"{CELL_ANCHORS}0"]
    tensors["pixel_mean"] = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"x\.pth: its pixel_mean .* contradicts MODEL.PIXEL_MEAN"):
        load_weights(model, tensors, "x.pth")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected_before_anything_is_loaded(number: float):
    model, tensors = make(), copy.deepcopy(make().state_dict())
    before = copy.deepcopy(model.state_dict())
    tensors["backbone.stem.conv1.weight"].view(-1)[3] = number
    with pytest.raises(ValueError, match=r"x\.pth: backbone\.stem\.conv1\.weight"):
        load_weights(model, tensors, "x.pth")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


def test_files_that_are_not_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingFileError, match=r"none\.pth"):
        read_tensors(tmp_path / "none.pth")
    torch.save({"model": Bomb()}, tmp_path / "bomb.pth")
    torch.save({"model": {"epoch": 3}}, tmp_path / "other.pth")
    published.write_pickle(tmp_path / "text.pkl", {"w": "text"})
    published.write_pickle(tmp_path / "list.pkl", [1])
    for name in ("text.pth", "text.safetensors"):
        (tmp_path / name).write_text("not weights")
    for name in ("bomb.pth", "other.pth", "text.pkl", "list.pkl", "text.pth", "text.safetensors"):
        with pytest.raises(UserError, match=name):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "bomb-went-off").exists()


def test_kinds_of_weights_files(tmp_path: Path):
    tensors = {"a": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "bare.pth")
    torch.save({"model": tensors, "iteration": 3}, tmp_path / "wrapped.pth")
    for name in ("a.safetensors", "bare.pth", "wrapped.pth"):
        assert torch.equal(read_tensors(tmp_path / name)["a"], tensors["a"])


def test_another_number_of_classes(tmp_path: Path, plain: FasterRCNN):
    """An error; but the backbone alone loads, and the heads of the file are listed as unused."""
    save_weights(plain.state_dict(), tmp_path / "a.pth")
    tree = copy.deepcopy(published.WITHOUT_ATTRIBUTES)
    tree["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] = 9
    model = published.make(tree, 3)
    with pytest.raises(
        ValueError, match=r"4 mismatched \(roi_heads\.box_predictor\.cls_score\.weight \[5, 64\] -> \[10, 64\]"
    ):
        load_checkpoint(model, tmp_path / "a.pth")
    report = load_checkpoint(model, tmp_path / "a.pth", expect="backbone")
    assert len(report.unexpected) == len(report.missing) == 10
    assert "unexpected: 10\n  proposal_generator.rpn_head.conv.weight\n" in str(report)


def test_an_incomplete_backbone_is_never_accepted(tmp_path: Path, plain: FasterRCNN):
    state = plain.state_dict()
    del state["backbone.res3.0.conv1.weight"]
    save_weights(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"1 missing \(backbone\.res3\.0\.conv1\.weight\)"):
        load_checkpoint(published.make(published.WITHOUT_ATTRIBUTES, 3), tmp_path / "a.pth", expect="backbone")


def test_unknown_names(tmp_path: Path, plain: FasterRCNN):
    torch.save({"encoder.weight": torch.zeros(1)}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"a\.pth: .*encoder\.weight"):
        load_checkpoint(plain, tmp_path / "a.pth")
