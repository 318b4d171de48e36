"""Published checkpoints in every layout, written here from tiny detectors: loaded, they give its numbers."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor
from torchvision.models import detection
from torchvision.ops.misc import FrozenBatchNorm2d

from detector.checkpoint import load_checkpoint, save_weights
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.weight_names import CELL_ANCHORS, fold_norms, from_torchvision_detector, match_ends
from detector.yaml_tree import flatten, load_tree
from detector.zoo import PUBLISHED
from tests.detector import published


def test_the_longest_end_wins():
    tensors = {name: torch.zeros(1) for name in ("conv1.weight", "res2.conv1.weight", "other")}
    model_names = ["body.conv1.weight", "body.res2.conv1.weight", "body.my_other"]
    assert set(match_ends(tensors, model_names)) == {*model_names[:2], "other"}


def test_kinds_of_files_and_folders(tmp_path: Path, plain: FasterRCNN):
    """As Detectron2 reads and writes them, bare, and as safetensors."""
    state = plain.state_dict()
    published.save_detector(plain, tmp_path / "run" / "model" / "detector")
    save_weights(state, tmp_path / "torch.pkl")
    torch.save(state, tmp_path / "bare.pth")
    training = {"iteration": 3, "optimizer": {"state": {}}, "matching_heuristics": True}
    torch.save({"model": state, **training}, tmp_path / "model_final.pth")
    for name in ("torch.pkl", "bare.pth", "model_final.pth", "", "run", "run/model", "run/model/detector"):
        model = published.make(published.WITHOUT_ATTRIBUTES, 3)
        assert load_checkpoint(model, tmp_path / name).is_complete
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("box_weights", [[10.0, 10.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
def test_caffe_bottom_up_attention(tmp_path: Path, original: FasterRCNN, box_weights: list[float]):
    state = published.caffe_attention_state(original)
    cells = original.proposal_generator.anchor_generators[0].cell_anchors
    order = [s * published.RATIOS + r for r in range(published.RATIOS) for s in range(published.SIZES)]
    state[f"{CELL_ANCHORS}0"] = cells[order] - torch.tensor([0, 0, 1, 1])
    state["pixel_mean"] = torch.tensor(original.config.input.pixel_mean)
    torch.save({"model": state}, tmp_path / "a.pth")
    tree = copy.deepcopy(published.TREE)
    tree["MODEL"]["ROI_BOX_HEAD"]["BBOX_REG_WEIGHTS"] = box_weights
    model = published.make(tree, 3)
    report = load_checkpoint(model, tmp_path / "a.pth")
    assert report.is_complete and report.layout == "bottom-up attention, Caffe conventions"
    published.assert_same_outputs(original, model)

    state[f"{CELL_ANCHORS}0"] = cells - torch.tensor([0, 0, 1, 1])  # size-major already
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"differs from MODEL\.ANCHOR"):
        load_checkpoint(model, tmp_path / "a.pth")


def test_attributes_may_be_absent_if_asked(tmp_path: Path, original: FasterRCNN):
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
    """Caffe rounds the sides of 16 x 16 pixels at each ratio, halves to even, and multiplies them."""
    caffe = DetectorConfig.from_yaml(PUBLISHED / "bottom_up_attention_caffe.yaml")
    port = DetectorConfig.from_yaml(PUBLISHED / "bottom_up_attention.yaml")
    cells = torch.tensor(caffe.anchors.cell_anchors)
    assert torch.equal(cells[:, :2] + cells[:, 2:], torch.full((12, 2), 16.0))
    sides = cells[:, 2:] - cells[:, :2]
    widths = {ratio: round(16 / ratio**0.5) for ratio in port.anchors.aspect_ratios[0]}
    rounded = [(w, round(w * ratio)) for ratio, w in widths.items()]  # 23 * 0.5 is a half
    assert sides.tolist() == [[w * s / 16, h * s / 16] for s in port.anchors.sizes[0] for w, h in rounded]
    same = msgspec.structs.replace(caffe, anchors=port.anchors, rpn=port.rpn, roi_heads=port.roi_heads)
    assert same == port


def test_the_shipped_config_has_the_shapes_of_the_published_files():
    """Shapes as reported of the published files (py-bottom-up-attention's with an attribute head)."""
    config = DetectorConfig.from_yaml(PUBLISHED / "bottom_up_attention.yaml")
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


GROUP_NORMS = copy.deepcopy(published.FPN_TREE)
GROUP_NORMS["MODEL"]["FPN"]["NORM"] = "GN"
GROUP_NORMS["MODEL"]["ROI_BOX_HEAD"] |= {"NUM_CONV": 1, "CONV_DIM": 8, "NUM_FC": 1, "NORM": "GN"}


def old_buffers(model: FasterRCNN) -> dict[str, np.ndarray]:
    generators = model.proposal_generator.anchor_generators
    cells = {f"{CELL_ANCHORS}{number}": generator.cell_anchors.numpy() for number, generator in enumerate(generators)}
    means = {"pixel_mean": model.config.input.pixel_mean, "pixel_std": model.config.input.pixel_std}
    return cells | {name: np.array(values, np.float32).reshape(3, 1, 1) for name, values in means.items()}


@pytest.mark.parametrize("tree", [published.FPN_TREE, published.TREE], ids=["fpn", "attributes"])
def test_a_model_zoo_file_of_a_mask_rcnn_with_old_buffers(tmp_path: Path, tree: dict):
    """Also the layout of py-bottom-up-attention, which has our attribute head's names."""
    original, model = published.make(tree, 1), published.make(tree, 2)
    mask = {f"roi_heads.mask_head.{name}": np.zeros(2, np.float32) for name in ("mask_fcn1.weight", "predictor.bias")}
    content = {"model": published.arrays(original.state_dict()) | old_buffers(original) | mask, "__author__": "x"}
    report = load_checkpoint(model, published.write_pickle(tmp_path / "model_final_280758.pkl", content))
    assert report.layout == "Detectron2"
    assert not report.missing and report.unexpected == list(mask)
    published.assert_same_outputs(original, model)


@pytest.mark.parametrize(
    ("tree", "norms", "wrap"),
    [
        (published.WITHOUT_ATTRIBUTES, published.NEW_NORMS, "model"),
        (published.WITHOUT_ATTRIBUTES, published.OLD_NORMS, "bare"),
        (published.WITHOUT_ATTRIBUTES, published.OLD_NORMS, "folded"),
        (published.FPN_TREE, published.OLD_NORMS, "blobs"),
        (GROUP_NORMS, published.NEW_NORMS, "blobs"),
    ],
    ids=["c4", "c4_old_norms", "c4_folded_norms", "fpn", "group_norms"],
)
def test_caffe2_blobs(tmp_path: Path, tree: dict, norms: dict[str, str], wrap: str):
    original, model = published.make(tree, 1), published.make(tree, 2)
    if wrap == "folded":  # Detectron saved scale and bias only; the model's own statistics must be replaced
        for name, value in original.state_dict().items():
            if "running" in name:
                value.fill_(0.0 if name.endswith("mean") else 1 - 1e-5)
    blobs = published.caffe2_blobs(original, norms)
    if tree is published.FPN_TREE:
        assert {"fpn_inner_res5_2_sum_w", "fpn_inner_res4_5_sum_lateral_w", "fpn_res2_2_sum_w", "fc6_w"} <= set(blobs)
        assert {"conv_rpn_fpn2_w", "rpn_cls_logits_fpn2_w", "rpn_bbox_pred_fpn2_b"} <= set(blobs)
    mask = {name: np.zeros(2, np.float32) for name in ("_[mask]_fcn1_w", "mask_fcn_logits_w", "conv5_mask_w")}
    blobs |= mask | {"conv1_b": np.zeros(8, np.float32), "fc1000_w": np.zeros((10, 64), np.float32)}
    folded = {name: value for name, value in blobs.items() if not name.endswith(("_rm", "_riv"))}
    content = {
        "bare": blobs,
        "folded": folded,
        "model": {"model": blobs, "__author__": "Caffe2", "matching_heuristics": True},
        "blobs": {"blobs": {**blobs, "conv1_w_momentum": blobs["conv1_w"]}, "cfg": "text"},
    }
    report = load_checkpoint(model, published.write_pickle(tmp_path / "a.pkl", content[wrap]))
    assert report.layout == "Caffe2"
    assert set(report.unexpected) == {*mask, "fc1000.weight", "stem.conv1.bias"}
    assert not report.missing and not report.mismatched
    published.assert_same_outputs(original, model)


def trunk_content(trunk: dict[str, Tensor], style: str) -> dict:
    """ImageNet files: `R-50.pkl` has Caffe2's names, `X-101-32x8d.pkl` Detectron2's."""
    trunk = {name: value.numpy() for name, value in trunk.items()}
    if style == "caffe2":
        blobs = {published.caffe2_name(f"backbone.{n}", published.NEW_NORMS): value for n, value in trunk.items()}
        return {"model": blobs | {"fc1000_w": np.zeros((2, 2))}, "__author__": "Caffe2"}
    names = trunk | {"stem.fc.weight": np.zeros((2, 2), np.float32)}
    return {"model": names, "__author__": "torchvision", "matching_heuristics": True}


@pytest.mark.parametrize("style", ["caffe2", "detectron2"])
@pytest.mark.parametrize(
    ("tree", "prefixes"),
    [(published.FPN_TREE, ("backbone.bottom_up.",)), (published.WITHOUT_ATTRIBUTES, ("backbone.", "roi_heads.res5."))],
    ids=["fpn", "c4"],
)
def test_imagenet_files_fill_the_backbone_alone(tmp_path: Path, tree: dict, prefixes: tuple[str, ...], style: str):
    original, model = published.make(tree, 1).state_dict(), published.make(tree, 2)
    before = copy.deepcopy(model.state_dict())
    trunk = {
        published.without_prefix(name.replace("bottom_up.", "")): value
        for name, value in original.items()
        if name.startswith(prefixes)
    }
    path = published.write_pickle(tmp_path / "R-50.pkl", trunk_content(trunk, style))
    with pytest.raises(
        UserError, match=r"R-50\.pkl does not fit .*expect no_attributes, no_predictor, no_mask_head or backbone"
    ):
        load_checkpoint(model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    report = load_checkpoint(model, path, expect="backbone")
    assert len(report.unexpected) == 1
    assert sorted(report.missing) == sorted(name for name in before if not name.startswith(prefixes))
    for name, value in model.state_dict().items():
        assert torch.equal(value, original[name] if name.startswith(prefixes) else before[name]), name


def test_a_classifier_of_torchvision_that_was_trained_in_parallel_with_other_conventions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """BGR images with the stride in the 1x1 convolutions: everything fits, and every feature would be wrong."""
    state = torchvision.models.resnet50(weights=None).state_dict()
    path = tmp_path / "resnet50-0676ba61.pth"
    torch.save({f"module.{name}": value for name, value in state.items()}, path)
    model = FasterRCNN(DetectorConfig.from_yaml({"MODEL": {"ROI_HEADS": {"NUM_CLASSES": 2}}}))
    report = load_checkpoint(model, path, expect="backbone")
    assert (report.layout, report.unexpected) == ("torchvision", ["fc.weight", "fc.bias"])
    assert torch.equal(model.backbone.res3[1].conv2.weight, state["layer2.1.conv2.weight"])
    [message] = [record.getMessage() for record in caplog.records]
    assert "torchvision/resnet50-imagenet1k_v1 was trained with INPUT.FORMAT RGB" in message
    assert "MODEL.RESNETS.STRIDE_IN_1X1 False" in message and "torchvision_R_50_C4.yaml" in message


def test_a_classifier_fills_the_trunk_of_a_mobilenet(tmp_path: Path):
    flat = flatten(load_tree(PUBLISHED / "torchvision_mobilenet_v3_large_320_fpn.yaml"))
    mobilenet = FasterRCNN(DetectorConfig.from_flat(flat | {"MODEL.ROI_BOX_HEAD.FC_DIM": 16}))
    classifier = torchvision.models.mobilenet_v3_large(weights=None).state_dict()
    torch.save(classifier, tmp_path / "mobilenet_v3_large.pth")
    report = load_checkpoint(mobilenet, tmp_path / "mobilenet_v3_large.pth", expect="backbone")
    assert report.layout == "torchvision"
    assert all(name.startswith("classifier.") or "num_batches" in name for name in report.unexpected)
    own = {name: value for name, value in mobilenet.state_dict().items() if name.startswith("backbone.body.")}
    assert len(own) > 200
    for name, value in own.items():
        assert torch.equal(value, classifier[name.replace("backbone.body.", "features.")])


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "fasterrcnn_mobilenet_v3_large_fpn"])
def test_files_from_before_the_nested_blocks(name: str):
    """The published files have names that torchvision itself changes when it loads them."""
    with torch.device("meta"):
        state = getattr(detection, name)(weights=None, weights_backbone=None).state_dict()
    old = {re.sub(r"_blocks\.(\d)\.0\.", r"_blocks.\1.", key): value for key, value in state.items()}
    old = {key.replace("rpn.head.conv.0.0.", "rpn.head.conv."): value for key, value in old.items()}
    assert {"backbone.fpn.layer_blocks.1.bias", "rpn.head.conv.weight"} <= old.keys()
    new, converted = from_torchvision_detector(state), from_torchvision_detector(old)
    assert new.keys() == converted.keys()
    assert all(new[key] is converted[key] for key in new if "box_predictor" not in key)


