"""Checkpoints of bottom-up attention: Caffe conventions, attribute heads, the shipped configs."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch

from detector.checkpoint import load_checkpoint, save_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import CELL_ANCHORS


@pytest.mark.parametrize("box_weights", [[10.0, 10.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
def test_caffe_bottom_up_attention(
    published: ModuleType, tmp_path: Path, original: FasterRCNN, box_weights: list[float]
):
    state = published.caffe_attention_state(original)
    cells = original.proposal_generator.anchor_generators[0].cell_anchors
    order = [s * published.RATIOS + r for r in range(published.RATIOS) for s in range(published.SIZES)]
    state[f"{CELL_ANCHORS}0"] = cells[order] - torch.tensor([0, 0, 1, 1])
    torch.save({"model": state}, tmp_path / "a.pth")
    tree = copy.deepcopy(published.TREE)
    tree["MODEL"]["ROI_BOX_HEAD"]["BBOX_REG_WEIGHTS"] = box_weights
    model = published.make(tree, 3)
    report = load_checkpoint(model, tmp_path / "a.pth")
    assert report.is_complete and report.layout == "bottom-up attention, Caffe conventions"
    published.assert_same_outputs(original, model)

    state[f"{CELL_ANCHORS}0"] = cells - torch.tensor([0, 0, 1, 1])  # size-major already
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"contradicts MODEL\.ANCHOR"):
        load_checkpoint(model, tmp_path / "a.pth")
    tree["MODEL"]["ANCHOR_GENERATOR"]["SIZES"] = [[32, 64, 128]]
    with pytest.raises(ValueError, match=r"a\.pth: it has 6 anchors per cell.* 3 sizes x 3 ratios"):
        load_checkpoint(published.make(tree, 3), tmp_path / "a.pth")


def test_attributes_may_be_absent_if_asked(published: ModuleType, tmp_path: Path, original: FasterRCNN):
    with_head, without = tmp_path / "with.safetensors", tmp_path / "without.pth"
    save_weights(original.state_dict(), with_head)
    head = ("cls_embedding", "fc_attr", "attr_score")
    save_weights({k: v for k, v in original.state_dict().items() if k.split(".")[2] not in head}, without)
    small, large = published.make(published.WITHOUT_ATTRIBUTES, 3), published.make(published.TREE, 3)
    with pytest.raises(ValueError, match="5 unexpected"):
        load_checkpoint(small, with_head)
    assert len(load_checkpoint(small, with_head, expect="no_attributes").unexpected) == 5
    with pytest.raises(ValueError, match="5 missing"):
        load_checkpoint(large, without)
    assert len(load_checkpoint(large, without, expect="no_attributes").missing) == 5
    expected, found = published.outputs(small), published.outputs(large)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_shipped_caffe_anchors():
    """Caffe's rounded anchors are the ideal ones around (8, 8) within 7 %, in the same order."""
    folder = Path(__file__).parents[2] / "configs" / "detector"
    caffe = DetectorConfig.from_yaml(folder / "bottom_up_attention_caffe.yaml")
    port = DetectorConfig.from_yaml(folder / "bottom_up_attention.yaml")
    cells = torch.tensor(caffe.anchors.cell_anchors)
    assert torch.equal(cells[:, :2] + cells[:, 2:], torch.full((12, 2), 16.0))
    sides = cells[:, 2:] - cells[:, :2]
    ideal = [(s / r**0.5, s * r**0.5) for s in port.anchors.sizes[0] for r in port.anchors.aspect_ratios[0]]
    torch.testing.assert_close(sides, torch.tensor(ideal), rtol=0.07, atol=0)
    same = dataclasses.replace(caffe, anchors=port.anchors, rpn=port.rpn, roi_heads=port.roi_heads)
    assert same == port


@pytest.mark.parametrize("name", ["bottom_up_attention", "bottom_up_attention_caffe"])
def test_shipped_configs_have_the_shapes_of_the_published_files(published: ModuleType, name: str):
    """Shapes as reported of the published files (py-bottom-up-attention's with an attribute head)."""
    config = DetectorConfig.from_yaml(Path(__file__).parents[2] / "configs" / "detector" / f"{name}.yaml")
    with torch.device("meta"):
        shapes = {key: list(value.shape) for key, value in FasterRCNN(config).state_dict().items()}
    expected = {
        f"{published.RPN}.conv": [512, 1024, 3, 3],
        f"{published.RPN}.objectness_logits": [12, 512, 1, 1],
        f"{published.RPN}.anchor_deltas": [48, 512, 1, 1],
        f"{published.PREDICTOR}.cls_score": [1601, 2048],
        f"{published.PREDICTOR}.bbox_pred": [6400, 2048],
        f"{published.PREDICTOR}.cls_embedding": [1601, 256],
        f"{published.PREDICTOR}.fc_attr": [512, 2304],
        f"{published.PREDICTOR}.attr_score": [401, 512],
    }
    assert {key: shapes[f"{key}.weight"] for key in expected} == expected
    assert "backbone.res4.22.conv3.norm.running_var" in shapes and "backbone.res4.23.conv1.weight" not in shapes
