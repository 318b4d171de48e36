"""Texts and their regions are cut together, as in the official code; of two images the fuller one loses first."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.numpy import load_file

from e2e_vl.region_masking import truncate_batch, truncate_texts, truncated_lengths
from e2e_vl.structures import Batch
from tests.tasks.tiny_pretraining import SEP, make_batch, make_model, make_pairs


def by_dropping_one_by_one(text: int, regions: int, limit: int) -> tuple[int, int]:
    """The rule in its own words."""
    while text + regions > limit and text > 0 and regions > 0:
        if regions > text:
            regions -= 1
        else:
            text -= 1
    return max(text, 2), max(regions, 1)


# One image


def test_cutting_drops_from_the_longer_one():
    for limit in (*range(1, 20), 63, 64):
        for text in range(2, 90, 1 if limit < 20 else 7):
            for regions in range(1, 90, 1 if limit < 20 else 5):
                assert truncated_lengths(text, regions, limit) == by_dropping_one_by_one(text, regions, limit)


def test_a_text_without_regions_stays_as_it_is():
    assert truncated_lengths(70, 0, 64) == (70, 0)
    assert truncated_lengths(10, 0, 64) == (10, 0)


def test_cutting_is_that_of_the_official_code(golden_root):
    facts = json.loads((golden_root / "vl_bert" / "data.json").read_text())["cc"]
    arrays = load_file(golden_root / "vl_bert" / "data.safetensors")
    text = len(facts["caption_ids"]) + 2
    regions = len(arrays["cc.boxes"]) + 1  # and the whole image
    for number, case in enumerate(facts["cases"]):
        kept_text, kept_regions = truncated_lengths(text, regions, case["seq_len"])
        assert (kept_text, kept_regions) == (case["kept_text"], case["kept_boxes"])
        assert len(arrays[f"cc.{number}.text"]) == kept_text
        assert len(arrays[f"cc.{number}.boxes"]) == kept_regions
        before = arrays[f"cc.{number}.mvrc_ops_before_truncation"]
        assert before[:kept_regions].tolist() == arrays[f"cc.{number}.mvrc_ops"].tolist()
        assert before[kept_regions:].sum() == case["masked_boxes_cut_off_but_zeroed"]


def test_cutting_keeps_the_last_wordpiece_and_the_first_regions():
    batch = make_batch()
    batch.targets.parts["masked_words"].labels[0, 5] = 30
    cut = truncate_batch(batch, 6, whole_image=True)
    assert cut.texts.attention_mask.sum(dim=1).tolist() == [3, 3, 3, 6]  # the corpus text stays
    assert cut.texts.input_ids[0, :3].tolist() == [*batch.texts.input_ids[0, :2].tolist(), SEP]
    labels = {name: cut.targets.parts[name].labels.tolist() for name in ("masked_words", "masked_text")}
    assert labels["masked_words"][0] == [-1, 9, -1, -1, -1, -1]
    assert labels["masked_text"][3] == batch.targets.parts["masked_text"].labels[3, :6].tolist()
    assert cut.targets.parts["relationship"] == batch.targets.parts["relationship"]
    assert cut.region_limit.tolist() == [[2], [2], [2], [0]]
    assert cut.boxes is batch.boxes and batch.texts.attention_mask.shape[1] == 7


def test_a_whole_image_that_is_no_region_takes_no_place_of_the_length():
    limits = []
    for in_sequence in (True, False):
        model = make_model(encoder={"whole_image_in_sequence": in_sequence}, max_length=5).eval()
        limits.append(model.mask_regions(make_batch()).region_limit.tolist())
        with torch.no_grad():
            output = model(make_batch())
        assert (output.text_regions.row.ge(0) == output.text_regions.attention_mask).all() == (not in_sequence)
    assert limits == [[[2], [2], [2], [0]], [[3], [3], [2], [0]]]


def test_places_in_a_text_follow_its_wordpieces():
    batch = make_batch()
    batch.texts.summary = torch.tensor([6, 0, 1, 5])  # the first text's last wordpiece
    batch.texts.region_of_token = torch.arange(28).reshape(4, 7)
    texts, index = truncate_texts(batch.texts, torch.tensor([3, 4, 3, 2]))
    assert index.tolist() == [[0, 1, 6, 3], [0, 1, 2, 3], [0, 1, 4, 3], [0, 5, 2, 3]]
    assert texts.attention_mask.sum(dim=1).tolist() == [3, 4, 3, 2]
    assert texts.summary.tolist() == [2, 0, 1, 1]
    assert texts.region_of_token.tolist() == [[0, 1, 6, -1], [7, 8, 9, 10], [14, 15, 18, -1], [21, 26, -1, -1]]


def test_the_place_of_a_summary_is_never_cut_away():
    """It stands two before the end, as a [MASK] before [SEP], and its state is read where it went."""
    batch = make_batch()
    lengths = batch.texts.attention_mask.sum(dim=1)
    batch.texts.summary = lengths - 2
    batch.texts.input_ids[torch.arange(4), lengths - 2] = 39
    for limit in range(3, 12):
        texts = truncate_batch(batch, limit, whole_image=True).texts
        kept = texts.attention_mask.sum(dim=1)
        assert texts.summary.tolist() == (kept - 2).tolist()
        assert (texts.input_ids.gather(1, texts.summary[:, None]) == 39).all()
        assert (texts.input_ids.gather(1, kept[:, None] - 1) == SEP).all()
    assert kept.tolist() == lengths.tolist()


def test_short_sequences_stay_as_they_are():
    batch = make_batch()
    cut = truncate_batch(batch, 64, whole_image=True)
    assert torch.equal(cut.texts.input_ids, batch.texts.input_ids)
    assert cut.region_limit.tolist() == [[3], [3], [2], [0]]


# Two images


def pairs_of(counts: tuple[int, int], length: int) -> Batch:
    """One text about two images, with these numbers of wordpieces and of candidate boxes."""
    batch = make_pairs()
    position = torch.arange(length)[None]
    texts = dataclasses.replace(
        batch.texts, input_ids=position, token_type_ids=position * 0, attention_mask=position >= 0
    )
    boxes = [torch.zeros(count, 4) for count in counts]
    image_index = torch.tensor([[0, 1]])
    return dataclasses.replace(
        batch, texts=texts, boxes=boxes, image_index=image_index, targets=None, seeds=batch.seeds[:1]
    )


def shares_one_by_one(first: int, second: int, total: int) -> tuple[int, int]:
    """The rule in its own words: the fuller image loses a region, of two equally full ones the second."""
    while first + second > total:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


@pytest.mark.parametrize("whole_image", [True, False])
@pytest.mark.parametrize("limit", [6, 9, 12])
def test_the_fuller_image_loses_first(whole_image, limit):
    for first in range(0, 9, 2):
        for second in range(1, 9, 3):
            for length in (2, 4, 8):
                batch = pairs_of((first, second), length)
                cut = truncate_batch(batch, limit, whole_image=whole_image)
                counts = first + whole_image, second + whole_image
                text, regions = by_dropping_one_by_one(length, sum(counts), limit)
                kept = shares_one_by_one(*counts, regions)
                assert cut.texts.attention_mask.sum() == text
                assert cut.region_limit.tolist() == [[count - whole_image for count in kept]]


def test_each_text_of_a_batch_has_limits_of_its_own():
    """Image 0 has 3 boxes and image 1 has 2; texts 0 and 1 look at both, in either order."""
    cut = truncate_batch(make_pairs(), 8, whole_image=True)
    assert cut.region_limit.tolist() == [[1, 1], [1, 1], [2, 0], [0, 0]]
    assert cut.texts.attention_mask.sum(dim=1).tolist() == [4, 4, 5, 6]
    cut = truncate_batch(make_pairs(), 8, whole_image=False)
    assert cut.region_limit.tolist() == [[2, 2], [2, 2], [2, 0], [0, 0]]


@pytest.mark.parametrize("in_sequence", [True, False])
def test_the_model_reads_what_the_cut_leaves(in_sequence):
    encoder = {"max_images": 2, "whole_image_in_sequence": in_sequence}
    model = make_model(encoder=encoder, max_length=7, region_probability=1.0).eval()
    with torch.no_grad():
        output = model(make_pairs())
    regions, limit = output.text_regions, output.batch.region_limit
    positions = output.batch.texts.attention_mask.sum(dim=1) + regions.attention_mask.sum(dim=1)
    assert positions[:3].max() <= 7
    for slot in range(2):
        own = regions.attention_mask & (regions.image_slot == slot) & ~regions.is_whole_image
        available = torch.tensor([[3, 2], [2, 3], [2, 0], [0, 0]])[:, slot]
        assert own.sum(dim=1).tolist() == limit[:, slot].minimum(available).tolist()
    assert regions.is_whole_image.sum(dim=1).tolist() == ([2, 2, 1, 0] if in_sequence else [0] * 4)
    assert output.losses["masked_regions"].count == (regions.row >= 0).sum()
