"""Sines and cosines of box coordinates, and the bias between pairs of regions."""

from __future__ import annotations

import math

import pytest
import torch

from e2e_vl.encoders.geometry import PairwiseGeometryBias, geometry_embedding, relative_geometry, sinusoids
from tests.regions import regions_of_own_images

BOX = torch.tensor([[10.0, 20.0, 50.0, 40.0]])
SIZE = torch.tensor([[80.0, 100.0]])  # height, width


def coordinates(embedding: torch.Tensor, dim: int) -> list[float]:
    """The four embedded numbers, read back from the longest wavelength's sine (small angles only)."""
    waves = dim // 8
    longest = 1000 ** ((waves - 1) / waves)
    return [math.asin(float(part[waves - 1])) * longest / 100 for part in embedding.reshape(4, -1)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("centre_size", [0.3, 0.375, 0.4, 0.25]), ("corners", [0.1, 0.25, 0.5, 0.5])],
)
def test_geometry_divides_by_width_and_height(kind, expected):
    embedding = geometry_embedding(BOX, SIZE, 64, kind)
    assert embedding.shape == (1, 64)
    assert coordinates(embedding[0], 64) == pytest.approx(expected, rel=1e-5)


def test_sinusoids_are_sines_then_cosines():
    values = sinusoids(torch.tensor([0.02]), 2)[0].tolist()
    angles = [2.0, 2.0 / 1000**0.5]
    assert values == pytest.approx([math.sin(angles[0]), math.sin(angles[1]), math.cos(angles[0]), math.cos(angles[1])])


def test_relative_geometry_of_two_boxes():
    boxes = torch.tensor([[[0.0, 0.0, 10.0, 20.0], [30.0, 0.0, 50.0, 10.0]]])
    relative = relative_geometry(boxes)
    # centres (5, 10) and (40, 5), sizes (10, 20) and (20, 10); entry [n, m] is divided by the size of m
    assert relative[0, 0, 1].tolist() == pytest.approx([math.log(35 / 20), math.log(5 / 10), -math.log(2), math.log(2)])
    assert relative[0, 1, 0].tolist() == pytest.approx([math.log(35 / 10), math.log(5 / 20), math.log(2), -math.log(2)])
    assert relative[0, 0, 0, :2].tolist() == pytest.approx([math.log(1e-3)] * 2)


def test_relative_geometry_of_padding_is_finite():
    assert relative_geometry(torch.zeros(1, 3, 4)).isfinite().all()


def test_pairwise_bias_only_between_real_regions_of_one_image():
    bias = PairwiseGeometryBias(num_layers=3, num_heads=2, dim=16)
    torch.nn.init.normal_(bias.weight)
    boxes = torch.rand(2, 4, 2) * 50
    regions = regions_of_own_images(
        features=torch.zeros(2, 4, 1),
        boxes=torch.cat([boxes, boxes + 10], dim=-1),
        image_sizes=torch.full((2, 4, 2), 64.0),
        attend=torch.tensor([[True] * 4, [True, True, False, False]]),
        image_slot=torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]),
    )
    values = bias(regions)
    assert values.shape == (3, 2, 2, 4, 4)
    block = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    single = torch.zeros(4, 4, dtype=torch.bool)
    single[:2, :2] = True
    for text, is_pair in enumerate((block, single)):
        assert (values[:, text][..., is_pair] != 0).all()
        assert (values[:, text][..., ~is_pair] == 0).all()


def test_pairwise_bias_starts_at_zero_and_learns():
    bias = PairwiseGeometryBias(num_layers=1, num_heads=1, dim=16)
    regions = regions_of_own_images(
        torch.zeros(1, 2, 1),
        torch.tensor([[[0.0, 0.0, 10.0, 10.0], [20.0, 5.0, 30.0, 35.0]]]),
        torch.full((1, 2, 2), 64.0),
        torch.ones(1, 2, dtype=torch.bool),
        torch.zeros(1, 2, dtype=torch.long),
    )
    values = bias(regions)
    assert values.abs().max() == 0
    values[..., 0, 1].sum().backward()
    assert bias.weight.grad.abs().max() > 0
