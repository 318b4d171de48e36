"""RoIAlign against torchvision's, forward and backward; which level; levels without RoIs."""

from __future__ import annotations

import pytest
import torch
from torchvision.ops import roi_align

from detector.config import DetectorConfig
from detector.roi_pooler import RoIPooler, align_rois, assign_levels, to_rois
from detector.yaml_tree import flatten
from tests.detector import published


@pytest.mark.parametrize("rule", ["detectron2", "torchvision"])
def test_a_box_of_224_pixels_is_pooled_from_level_4(rule):
    sides = torch.tensor([0.0, 30, 111, 112, 223, 224, 447, 448, 896, 5000])
    boxes = torch.stack([torch.zeros_like(sides), torch.zeros_like(sides), 2 * sides, sides / 2], dim=1)
    assert assign_levels(boxes, 2, 5, rule).tolist() == [2, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert assign_levels(boxes, 3, 4, rule).tolist() == [3, 3, 3, 3, 3, 4, 4, 4, 4, 4]


def test_levels_without_rois_get_a_gradient_of_zero():
    """Parameters without a gradient would stop distributed training."""
    flat = flatten(published.FPN_TREE) | {"MODEL.ROI_HEADS.IN_FEATURES": ["p3", "p4"]}
    pooler = RoIPooler(DetectorConfig.from_flat(flat))
    for boxes in ([[0.0, 0, 9, 9]], []):
        maps = [torch.randn(1, 4, side, side).requires_grad_() for side in (8, 4)]
        rois = to_rois([torch.tensor(boxes).reshape(-1, 4)])
        pooled = pooler(maps, rois)
        assert pooled.shape == (len(boxes), 4, 3, 3)
        pooled.sum().backward()
        assert bool(maps[0].grad.any()) == bool(boxes)
        assert not maps[1].grad.any()


@pytest.mark.parametrize(("sign", "expected"), [(1, 15), (-1, -5)])
def test_roi_pool_rounds_halves_up(sign, expected):
    """A box from cell 0.5 to 2.5 is pooled from the cells 1 .. 3, as in Caffe."""
    flat = flatten(published.TREE) | {"MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIPool"}
    pooler = RoIPooler(DetectorConfig.from_flat(flat | {"MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 1}))
    stride = pooler.strides[0]
    cells = sign * torch.arange(16.0).reshape(1, 1, 4, 4)
    rois = to_rois([torch.tensor([[0.5, 0.5, 2.5, 2.5]]) * stride])
    assert pooler([cells], rois).item() == expected


SCALE = 1 / 16
SIDE = 14


def random_rois(number: int, images: int) -> torch.Tensor:
    """From a fraction of a cell to larger than the image, and partly or wholly outside of it."""
    corners = torch.rand(number, 2) * 1.4 - 0.3
    sides = 0.001 + 0.9 * torch.rand(number, 2)
    boxes = torch.cat((corners, corners + sides), dim=1) * torch.tensor([320.0, 200.0, 320.0, 200.0])
    return torch.cat((torch.randint(0, images, (number, 1)).float(), boxes), dim=1).double()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sampling_ratio", [-1, 1, 2, 5])
def test_equals_torchvision_in_value_and_gradient(sampling_ratio: int, aligned: bool, stride: int):
    torch.manual_seed(0)
    features = torch.randn(2, 6, 13, 20, dtype=torch.float64, requires_grad=True)
    rois = random_rois(60, images=2)
    expected = roi_align(features, rois, (SIDE, SIDE), SCALE, sampling_ratio, aligned)[:, :, ::stride, ::stride]
    found = align_rois(features, rois, SIDE, SCALE, sampling_ratio=sampling_ratio, aligned=aligned, stride=stride)
    assert found.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(maps, features, weights)[0] for maps in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_result_is_channels_last_and_empty_without_rois():
    features = torch.randn(1, 8, 5, 6)
    maps = align_rois(features, random_rois(3, images=1).float(), SIDE, SCALE, sampling_ratio=1, aligned=True)
    assert maps.is_contiguous(memory_format=torch.channels_last)
    empty = align_rois(features, torch.zeros(0, 5), SIDE, SCALE, sampling_ratio=0, aligned=True)
    assert empty.shape == (0, 8, SIDE, SIDE)
