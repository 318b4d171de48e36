"""Packed sequences, sines and cosines of box coordinates, and the bias between pairs of regions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from e2e_vl.encoders.layers import (
    RelativeGeometryBias,
    SequenceLayout,
    geometry_embedding,
    region_word_alignment,
    relative_geometry,
    same_image_mask,
    sinusoids,
)
from tests.encoders.small import name_regions, one_text, regions_of_images
from tests.regions import regions_of_own_images


@pytest.mark.parametrize(
    ("kind", "expected"), [("centre_size", [0.3, 0.375, 0.4, 0.25]), ("corners", [0.1, 0.25, 0.5, 0.5])]
)
def test_geometry_divides_by_width_and_height(kind, expected):
    boxes, sizes = torch.tensor([[10.0, 20.0, 50.0, 40.0]]), torch.tensor([[80.0, 100.0]])  # height, width
    embedding = geometry_embedding(boxes, sizes, 64, kind)
    assert embedding.shape == (1, 64)
    # read back from the longest wavelength's sine (small angles only)
    found = embedding.reshape(4, 2, 8)[:, 0, 7].asin() * 1000 ** (7 / 8) / 100
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_sinusoids_are_sines_then_cosines():
    values = sinusoids(torch.tensor([0.02]), 2)[0].tolist()
    angles = [2.0, 2.0 / 1000**0.5]
    assert values == pytest.approx([math.sin(angles[0]), math.sin(angles[1]), math.cos(angles[0]), math.cos(angles[1])])


def test_relative_geometry_of_two_boxes_and_of_padding():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 20.0], [30.0, 0.0, 50.0, 10.0]])
    relative = relative_geometry(boxes, torch.tensor([[40.0, 100.0]]).expand(2, 2))
    # as shares of the image: centres (0.05, 0.25) and (0.4, 0.125), sides (0.1, 0.5) and (0.2, 0.25)
    gaps = [0.2, -0.25]  # from x = 10 to x = 30; the lower one reaches over the other's whole height
    norms = [math.hypot(0.35, 0.125), 0.2]
    there = [0.35, -0.125, 0.35, 0.125, *gaps, math.log(2), -math.log(2), *norms]
    back = [-0.35, 0.125, 0.35, 0.125, *gaps, -math.log(2), math.log(2), *norms]
    assert relative[0, 1].tolist() == pytest.approx(there, abs=1e-6)
    assert relative[1, 0].tolist() == pytest.approx(back, abs=1e-6)
    assert relative[0, 0].tolist() == pytest.approx([0] * 4 + [-0.1, -0.5] + [0] * 4, abs=2e-6)
    padding = torch.zeros(1, 3, 4, requires_grad=True)
    relative = relative_geometry(padding, torch.ones(1, 3, 2))
    relative.sum().backward()
    assert relative.isfinite().all() and padding.grad.isfinite().all()


@pytest.mark.parametrize("whole_image", [True, False])
def test_words_refer_to_candidate_boxes_of_the_first_image(whole_image):
    regions = regions_of_images((0, 1), whole_image=whole_image)
    assert (regions.row == 0).sum() == 2, "both images have a first candidate box"
    texts = name_regions(one_text(), [[0]])
    [row, word] = region_word_alignment(texts, regions, torch.float32)[0].nonzero().T.tolist()
    assert row == [int(whole_image)] and texts.region_of_token[0, word].tolist() == [0]
    assert regions.image_slot[0, row].tolist() == [0]


def geometry_bias(num_layers: int, num_heads: int, width: int = 16) -> RelativeGeometryBias:
    config = SimpleNamespace(num_attention_heads=num_heads, relative_geometry_size=width)
    return RelativeGeometryBias(config, num_layers)


def test_a_bias_is_only_between_real_regions_of_one_image():
    bias = geometry_bias(num_layers=3, num_heads=2)
    for layer in bias.output:
        torch.nn.init.normal_(layer.bias)
    boxes = torch.rand(2, 4, 2) * 50
    regions = regions_of_own_images(
        features=torch.zeros(2, 4, 1),
        boxes=torch.cat([boxes, boxes + 10], dim=-1),
        image_sizes=torch.full((2, 4, 2), 64.0),
        attention_mask=torch.tensor([[True] * 4, [True, True, False, False]]),
        image_slot=torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]),
    )
    values = torch.stack(bias(regions.boxes, regions.image_sizes, same_image_mask(regions)))
    assert values.shape == (3, 2, 2, 4, 4)
    block = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    single = torch.zeros(4, 4, dtype=torch.bool)
    single[:2, :2] = True
    for text, is_pair in enumerate((block, single)):
        assert (values[:, text][..., is_pair] != 0).all()
        assert (values[:, text][..., ~is_pair] == 0).all()


def test_a_bias_learns_within_30_steps_which_regions_are_near():
    """Far more than it could with numbers in shares of the image, where 6 of 128 pixels are 0.05."""
    torch.manual_seed(0)
    bias = geometry_bias(num_layers=1, num_heads=1, width=64)
    low = torch.rand(16, 8, 2) * 100
    boxes, sizes = torch.cat([low, low + 8 + torch.rand(16, 8, 2) * 20], dim=-1), torch.full((16, 8, 2), 128.0)
    is_pair = ~torch.eye(8, dtype=torch.bool).expand(16, 8, 8)
    gap = relative_geometry(boxes, sizes)[..., 9] * 128
    is_near, is_clear = gap <= 6, is_pair & ((gap <= 6) | (gap >= 13))
    balance = torch.where(is_near, 0.5 / is_near[is_clear].float().mean(), 0.5 / (~is_near)[is_clear].float().mean())
    optimiser = torch.optim.Adam(bias.parameters(), lr=2e-3)
    for _ in range(30):
        logits = bias(boxes, sizes, is_pair)[0][:, 0]
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, is_near.float(), reduction="none")
        optimiser.zero_grad()
        (each * balance)[is_clear].mean().backward()
        optimiser.step()
    assert logits[is_clear & is_near].mean() > logits[is_clear & ~is_near].mean() + 3


def test_texts_about_one_image_share_the_networks_and_get_the_same_values_and_gradients():
    torch.manual_seed(0)
    bias = geometry_bias(num_layers=2, num_heads=2).double()
    for layer in bias.output:
        torch.nn.init.normal_(layer.weight)
    low = torch.rand(2, 3, 2).double() * 50
    boxes = torch.cat([low, low + 10], dim=-1)[[0, 1, 1, 0, 1]]
    sizes, is_pair = torch.full((5, 3, 2), 64.0).double(), torch.rand(5, 3, 3) > 0.3
    rows = []
    bias.hidden[0].register_forward_hook(lambda _module, given, _result: rows.append(len(given[0])))
    weights = torch.randn(2, 5, 2, 3, 3).double()

    together = torch.stack(bias(boxes, sizes, is_pair))
    each = [bias(boxes[i : i + 1], sizes[i : i + 1], is_pair[i : i + 1]) for i in range(5)]
    apart = torch.stack([torch.cat(layer) for layer in zip(*each, strict=True)])
    assert rows == [2, 1, 1, 1, 1, 1]  # one row per image in place of one per text
    torch.testing.assert_close(together, apart)
    gradients = (torch.autograd.grad((one * weights).sum(), list(bias.parameters())) for one in (together, apart))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# Packing words, regions and [END] without gaps, and back


TEXT = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
REGIONS = torch.tensor([[True, True], [False, False], [True, False]])
ORDER = [[0, 1, 3, 4, 5], [0, 1, 2, 5], [0, 3, 5]]  # slots of each text's packed sequence


def test_packed_sequences_have_no_gaps():
    layout = SequenceLayout.from_masks(TEXT, REGIONS)
    slots = (torch.arange(3)[:, None] * 100 + torch.arange(6)).float()[..., None] + 1  # 100 * text + slot + 1
    packed = layout.pack(slots)
    assert packed.shape == (3, 5, 1)
    for text, order in enumerate(ORDER):
        assert packed[text, : len(order), 0].tolist() == [100 * text + slot + 1 for slot in order]
        assert layout.attention_mask[text].tolist() == [position < len(order) for position in range(5)]
    assert layout.is_real.tolist() == torch.cat([TEXT, REGIONS, torch.ones(3, 1).bool()], dim=1).tolist()
    assert torch.equal(layout.unpack(packed), slots * layout.is_real[..., None])
    pairs = torch.arange(36.0).reshape(1, 1, 6, 6).expand(3, 2, 6, 6)  # 6 * query slot + key slot
    packed = layout.pack_pairs(pairs)
    assert packed.shape == (3, 2, 5, 5) and packed[0, 1, 2].tolist() == [6 * 3 + key for key in ORDER[0]]
    is_pair = layout.is_real[:, :, None] & layout.is_real[:, None]
    assert torch.equal(layout.unpack_pairs(packed), pairs * is_pair[:, None])