def test_norms_of_published_weights_that_were_trained_without_epsilon_are_folded(tmp_path: Path):
    state = torchvision.models.resnet50(weights=None).state_dict()
    state["layer1.0.bn1.weight"].fill_(3)
    state["layer1.0.bn1.running_var"].fill_(4)
    trunk = {f"backbone.body.{name}": value for name, value in state.items() if not name.startswith("fc.")}
    widths = {"STEM_OUT_CHANNELS": 64, "RES2_OUT_CHANNELS": 256, "WIDTH_PER_GROUP": 64}
    flat = flatten(published.FPN_TREE) | {f"MODEL.RESNETS.{key}": value for key, value in widths.items()}
    model = FasterRCNN(DetectorConfig.from_flat(flat))
    for name, weight in (("fasterrcnn_resnet50_fpn_coco-258fb6c6.pth", 1.5), ("own.pth", 3)):
        torch.save(trunk, tmp_path / name)
        load_checkpoint(model, tmp_path / name, expect="backbone")
        assert model.backbone.bottom_up.res2[0].conv1.norm.weight.tolist() == [weight] * 64


def test_norms_without_epsilon_keep_their_values_exactly():
    """Dead channels, too, whose variance is far below 1e-5."""
    torch.manual_seed(0)
    norm = FrozenBatchNorm2d(6, eps=0.0)
    with torch.no_grad():
        for value in norm.state_dict().values():
            value.copy_(torch.randn(6))
        norm.running_var.copy_(torch.tensor([2.0, 0.3, 1e-3, 1e-5, 1e-7, 1e-20]))
    folded = fold_norms({f"conv1.norm.{name}": value for name, value in norm.state_dict().items()}, 0.0)
    other = FrozenBatchNorm2d(6)  # epsilon 1e-5
    other.load_state_dict({name.removeprefix("conv1.norm."): value for name, value in folded.items()})
    x = torch.randn(2, 6, 4, 5)
    assert torch.equal(other(x), norm(x))
    assert not torch.allclose(x, norm(x))
