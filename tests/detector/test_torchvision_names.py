"""Real torchvision detectors in Detectron2's names and conventions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.ops.misc import FrozenBatchNorm2d

from detector.config import DetectorConfig, flatten, load_tree
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import (
    FOLDED_VARIANCE,
    detector_names,
    fold_norms,
    from_torchvision_detector,
    is_torchvision_detector,
    trunk_name,
)
from detector.zoo import PUBLISHED

CLASSES = 3  # and background
SOURCE = Path("file.pth")
BLOCKS = {2: 3, 3: 4, 4: 6, 5: 3}
NORM = ("weight", "bias", "running_mean", "running_var")
State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def state_of(name: str) -> State:
    """Every number of the box predictor is different."""
    with torch.device("meta"):
        model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=CLASSES + 1)
    state = dict(model.state_dict())
    for layer, rows in (("cls_score", CLASSES + 1), ("bbox_pred", 4 * (CLASSES + 1))):
        state[f"roi_heads.box_predictor.{layer}.bias"] = torch.arange(float(rows))
        state[f"roi_heads.box_predictor.{layer}.weight"] = torch.arange(rows * 1024.0).reshape(rows, 1024)
    return state


@pytest.fixture(scope="module")
def version_1() -> State:
    return state_of("fasterrcnn_resnet50_fpn")


@pytest.fixture(scope="module")
def version_2() -> State:
    return state_of("fasterrcnn_resnet50_fpn_v2")


def conv(name: str, shape: tuple[int, ...], *, norm: bool) -> Shapes:
    rest = {f"norm.{key}": shape[:1] for key in NORM} if norm else {"bias": shape[:1]}
    return {f"{name}.{key}": size for key, size in {"weight": shape, **rest}.items()}


def detectron2_shapes(*, fpn_norm: bool, rpn_convs: int, box_convs: int, box_fcs: int) -> Shapes:
    """All names and shapes of Detectron2's R50-FPN with these heads, written down independently."""
    shapes = conv("backbone.bottom_up.stem.conv1", (64, 3, 7, 7), norm=True)
    before = 64
    for stage, blocks in BLOCKS.items():
        width, out = 64 * 2 ** (stage - 2), 256 * 2 ** (stage - 2)
        for block in range(blocks):
            name = f"backbone.bottom_up.res{stage}.{block}"
            if block == 0:
                shapes |= conv(f"{name}.shortcut", (out, before, 1, 1), norm=True)
            shapes |= conv(f"{name}.conv1", (width, before, 1, 1), norm=True)
            shapes |= conv(f"{name}.conv2", (width, width, 3, 3), norm=True)
            shapes |= conv(f"{name}.conv3", (out, width, 1, 1), norm=True)
            before = out
        shapes |= conv(f"backbone.fpn_lateral{stage}", (256, out, 1, 1), norm=fpn_norm)
        shapes |= conv(f"backbone.fpn_output{stage}", (256, 256, 3, 3), norm=fpn_norm)
    rpn = "proposal_generator.rpn_head"
    for name in ["conv"] if rpn_convs == 1 else [f"conv.conv{index}" for index in range(rpn_convs)]:
        shapes |= conv(f"{rpn}.{name}", (256, 256, 3, 3), norm=False)
    shapes |= conv(f"{rpn}.objectness_logits", (3, 256, 1, 1), norm=False)
    shapes |= conv(f"{rpn}.anchor_deltas", (12, 256, 1, 1), norm=False)
    for index in range(1, box_convs + 1):
        shapes |= conv(f"roi_heads.box_head.conv{index}", (256, 256, 3, 3), norm=True)
    for index in range(1, box_fcs + 1):
        columns = 256 * 7 * 7 if index == 1 else 1024
        shapes |= conv(f"roi_heads.box_head.fc{index}", (1024, columns), norm=False)
    shapes |= conv("roi_heads.box_predictor.cls_score", (CLASSES + 1, 1024), norm=False)
    return shapes | conv("roi_heads.box_predictor.bbox_pred", (4 * CLASSES, 1024), norm=False)


