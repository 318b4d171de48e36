"""Checkpoints with torchvision's names; VL-BERT's published detector is one."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torchvision
from torch import Tensor

from detector.checkpoint import load_checkpoint
from detector.config import DetectorConfig, flatten, load_tree
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from detector.structures import ImageBatch
from detector.weight_names import to_detector_names
from detector.zoo import PUBLISHED
from e2e_vl.extraction.regions import find_detector


@pytest.mark.parametrize("name", ["resnet.pth", "resnet101-pt-vgbua-0000.model", "data_parallel.pth"])
def test_torchvision_names_fill_the_backbone(published: ModuleType, tmp_path: Path, plain: FasterRCNN, name: str):
    state = {
        published.torchvision_name(key): value for key, value in plain.state_dict().items() if published.is_trunk(key)
    }
    assert {"conv1.weight", "bn1.running_mean", "layer4.0.downsample.1.bias", "layer3.5.bn3.weight"} <= set(state)
    state |= {"bn1.num_batches_tracked": torch.tensor(3), "fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}
    if name == "data_parallel.pth":
        state = {f"module.{key}": value for key, value in state.items()}
    torch.save(state, tmp_path / name)
    model = published.make(published.WITHOUT_ATTRIBUTES, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"10 missing \(proposal_generator.*expect no_attributes or backbone"):
        load_checkpoint(model, tmp_path / name)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    report = load_checkpoint(model, tmp_path / name, expect="backbone")
    assert report.layout == "torchvision"
    assert sorted(report.unexpected) == ["fc.bias", "fc.weight"]
    after = model.state_dict()
    assert all(
        torch.equal(after[key], (plain.state_dict() if published.is_trunk(key) else before)[key]) for key in after
    )
    assert sorted(report.missing) == sorted(key for key in after if not published.is_trunk(key))


def test_names_of_torchvision_itself(published: ModuleType):
    """Real torchvision modules: the whole of a ResNet-50 finds its place in the shipped C4 config."""
    with torch.device("meta"):
        state = torchvision.models.resnet50().state_dict()
        wanted = {k: v.shape for k, v in torchvision_targets()}
    renamed, _ = to_detector_names(state, wanted, DetectorConfig(), "r50.pth")
    shapes = {k: v.shape for k, v in renamed.items() if not k.endswith("num_batches_tracked")}
    assert {k: v for k, v in shapes.items() if published.is_trunk(k)} == {
        k: v for k, v in wanted.items() if published.is_trunk(k)
    }
    assert {k for k in shapes if not published.is_trunk(k)} == {"fc.weight", "fc.bias"}


@pytest.fixture(scope="module")
def mobilenet() -> FasterRCNN:
    """A trunk of the published size below a small box head."""
    flat = flatten(load_tree(PUBLISHED / "torchvision_mobilenet_v3_large_320_fpn.yaml"))
    small = {"MODEL.ROI_HEADS.NUM_CLASSES": 3, "MODEL.ROI_BOX_HEAD.FC_DIM": 16, "INPUT.MIN_SIZE_TEST": 64}
    return FasterRCNN(DetectorConfig.from_flat(flat | small))


def test_a_classifier_fills_the_trunk_of_a_mobilenet(tmp_path: Path, mobilenet: FasterRCNN):
    torch.manual_seed(0)
    classifier = torchvision.models.mobilenet_v3_large(weights=None).state_dict()
    torch.save(classifier, tmp_path / "mobilenet_v3_large.pth")
    report = load_checkpoint(mobilenet, tmp_path / "mobilenet_v3_large.pth", expect="backbone")
    assert report.layout == "torchvision"
    assert all(name.startswith("classifier.") or "num_batches" in name for name in report.unexpected)
    own = {name: value for name, value in mobilenet.state_dict().items() if name.startswith("backbone.body.")}
    assert len(own) > 200
    for name, value in own.items():
        assert torch.equal(value, classifier[name.replace("backbone.body.", "features.")])


def test_a_mobilenet_trains_above_its_frozen_stages(mobilenet: FasterRCNN):
    pixels = torch.rand(1, 3, 64, 96)
    size = torch.tensor([[64, 96]])
    images = ImageBatch(pixels, size, size, ["image"])
    regions = mobilenet.train()(images, [torch.tensor([[4.0, 4.0, 60.0, 50.0]])])
    regions.features[0].square().sum().backward()
    trained = {name.split(".")[2] for name, value in mobilenet.named_parameters() if value.grad is not None}
    # torchvision's trainable_backbone_layers=3 leaves blocks 0 .. 6 as they are
    assert {"7", "16", "inner_blocks"} <= trained and not {str(number) for number in range(7)} & trained
    with pytest.raises(ValueError, match=r"A MobileNet has no activation checkpointing; switch train\."):
        mobilenet.recompute_activations()


def test_a_file_by_its_published_name_needs_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The way that the message of a failed download names; settings, rounding and class names come from the table."""
    torch.manual_seed(0)
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    file = tmp_path / "fasterrcnn_mobilenet_v3_large_320_fpn-907ea3f9.pth"
    torch.save(model.state_dict(), file)
    found = find_detector(file)
    assert found.resize == ResizeRule(320, 640, "torchvision")
    assert found.detector.class_names[:2] == ("person", "bicycle") and found.detector.num_classes == 90
    ours, theirs = found.detector.state_dict(), model.state_dict()
    assert torch.equal(ours["roi_heads.box_head.fc1.weight"], theirs["roi_heads.box_head.fc6.weight"])


def test_other_conventions_than_those_of_the_weights_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """BGR images with the stride in the 1x1 convolutions: everything fits, and every feature would be wrong."""
    torch.save(torchvision.models.resnet50(weights=None).state_dict(), tmp_path / "resnet50-0676ba61.pth")
    tree = {"MODEL": {"ROI_HEADS": {"NUM_CLASSES": 2}}}
    load_checkpoint(FasterRCNN(DetectorConfig.from_yaml(tree)), tmp_path / "resnet50-0676ba61.pth", expect="backbone")
    [message] = [record.getMessage() for record in caplog.records]
    assert "torchvision/resnet50-imagenet1k_v1 was made with INPUT.FORMAT RGB" in message
    assert "MODEL.RESNETS.STRIDE_IN_1X1 False" in message and "torchvision_R_50_C4.yaml" in message


@pytest.mark.parametrize("change", ["no norm", "no axis"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, mobilenet: FasterRCNN, change: str):
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    state = model.state_dict()
    file = tmp_path / ("fasterrcnn_resnet50_fpn_coco-258fb6c6.pth" if change == "no norm" else "weights.pth")
    if change == "no norm":  # of version 1, whose norms are folded
        state = {"backbone.body.layer1.0.bn1.running_var": torch.ones(4)}
    else:
        state["roi_heads.box_predictor.cls_score.bias"] = torch.tensor(1.0)
    torch.save(state, file)
    with pytest.raises(ValueError, match=rf"{file.name}: the file is damaged or has another layout") as caught:
        load_checkpoint(mobilenet, file)
    assert "\n" not in str(caught.value)


def torchvision_targets() -> list[tuple[str, Tensor]]:
    return list(FasterRCNN(DetectorConfig()).state_dict().items())
