"""Our RoIAlign against torchvision's, forward and backward, in float64."""

from __future__ import annotations

import pytest
import torch
from torchvision.ops import roi_align

from detector.roi_pooler import align_rois

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
def test_equals_torchvision_in_value_and_gradient(sampling_ratio: int, aligned: bool, stride: int) -> None:
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


def test_float32_is_as_near_to_float64_as_torchvision() -> None:
    torch.manual_seed(1)
    features, rois = torch.randn(1, 8, 40, 60), random_rois(40, images=1)
    exact = roi_align(features.double(), rois, (SIDE, SIDE), SCALE, 1, False)
    found = align_rois(features, rois.float(), SIDE, SCALE, sampling_ratio=1, aligned=False)
    torchvision = roi_align(features, rois.float(), (SIDE, SIDE), SCALE, 1, False)
    assert (found - exact).abs().max() <= 2 * (torchvision - exact).abs().max()


def test_result_is_channels_last_and_empty_without_rois() -> None:
    features = torch.randn(1, 8, 5, 6)
    maps = align_rois(features, random_rois(3, images=1).float(), SIDE, SCALE, sampling_ratio=1, aligned=True)
    assert maps.is_contiguous(memory_format=torch.channels_last)
    empty = align_rois(features, torch.zeros(0, 5), SIDE, SCALE, sampling_ratio=0, aligned=True)
    assert empty.shape == (0, 8, SIDE, SIDE)
