"""Box regression losses in every floating-point type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detector.boxes import IOU_LOSSES, box_regression_loss

KINDS = ("smooth_l1", *IOU_LOSSES)
WEIGHTS = (10.0, 10.0, 5.0, 5.0)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Deltas, boxes and targets that overlap."""
    generator = torch.Generator().manual_seed(0)
    corners = 50 * torch.rand(6, 2, generator=generator, dtype=torch.float64)
    boxes = torch.cat((corners, corners + 20 + 30 * torch.rand(6, 2, generator=generator)), dim=1)
    targets = boxes + 4 * torch.rand(6, 4, generator=generator)
    deltas = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return deltas.to(dtype), boxes.to(dtype), targets.to(dtype)


def loss(kind: str, deltas: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
    return box_regression_loss(deltas, boxes, targets, weights=WEIGHTS, kind=kind, smooth_l1_beta=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_computed_in_float64(kind: str):
    deltas, boxes, targets = inputs(torch.float64)
    found = loss(kind, deltas, boxes, targets)
    assert found.dtype == torch.float64
    # Numerical derivatives are this exact only without a step in float32. (CIoU keeps one factor constant on purpose.)
    if kind != "ciou":
        assert torch.autograd.gradcheck(lambda x: loss(kind, x, boxes, targets), (deltas.requires_grad_(),))
    single = loss(kind, *inputs(torch.float32))
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(found.item(), rel=1e-5)
    assert single.item() != found.item()


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_types(kind: str):
    """Half-precision deltas, and annotated boxes in float64."""
    deltas, boxes, targets = inputs(torch.float32)
    expected = loss(kind, deltas.half().float(), boxes, targets)
    found = loss(kind, deltas.half(), boxes, targets.double())
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_positives(kind: str):
    empty = torch.zeros(0, 4, requires_grad=True)
    found = loss(kind, empty, torch.zeros(0, 4), torch.zeros(0, 4))
    assert found.item() == 0
    found.backward()
