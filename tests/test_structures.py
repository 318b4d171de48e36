"""Gathering each text's regions from the images it looks at."""

from __future__ import annotations

import pytest
import torch

from detector.structures import ImageBatch, Regions
from e2e_vl.structures import (
    Batch,
    DetectedLabels,
    MaskingBatch,
    RegionLabels,
    RegionMasks,
    TextBatch,
    TextRegions,
    describe_proposals,
    gather_regions,
    take_along_dim,
)

COUNTS = (2, 0, 3)
SIZES = torch.tensor([[10, 20], [30, 40], [50, 60]])


@pytest.fixture
def regions() -> Regions:
    """Three images with 2, 0 and 3 regions; region r of image n has feature (n, r) and a box that starts at them."""
    features = [torch.tensor([[n, r] for r in range(count)]).float().reshape(-1, 2) for n, count in enumerate(COUNTS)]
    boxes = [torch.cat([rows, rows + 5], dim=1) for rows in features]
    features = [rows.clone().requires_grad_() for rows in features]
    return Regions(boxes, features, class_logits=[torch.zeros(count, 4) for count in COUNTS])


def gathered_rows(gathered: TextRegions, text: int) -> list[list[float]]:
    return gathered.features[text][gathered.attention_mask[text]].tolist()


def test_two_images_per_text_leave_no_padding_between(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0, 2], [2, 0], [0, 1]]))
    assert gathered.attention_mask.tolist() == [[True] * 5, [True] * 5, [True, True, False, False, False]]
    assert gathered_rows(gathered, 0) == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    assert gathered_rows(gathered, 1) == [[2, 0], [2, 1], [2, 2], [0, 0], [0, 1]]
    assert gathered_rows(gathered, 2) == [[0, 0], [0, 1]]
    assert gathered.image_slot.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert gathered.image_sizes[1].tolist() == [[50, 60]] * 3 + [[10, 20]] * 2
    assert gathered.boxes[0, 2].tolist() == [2, 0, 7, 5]
    assert gathered.image_sizes[2].tolist() == [[10, 20]] * 2 + [[1, 1]] * 3
    assert not gathered.features[2, 2:].any() and not gathered.boxes[2, 2:].any()


def test_text_without_image_and_image_without_regions(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[-1, -1], [1, -1], [-1, 0]]))
    assert gathered.attention_mask.sum(dim=1).tolist() == [0, 0, 2]
    assert gathered_rows(gathered, 2) == [[0, 0], [0, 1]]
    assert gathered.image_slot[2].tolist() == [1, 1]
    assert gathered.features[:2].abs().sum() == 0
    assert gathered.image_sizes[:2].unique().tolist() == [1]
    empty = Regions([torch.zeros(0, 4)], [torch.zeros(0, 6)], [torch.zeros(0, 2)])
    gathered = gather_regions(empty, SIZES[:1], torch.tensor([[0], [-1]]))
    assert gathered.features.shape == (2, 1, 6) and not gathered.attention_mask.any()


def test_scores_of_a_file_and_matches_of_phrases_describe_candidate_boxes_only(regions):
    image_index = torch.tensor([[0, 2], [2, -1]])
    gathered = gather_regions(regions, SIZES, image_index, whole_image=True)  # rows 0 of the three images
    assert not gathered.proposals.any() and gathered.proposals.shape == (*gathered.row.shape, 4)
    matches = torch.zeros(2, 2, 2, 2)
    matches[0, 1, 1] = torch.tensor([0.25, 0.5])  # text 0, its second image, candidate 1
    ids = torch.ones(2, 3, dtype=torch.int64)
    batch = Batch(
        images=ImageBatch(torch.zeros(3, 3, 0, 0), SIZES, SIZES, ["a", "b", "c"]),
        boxes=None,
        texts=TextBatch(ids, ids, ids.bool()),
        image_index=image_index,
        region_labels=RegionLabels(
            detected=DetectedLabels(scores=[torch.tensor([0.9]), torch.zeros(0), torch.tensor([0.8, 0.7])])
        ),
        phrase_matches=matches,
    )
    proposals = describe_proposals(batch, regions, gathered, whole_image=True)
    expected = [[0, 0, 0, 0], [1, 0.9, 0, 0], [0, 0, 0, 0], [1, 0.8, 0, 0], [1, 0.7, 0.25, 0.5]]
    torch.testing.assert_close(proposals[0], torch.tensor(expected))
    torch.testing.assert_close(proposals[1, :, 1], torch.tensor([0, 0.8, 0.7, 0, 0]))
    # those of the detector that predicted the boxes; the first is of the whole image
    regions.scores = [torch.tensor([1.0, 0.3]), torch.zeros(0), torch.tensor([1.0, 0.2, 0.1])]
    proposals = describe_proposals(batch, regions, gathered, whole_image=True)
    torch.testing.assert_close(proposals[0, :, 1], torch.tensor([0, 0.3, 0, 0.2, 0.1]))


def test_gradients_of_all_texts_add_up(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0, 2], [0, -1], [2, 0]]))
    weights = torch.tensor([1.0, 10.0, 100.0])
    (gathered.features * gathered.attention_mask[..., None] * weights[:, None, None]).sum().backward()
    assert regions.features[0].grad.unique().tolist() == [111]
    assert regions.features[2].grad.unique().tolist() == [101]