def shapes_of(tensors: State) -> Shapes:
    return {key: tuple(value.shape) for key, value in tensors.items() if not key.endswith("num_batches_tracked")}


def test_every_tensor_of_version_1_finds_its_place(version_1: State) -> None:
    converted = from_torchvision_detector(version_1, SOURCE)
    assert shapes_of(converted) == detectron2_shapes(fpn_norm=False, rpn_convs=1, box_convs=0, box_fcs=2)


def test_every_tensor_of_version_2_finds_its_place(version_2: State) -> None:
    converted = from_torchvision_detector(version_2, SOURCE)
    assert shapes_of(converted) == detectron2_shapes(fpn_norm=True, rpn_convs=2, box_convs=4, box_fcs=1)
    # The layer is chosen by its place: torchvision's RoI head is conv, conv, conv, conv, flatten, fc.
    assert converted["roi_heads.box_head.conv4.weight"] is version_2["roi_heads.box_head.3.0.weight"]
    assert converted["roi_heads.box_head.conv4.norm.bias"] is version_2["roi_heads.box_head.3.1.bias"]
    assert converted["roi_heads.box_head.fc1.weight"] is version_2["roi_heads.box_head.5.weight"]
    assert converted["proposal_generator.rpn_head.conv.conv1.bias"] is version_2["rpn.head.conv.1.0.bias"]
    assert converted["backbone.fpn_lateral3.norm.weight"] is version_2["backbone.fpn.inner_blocks.1.1.weight"]
    assert converted["backbone.fpn_output5.weight"] is version_2["backbone.fpn.layer_blocks.3.0.weight"]


def test_files_from_before_the_nested_blocks(version_1: State) -> None:
    """The published file of version 1 has names that torchvision itself changes when it loads it."""
    old = {}
    for name, value in version_1.items():
        for block in ("inner_blocks", "layer_blocks"):
            for index in range(4):
                name = name.replace(f"{block}.{index}.0.", f"{block}.{index}.")
        old[name.replace("rpn.head.conv.0.0.", "rpn.head.conv.")] = value
    assert {"backbone.fpn.layer_blocks.2.bias", "rpn.head.conv.weight"} <= old.keys()
    new, converted = (from_torchvision_detector(state, SOURCE) for state in (version_1, old))
    assert new.keys() == converted.keys()
    assert all(new[name] is converted[name] for name in new if "box_predictor" not in name)


def test_a_mobilenet_keeps_the_names_of_its_trunk() -> None:
    """Also a file from before the nested blocks, as the published ones are."""
    state = state_of("fasterrcnn_mobilenet_v3_large_fpn")
    flat = flatten(load_tree(PUBLISHED / "torchvision_mobilenet_v3_large_fpn.yaml"))
    with torch.device("meta"):
        detector = FasterRCNN(DetectorConfig.from_flat(flat | {"MODEL.ROI_HEADS.NUM_CLASSES": CLASSES}))
    wanted = shapes_of(detector.state_dict())
    converted = from_torchvision_detector(state, SOURCE)
    assert shapes_of(converted) == wanted
    old = {
        name.replace("_blocks.0.0.", "_blocks.0.").replace("_blocks.1.0.", "_blocks.1."): state[name] for name in state
    }
    old = {name.replace("rpn.head.conv.0.0.", "rpn.head.conv."): value for name, value in old.items()}
    assert len(old.keys() - state.keys()) == 10
    assert shapes_of(from_torchvision_detector(old, SOURCE)) == wanted


def test_background_is_last_and_has_no_box(version_1: State) -> None:
    converted = from_torchvision_detector(version_1, SOURCE)
    assert converted["roi_heads.box_predictor.cls_score.bias"].tolist() == [1, 2, 3, 0]
    assert converted["roi_heads.box_predictor.cls_score.weight"][:, 0].tolist() == [1024, 2048, 3072, 0]
    assert converted["roi_heads.box_predictor.bbox_pred.bias"].tolist() == list(range(4, 16))
    assert converted["roi_heads.box_predictor.bbox_pred.weight"][0, :2].tolist() == [4096, 4097]


