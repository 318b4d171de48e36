"""Checkpoints that do not fit, or of no known layout."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch

from detector.checkpoint import load_checkpoint, read_weights, save_weights
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import match_ends


def test_the_longest_end_wins_and_two_places_are_an_error():
    tensors = {name: torch.zeros(1) for name in ("conv1.weight", "res2.conv1.weight", "other")}
    model_names = ["body.conv1.weight", "body.res2.conv1.weight", "body.my_other"]
    assert set(match_ends(tensors, model_names, "x")) == {*model_names[:2], "other"}
    with pytest.raises(ValueError, match=r"x: conv1\.weight could be body\.conv1\.weight or head\.conv1\.weight"):
        match_ends(tensors, [*model_names, "head.conv1.weight"], "x")


def test_another_number_of_classes(published: ModuleType, tmp_path: Path, plain: FasterRCNN):
    """A stated mismatch; the backbone alone loads, and the file's heads are listed as unused."""
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
    with pytest.raises(ValueError, match="hold 'everything'; use one of all"):
        load_checkpoint(model, tmp_path / "a.pth", expect="everything")


def test_an_incomplete_backbone_is_never_accepted(published: ModuleType, tmp_path: Path, plain: FasterRCNN):
    state = plain.state_dict()
    del state["backbone.res3.0.conv1.weight"]
    save_weights(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"1 missing \(backbone\.res3\.0\.conv1\.weight\)"):
        load_checkpoint(published.make(published.WITHOUT_ATTRIBUTES, 3), tmp_path / "a.pth", expect="backbone")


def test_unknown_names_and_contents(published: ModuleType, tmp_path: Path, plain: FasterRCNN):
    torch.save({"encoder.weight": torch.zeros(1)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a\.pth: its names are of no known layout \(encoder\.weight"):
        load_checkpoint(plain, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"b\.pkl: expected a state dict of tensors.* 'w' is not a tensor"):
        read_weights(published.write_pickle(tmp_path / "b.pkl", {"w": "text"}))
    with pytest.raises(ValueError, match=r"c\.pkl: expected weights by name, found list"):
        read_weights(published.write_pickle(tmp_path / "c.pkl", [1]))
    with pytest.raises(ValueError, match=r"d\.bin: weights are written as"):
        save_weights({}, tmp_path / "d.bin")
