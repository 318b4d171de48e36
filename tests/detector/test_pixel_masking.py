from __future__ import annotations

import pytest
import torch
from torch import nn

from detector.images import mask_pixels, mask_rectangles


def test_outward_takes_every_touched_pixel():
    boxes = torch.tensor([[1.2, 2.0, 3.0, 4.5], [-3.0, -0.5, 2.5, 99.0], [2.0, 3.0, 2.0, 5.0]])
    rectangles = mask_rectangles(boxes, (10, 8))
    assert rectangles.tolist() == [[1, 2, 3, 5], [0, 0, 3, 10], [2, 3, 2, 5]]
    assert rectangles.dtype == torch.int64


def test_vl_bert_takes_the_last_row_and_column_too():
    boxes = torch.tensor([[1.9, 2.0, 3.0, 4.5], [0.0, 0.0, 7.0, 9.0], [5.0, 5.0, 30.0, 30.0]])
    assert mask_rectangles(boxes, (10, 8), "truncate").tolist() == [[1, 2, 4, 5], [0, 0, 8, 10], [5, 5, 8, 10]]


def test_only_the_boxes_of_each_image_become_zero():
    pixels = torch.rand(3, 3, 10, 12) + 1
    before = pixels.clone()
    sizes = torch.tensor([[10, 12], [6, 5], [10, 12]])
    masks = [torch.tensor([[1.0, 2.0, 4.0, 5.0], [8.0, 8.0, 9.5, 9.0]]), torch.tensor([[3.0, 3.0, 50.0, 50.0]])]
    masked = mask_pixels(pixels, sizes, [*masks, torch.zeros(0, 4)])
    expected = before.clone()
    expected[0, :, 2:5, 1:4] = 0
    expected[0, :, 8:9, 8:10] = 0
    expected[1, :, 3:6, 3:5] = 0  # clipped to the image: the padding is not its own
    assert torch.equal(masked, expected)
    assert torch.equal(pixels, before)


def test_masked_boxes_take_a_given_colour():
    pixels, colour = torch.rand(1, 3, 6, 8), torch.tensor([-1.0, -2.0, -3.0])
    masked = mask_pixels(pixels, torch.tensor([[6, 8]]), [torch.tensor([[1.0, 2.0, 4.0, 5.0]])], fill=colour)
    assert torch.equal(masked[0, :, 2:5, 1:4], colour[:, None, None].expand(3, 3, 3))
    assert (masked != pixels).sum() == 3 * 9


@pytest.mark.parametrize("rounding", ["outward", "truncate"])
def test_nothing_of_a_masked_box_reaches_any_feature(rounding: str):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2))
    pixels = torch.randn(2, 3, 40, 50)
    sizes = torch.tensor([[40, 50], [33, 41]])
    boxes = [torch.tensor([[5.3, 7.8, 20.1, 30.6]]), torch.tensor([[0.0, 0.0, 9.9, 12.2], [20.5, 8.0, 33.0, 30.0]])]
    changed = pixels.clone()
    for image, rows in zip(changed, boxes, strict=True):
        for x1, y1, x2, y2 in rows.tolist():
            image[:, int(y1) : int(y2), int(x1) : int(x2)] += 50 * torch.randn(())
    assert not torch.equal(network(pixels), network(changed))
    masks = [mask_rectangles(rows, size, rounding).float() for rows, size in zip(boxes, sizes.tolist(), strict=True)]
    outputs = [network(mask_pixels(version, sizes, masks)) for version in (pixels, changed)]
    assert torch.equal(*outputs)


def test_gradient_stops_inside_the_box():
    pixels = torch.randn(1, 3, 8, 8, requires_grad=True)
    mask_pixels(pixels, torch.tensor([[8, 8]]), [torch.tensor([[2.0, 2.0, 5.0, 6.0]])]).sum().backward()
    assert not pixels.grad[:, :, 2:6, 2:5].any()
    assert pixels.grad.sum() == 3 * (64 - 12)


@pytest.mark.parametrize("box", [[5.0, 1.0, 2.0, 4.0], [1.0, 1.0, float("nan"), 4.0], [0.0, 0.0, float("inf"), 4.0]])
def test_impossible_boxes(box: list[float]):
    good = torch.tensor([[1.0, 1.0, 2.0, 2.0]])
    with pytest.raises(ValueError, match=r"Pixel masking: box 1"):
        mask_pixels(torch.zeros(2, 3, 8, 8), torch.tensor([[8, 8]] * 2), [good, torch.cat([good, torch.tensor([box])])])