def test_rows_and_labels_of_candidate_boxes_behind_the_whole_image(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0, 2], [2, -1], [-1, -1]]), whole_image=True)
    assert gathered.row.tolist() == [[-1, 0, -1, 0, 1], [-1, 0, 1, -1, -1], [-1] * 5]
    assert gathered.image.tolist() == [[0, 0, 2, 2, 2], [2, 2, 2, -1, -1], [-1] * 5]
    assert gathered.is_whole_image.int().tolist() == [[1, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5]
    assert not gathered.is_masked.any()
    classes = gathered.gather([torch.tensor([4]), torch.zeros(0, dtype=torch.int64), torch.tensor([5, 6])], fill=-1)
    assert classes.dtype == torch.int64
    assert classes.tolist() == [[-1, 4, -1, 5, 6], [-1, 5, 6, -1, -1], [-1] * 5]
    rows = [torch.full((1, 3), 0.1), torch.zeros(0, 3), torch.tensor([[0.2] * 3, [0.3] * 3])]
    probabilities = gathered.gather(rows, fill=-7.0)
    assert probabilities.shape == (3, 5, 3)
    expected = torch.tensor([[-7, 0.1, -7, 0.2, 0.3], [-7, 0.2, 0.3, -7, -7], [-7] * 5])
    torch.testing.assert_close(probabilities[..., 1], expected)


def test_every_image_of_a_text_is_cut_on_its_own(regions):
    """The whole images stay; there is no gap where the first image lost regions."""
    is_masked = [torch.tensor([True]), torch.zeros(0, dtype=torch.bool), torch.tensor([False, True])]
    gathered = gather_regions(
        regions,
        SIZES,
        torch.tensor([[2, 0], [0, 2], [2, 0]]),
        whole_image=True,
        masks=RegionMasks(is_masked, is_masked),
        limit=torch.tensor([[1, 1], [0, 2], [0, 0]]),
    )
    assert gathered_rows(gathered, 0) == [[2, 0], [2, 1], [0, 0], [0, 1]]
    assert gathered_rows(gathered, 1) == [[0, 0], [2, 0], [2, 1], [2, 2]]
    assert gathered_rows(gathered, 2) == [[2, 0], [0, 0]]
    assert gathered.image_slot.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0]]
    assert gathered.is_whole_image.int().tolist() == [[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert gathered.is_masked.int().tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0] * 4]
    without = gathered.without_whole_image()
    assert without.attention_mask.sum(dim=1).tolist() == [2, 2, 0]
    assert torch.equal(without.features, gathered.features) and gathered.attention_mask.sum() == 10


def test_boxes_return_to_the_pixels_of_their_own_images(regions):
    gathered = gather_regions(regions, SIZES, torch.tensor([[0, 2]]))
    scales = torch.tensor([[2.0, 4.0], [1.0, 1.0], [0.5, 0.25]])  # resized by original, of width and height
    assert gathered.boxes[0, 3].tolist() == [2, 1, 7, 6]
    assert gathered.original_boxes(scales)[0, 3].tolist() == [4, 4, 14, 24]
    assert gathered.original_boxes(scales)[0, 1].tolist() == [0, 0.25, 2.5, 1.5]


# Moving a batch


def test_all_parts_of_a_batch_move_together():
    ids, sizes = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
    mask = torch.ones(1, dtype=torch.bool)
    batch = Batch(
        images=ImageBatch(torch.zeros(1, 3, 4, 4), sizes, sizes, ["a"]),
        boxes=[torch.zeros(1, 4)],
        texts=TextBatch(ids, ids, ids.bool(), summary=torch.zeros(1, dtype=torch.int64)),
        image_index=torch.zeros(1, 1, dtype=torch.int64),
        region_labels=RegionLabels(class_probs=[torch.zeros(1, 3)]),
        masking=MaskingBatch(masked_regions=RegionMasks([mask], [mask])),
        records=[{"text": "x"}],
    )
    moved = batch.to("meta")
    tensors = [moved.images.pixels, *moved.boxes, moved.texts.summary]
    tensors += [*moved.region_labels.class_probs, *moved.masking.masked_regions.is_masked]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    on_host = [moved.images.sizes, moved.images.original_sizes, moved.texts.lengths, moved.image_index]
    assert all(tensor.device.type == "cpu" for tensor in on_host)
    assert moved.region_labels.features is None and moved.records == [{"text": "x"}]
    assert batch.image_index.device.type == "cpu"


def test_the_host_waits_only_for_what_comes_to_it(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: seen.setdefault(device, how) and self)
    for device in ("cuda:0", "cpu"):
        RegionLabels(class_probs=[torch.ones(1, 3)]).to(device)
    assert seen == {"cuda:0": {"non_blocking": True}, "cpu": {"non_blocking": False}}


@pytest.mark.parametrize(
    ("values", "index", "dim"),
    [((4, 6, 5), (4, 3, 1), 1), ((4, 2, 6, 5), (4, 1, 3, 1), 2), ((4, 2, 6, 5), (4, 1, 1, 9), 3), ((4, 6), (1, 8), 1)],
)
def test_take_along_is_torchs_with_its_gradient(values, index, dim):
    values = torch.randn(values, requires_grad=True)
    index = torch.randint(0, values.shape[dim], index)
    found, expected = take_along_dim(values, index, dim), values.take_along_dim(index, dim)
    assert torch.equal(found, expected) and found.shape == expected.shape
    weight = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad((one * weight).sum(), values)[0] for one in (found, expected)))
