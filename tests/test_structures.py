"""Gathering each text's regions from the images it looks at."""

from __future__ import annotations

import pytest
import torch

from detector.structures import Regions
from e2e_vl.structures import TextRegions, gather_regions

COUNTS = (2, 0, 3)
SIZES = torch.tensor([[10, 20], [30, 40], [50, 60]])


@pytest.fixture
def regions() -> Regions:
    """Three images with 2, 0 and 3 regions; region r of image n has feature (n, r) and a box that starts at them."""
    features = [
        torch.tensor([[float(n), float(r)] for r in range(count)]).reshape(-1, 2) for n, count in enumerate(COUNTS)
    ]
    boxes = [torch.cat([rows, rows + 5], dim=1) for rows in features]
    return Regions(
        boxes=boxes,
        features=[rows.clone().requires_grad_() for rows in features],
        class_logits=[torch.zeros(count, 4) for count in COUNTS],
    )


def gathered_rows(gathered: TextRegions, text: int) -> list[list[float]]:
    return gathered.features[text][gathered.attend[text]].tolist()


def test_one_image_per_text(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[2], [0], [2]]))
    assert gathered.attend.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert gathered_rows(gathered, 0) == [[2, 0], [2, 1], [2, 2]]
    assert gathered_rows(gathered, 1) == [[0, 0], [0, 1]]
    assert torch.equal(gathered.features[0], gathered.features[2])
    assert gathered.boxes[1, :2].tolist() == [[0, 0, 5, 5], [0, 1, 5, 6]]
    assert gathered.image_sizes[1].tolist() == [[10, 20], [10, 20], [1, 1]]
    assert gathered.features[1, 2].abs().sum() == 0 and gathered.boxes[1, 2].abs().sum() == 0
    assert torch.equal(gathered.whole_image, gathered.features[:, 0])


def test_two_images_per_text_leave_no_padding_between(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0, 2], [2, 0], [0, 1]]))
    assert gathered.attend.tolist() == [[True] * 5, [True] * 5, [True, True, False, False, False]]
    assert gathered_rows(gathered, 0) == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    assert gathered_rows(gathered, 1) == [[2, 0], [2, 1], [2, 2], [0, 0], [0, 1]]
    assert gathered.image_slot.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert gathered.image_sizes[1].tolist() == [[50, 60]] * 3 + [[10, 20]] * 2
    assert gathered.boxes[0, 2].tolist() == [2, 0, 7, 5]


def test_text_without_image_and_image_without_regions(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[-1, -1], [1, -1], [-1, 0]]))
    assert gathered.attend.sum(dim=1).tolist() == [0, 0, 2]
    assert gathered_rows(gathered, 2) == [[0, 0], [0, 1]]
    assert gathered.image_slot[2].tolist() == [1, 1]
    assert gathered.features[:2].abs().sum() == 0
    assert gathered.image_sizes[:2].unique().tolist() == [1]


def test_no_region_at_all_keeps_valid_shapes():
    empty = Regions([torch.zeros(0, 4)], [torch.zeros(0, 6)], [torch.zeros(0, 2)])
    gathered = gather_regions(empty, SIZES[:1], torch.tensor([[0], [-1]]))
    assert gathered.features.shape == (2, 1, 6)
    assert gathered.boxes.shape == (2, 1, 4)
    assert not gathered.attend.any()


def test_gradients_of_all_texts_add_up(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0, 2], [0, -1], [2, 0]]))
    weights = torch.tensor([1.0, 10.0, 100.0])
    (gathered.features * gathered.attend[..., None] * weights[:, None, None]).sum().backward()
    assert regions.features[0].grad.unique().tolist() == [111]
    assert regions.features[2].grad.unique().tolist() == [101]


def test_padding_gets_no_gradient(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0], [2]]))
    gathered.features[0, 2].sum().backward()  # a padding row; it is filled with some region's row, times zero
    assert all(rows.grad is None or rows.grad.abs().sum() == 0 for rows in regions.features)


def test_rows_of_candidate_boxes_behind_the_whole_image(regions):
    looks_at = torch.tensor([[0, 2], [2, -1], [-1, -1]])
    gathered = gather_regions(regions, SIZES, looks_at, whole_image=True)
    assert gathered.row.tolist() == [[-1, 0, -1, 0, 1], [-1, 0, 1, -1, -1], [-1] * 5]
    assert gathered.image.tolist() == [[0, 0, 2, 2, 2], [2, 2, 2, -1, -1], [-1] * 5]
    assert gathered.is_whole_image.tolist() == [[True, False, True, False, False], [True] + [False] * 4, [False] * 5]
    known = [torch.tensor([10.0]), torch.zeros(0), torch.tensor([30.0, 31.0])]
    copied = gathered.gather(known, fill=-7)
    assert copied.tolist() == [[-7, 10, -7, 30, 31], [-7, 30, 31, -7, -7], [-7] * 5]
    assert not gathered.is_hidden.any()


def test_hidden_and_cut_regions(regions):
    hidden = [torch.tensor([True]), torch.zeros(0, dtype=torch.bool), torch.tensor([False, True])]
    limit = torch.tensor([1, 2, 0])
    gathered = gather_regions(
        regions, SIZES, torch.tensor([[2], [2], [2]]), whole_image=True, hidden=hidden, limit=limit
    )
    assert gathered.attend.tolist() == [[True, True, False], [True] * 3, [True, False, False]]
    assert gathered.is_hidden.tolist() == [[False] * 3, [False, False, True], [False] * 3]
