"""Feature pyramids, and an FPN detector as a whole where it differs from a C4 detector."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detector.backbones import FPN
from detector.config import DetectorConfig, load_tree
from detector.faster_rcnn import FasterRCNN
from detector.roi_pooler import to_rois
from detector.structures import DetectionTargets, ImageBatch, Regions

STAGES = ["res2", "res3", "res4", "res5"]


def make_pyramid(stages: list[str] = STAGES, **keys) -> FPN:
    flat = {
        "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone",
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.RESNETS.DEPTH": 18,
        "MODEL.RESNETS.NORM": "GN",
        "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 8,
        "MODEL.RESNETS.OUT_FEATURES": STAGES,
        "MODEL.FPN.IN_FEATURES": stages,
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.RPN.IN_FEATURES": ["p5"],
        "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
        "MODEL.ROI_HEADS.IN_FEATURES": ["p5"],
        "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
        "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    }
    torch.manual_seed(0)
    return FPN(DetectorConfig.from_flat(flat | keys))


@pytest.mark.parametrize("fuse", ["sum", "avg"])
@torch.no_grad()
def test_levels_are_sums_from_the_top_down(fuse: str):
    model = make_pyramid(**{"MODEL.FPN.FUSE_TYPE": fuse}).eval()
    pixels = torch.randn(1, 3, 64, 96)
    maps, below = model(pixels), model.bottom_up(pixels)
    assert list(maps) == ["p2", "p3", "p4", "p5", "p6"]
    assert [list(level.shape[1:]) for level in maps.values()] == [
        [16, 16, 24],
        [16, 8, 12],
        [16, 4, 6],
        [16, 2, 3],
        [16, 1, 2],
    ]
    top = model.fpn_lateral5(below["res5"])
    torch.testing.assert_close(maps["p5"], model.fpn_output5(top))
    larger = top.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    merged = (model.fpn_lateral4(below["res4"]) + larger) / (2 if fuse == "avg" else 1)
    torch.testing.assert_close(maps["p4"], model.fpn_output4(merged))
    torch.testing.assert_close(maps["p6"], maps["p5"][:, :, ::2, ::2])


def test_fewer_inputs_give_fewer_levels():
    model = make_pyramid(STAGES[1:])
    assert not hasattr(model, "fpn_lateral2")
    assert list(model(torch.randn(1, 3, 32, 32))) == ["p3", "p4", "p5", "p6"]


def test_a_norm_takes_the_place_of_the_bias():
    names = {name for name in make_pyramid(**{"MODEL.FPN.NORM": "GN"}).state_dict() if name.startswith("fpn_output2")}
    assert names == {"fpn_output2.weight", "fpn_output2.norm.weight", "fpn_output2.norm.bias"}
    assert {name for name in make_pyramid().state_dict() if name.startswith("fpn_lateral2")} == {
        "fpn_lateral2.weight",
        "fpn_lateral2.bias",
    }


@pytest.mark.parametrize("depth", [18, 34])
def test_shallow_networks_have_basic_blocks_in_all_stages(depth: int):
    res5 = make_pyramid(**{"MODEL.RESNETS.DEPTH": depth}).bottom_up.res5
    assert len(res5) == {18: 2, 34: 3}[depth]
    assert all(not hasattr(block, "conv3") for block in res5)


def test_the_gradient_of_every_level_reaches_the_stem():
    model = make_pyramid()
    for name in ("p2", "p3", "p4", "p5", "p6"):
        model.zero_grad()
        F.relu(model(torch.randn(1, 3, 64, 64))[name]).sum().backward()
        assert model.bottom_up.stem.conv1.weight.grad.any(), name


CONFIG = Path(__file__).parents[2] / "configs" / "detector" / "tiny_fpn.yaml"
SIZES = [(100, 130), (90, 120)]  # no multiples of 32
LOSSES = {"loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg", "loss_attribute"}


def make(**keys: Any) -> FasterRCNN:
    tree = copy.deepcopy(load_tree(CONFIG))
    tree["MODEL"]["RESNETS"]["NORM"] = tree["MODEL"]["FPN"]["NORM"] = "GN"  # the same for one image and for many
    for key, value in keys.items():
        node = tree["MODEL"]
        *parents, leaf = key.split("__")
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    torch.manual_seed(0)
    return FasterRCNN(DetectorConfig.from_yaml(tree))


@pytest.fixture
def images() -> ImageBatch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.zeros(2, 3, 100, 130)
    for image, (height, width) in zip(pixels, SIZES, strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, generator=generator)
    return ImageBatch(pixels, torch.tensor(SIZES), torch.tensor(SIZES), ["first.jpg", "second.jpg"])


@pytest.fixture
def boxes() -> list[Tensor]:
    return [
        torch.tensor([[2.0, 3, 30, 40], [40, 10, 79, 60], [0, 0, 130, 100]]),
        torch.tensor([[10.0, 5, 110, 85]]),
    ]


@pytest.fixture
def targets(boxes: list[Tensor]) -> DetectionTargets:
    attributes = [torch.tensor([[0, 4], [2, -1], [-1, -1]]), torch.tensor([[1, -1]])]
    return DetectionTargets(boxes, [torch.tensor([0, 1, 2]), torch.tensor([3])], attributes)


def total(regions: Regions) -> Tensor:
    return sum(loss.mean for loss in regions.losses.values())


@pytest.mark.parametrize("norm", ["BN", "GN", "FrozenBN"])
def test_training_on_own_proposals_reaches_every_parameter(images: ImageBatch, targets: DetectionTargets, norm: str):
    model = make(RESNETS__NORM=norm, FPN__NORM="" if norm == "FrozenBN" else norm).train()
    calls = []
    model.roi_heads.box_head.register_forward_hook(lambda module, args, out: calls.append(len(out.region)))
    regions = model(images, None, targets, whole_image=True)
    assert calls == [24 + 24 + 2]
    assert set(regions.losses) == LOSSES
    total(regions).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert model.backbone.bottom_up.stem.conv1.weight.grad.any()


@pytest.mark.parametrize(("feature", "dim"), [("head", 256), ("fc6", 256), ("fc7", 256), ("mean", 32)])
def test_given_boxes_with_each_region_feature(images: ImageBatch, boxes: list[Tensor], feature: str, dim: int):
    plain, model = make().eval(), make(ROI_BOX_HEAD__REGION_FEATURE=feature).eval()
    regions = model(images, boxes, whole_image=True)
    assert [rows.shape for rows in regions.features] == [(4, dim), (2, dim)]
    assert model.feature_dim == dim
    expected = plain(images, boxes, whole_image=True)
    for name in ("class_logits", "attribute_logits"):  # the predictor reads the last layer in any case
        torch.testing.assert_close(getattr(regions, name), getattr(expected, name))
    torch.cat(regions.features).sum().backward()
    assert model.backbone.bottom_up.stem.conv1.weight.grad.any()
    head = model.roi_heads.box_head
    assert (head.fc1.weight.grad is None) == (feature == "mean")
    assert (head.fc2.weight.grad is None) == (feature in ("mean", "fc6"))


@pytest.mark.parametrize("features_of", ["final", "proposal"])
def test_features_of_detections(images: ImageBatch, features_of: str):
    model = make(ROI_HEADS__FEATURES_OF=features_of, ROI_BOX_HEAD__REGION_FEATURE="fc6").eval()
    regions = model(images, whole_image=True)
    assert min(len(rows) for rows in regions.boxes) > 3
    assert [len(rows) for rows in regions.features] == [len(rows) for rows in regions.boxes]
    torch.cat(regions.features).sum().backward()
    assert model.roi_heads.box_head.fc1.weight.grad.any()
    if features_of == "final":
        again = model(images, [rows[1:] for rows in regions.boxes])
        torch.testing.assert_close(again.features[0], regions.features[0][1:])


def test_roi_masks_multiply_the_pooled_map_before_the_box_head(images: ImageBatch, boxes: list[Tensor]):
    model = make(ROI_BOX_HEAD__REGION_FEATURE="mean").eval()
    side = model.map_size
    assert side == 7
    masks = [torch.rand(3, side, side), torch.ones(1, side, side)]
    regions = model(images, boxes, roi_masks=masks, whole_image=True)
    plain = model(images, boxes, whole_image=True)
    torch.testing.assert_close(regions.features[1], plain.features[1])
    torch.testing.assert_close(regions.features[0][0], plain.features[0][0])  # the whole image is not masked
    features = model.features(images)
    maps = model.roi_heads.pool([features[name] for name in model.roi_heads.in_features], to_rois(boxes[:1]))
    masked = maps * masks[0][:, None]
    torch.testing.assert_close(regions.features[0][1:], masked.mean(dim=(2, 3)))
    logits = model.roi_heads.box_predictor.class_logits(model.roi_heads.box_head(masked).predictor)
    torch.testing.assert_close(regions.class_logits[0][1:], logits)
    with pytest.raises(ValueError, match="RoI masks have shape"):
        model(images, boxes, roi_masks=[torch.ones(3, 5, 5), torch.ones(1, 5, 5)])


def test_padding_of_the_batch_is_the_detectors_own(images: ImageBatch, boxes: list[Tensor]):
    model = make().eval()
    assert [list(level.shape[2:]) for level in model.features(images).values()][:2] == [[32, 40], [16, 20]]
    padded = torch.zeros(2, 3, 128, 160)
    padded[:, :, :100, :130] = images.pixels
    by_hand = model(ImageBatch(padded, images.sizes, images.original_sizes, images.names), boxes)
    torch.testing.assert_close(by_hand.features, model(images, boxes).features)


def test_bfloat16_under_autocast(images: ImageBatch, boxes: list[Tensor], targets: DetectionTargets):
    model = make().train()
    torch.manual_seed(4)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.features(images)
        pooled = model.roi_heads.pool([features[name] for name in model.roi_heads.in_features], to_rois(boxes))
        regions = model(images, boxes, targets)
    assert features["p2"].dtype == torch.bfloat16
    assert pooled.dtype == torch.float32
    assert regions.class_logits[0].dtype == torch.float32
    total(regions).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    exact = model(images, boxes)
    distance = (torch.cat(regions.features).float() - torch.cat(exact.features)).norm()
    assert distance <= 0.05 * torch.cat(exact.features).norm()