def test_predictor_whose_layers_do_not_fit(version_1: State) -> None:
    broken = version_1 | {"roi_heads.box_predictor.bbox_pred.bias": torch.zeros(12)}
    with pytest.raises(ValueError, match=r"file\.pth: roi_heads\.box_predictor\.bbox_pred has 12 rows for 4 classes"):
        from_torchvision_detector(broken, SOURCE)


def test_names_of_other_parts_are_kept() -> None:
    names = ["roi_heads.mask_head.mask_fcn1.weight", "backbone.body.layer1.0.bn1.num_batches_tracked"]
    assert detector_names(names) == {
        names[0]: names[0],
        names[1]: "backbone.bottom_up.res2.0.conv1.norm.num_batches_tracked",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer1.0.bn1.weight", "res2.0.conv1.norm.weight"),
        ("layer4.2.conv3.weight", "res5.2.conv3.weight"),
        ("layer2.0.downsample.0.weight", "res3.0.shortcut.weight"),
        ("layer2.0.downsample.1.running_var", "res3.0.shortcut.norm.running_var"),
        ("conv1.weight", "stem.conv1.weight"),
        ("bn1.bias", "stem.conv1.norm.bias"),
        ("fc.weight", "fc.weight"),
    ],
)
def test_trunk_names(name: str, expected: str) -> None:
    assert trunk_name(name) == expected


def test_only_torchvision_detectors_are_recognised(version_1: State, version_2: State) -> None:
    assert is_torchvision_detector(version_1)
    assert is_torchvision_detector(version_2)
    assert not is_torchvision_detector(from_torchvision_detector(version_1, SOURCE))
    assert not is_torchvision_detector(["layer1.0.conv1.weight", "backbone.res2.0.conv1.weight"])


def test_norms_without_epsilon_keep_their_values_exactly() -> None:
    """Dead channels, too, whose variance is far below 1e-5."""
    torch.manual_seed(0)
    norm = FrozenBatchNorm2d(6, eps=0.0)
    with torch.no_grad():
        for name in NORM:
            getattr(norm, name).copy_(torch.randn(6))
        norm.running_var.copy_(torch.tensor([2.0, 0.3, 1e-3, 1e-5, 1e-7, 1e-20]))
    state = {f"conv1.norm.{name}": value for name, value in norm.state_dict().items()}
    folded = fold_norms(state, 0.0)
    assert folded.keys() == state.keys()
    assert (folded["conv1.norm.running_var"] + 1e-5).tolist() == [1.0] * 6
    assert folded["conv1.norm.running_var"][0].item() == pytest.approx(FOLDED_VARIANCE)

    other = nn.Sequential()
    other.add_module("norm", FrozenBatchNorm2d(6))  # epsilon 1e-5
    other.load_state_dict({name.removeprefix("conv1."): value for name, value in folded.items()})
    x = torch.randn(2, 6, 4, 5)
    assert torch.equal(other(x), norm(x))
    assert not torch.allclose(x, norm(x))


def test_norms_are_folded_on_request(version_1: State) -> None:
    name = "backbone.body.layer1.0.bn1."
    state = version_1 | {f"{name}weight": torch.full((64,), 3.0), f"{name}running_var": torch.full((64,), 4.0)}
    converted = from_torchvision_detector(state, SOURCE)
    new = "backbone.bottom_up.res2.0.conv1.norm."
    assert converted[f"{new}weight"] is state[f"{name}weight"]
    assert converted[f"{new}running_var"] is state[f"{name}running_var"]
    folded = from_torchvision_detector(state, SOURCE, norm_eps=0.0)
    assert folded[f"{new}weight"].tolist() == [1.5] * 64
    assert folded[f"{new}running_var"].tolist() == pytest.approx([1.0] * 64, abs=2e-5)
    assert folded.keys() == converted.keys()
