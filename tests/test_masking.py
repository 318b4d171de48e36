from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from e2e_vl.masking import choose_regions, cut_lengths


def by_dropping_one_by_one(text: int, regions: int, limit: int) -> tuple[int, int]:
    """The rule in its own words."""
    while text + regions > limit and text > 0 and regions > 0:
        if regions > text:
            regions -= 1
        else:
            text -= 1
    return max(text, 2), max(regions, 1)


def test_cutting_drops_from_the_longer_one():
    for limit in (*range(1, 20), 63, 64):
        for text in range(2, 90, 1 if limit < 20 else 7):
            for regions in range(1, 90, 1 if limit < 20 else 5):
                assert cut_lengths(text, regions, limit) == by_dropping_one_by_one(text, regions, limit)


def test_a_text_without_regions_has_the_limit_for_itself():
    assert cut_lengths(70, 0, 64) == (64, 0)
    assert cut_lengths(10, 0, 64) == (10, 0)


def test_cutting_is_that_of_the_official_code(golden_root):
    facts = json.loads((golden_root / "vl_bert" / "data.json").read_text())["cc"]
    arrays = load_file(golden_root / "vl_bert" / "data.safetensors")
    text = len(facts["caption_ids"]) + 2
    regions = len(arrays["cc.boxes"]) + 1  # and the whole image
    for number, case in enumerate(facts["cases"]):
        kept_text, kept_regions = cut_lengths(text, regions, case["seq_len"])
        assert (kept_text, kept_regions) == (case["kept_text"], case["kept_boxes"])
        assert len(arrays[f"cc.{number}.text"]) == kept_text
        assert len(arrays[f"cc.{number}.boxes"]) == kept_regions
        before = arrays[f"cc.{number}.mvrc_ops_before_truncation"]
        np.testing.assert_array_equal(before[:kept_regions], arrays[f"cc.{number}.mvrc_ops"])
        assert before[kept_regions:].sum() == case["masked_boxes_cut_off_but_zeroed"]


def test_one_region_in_seven_is_chosen_and_nine_tenths_of_them_are_hidden():
    chosen, hidden = choose_regions(100_000, np.random.default_rng(1))
    assert chosen.dtype == hidden.dtype == bool
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert hidden[chosen].mean() == pytest.approx(0.9, abs=0.01)
    assert not hidden[~chosen].any()


def test_no_region_is_forced_and_the_paper_hides_every_chosen_one():
    nothing = [choose_regions(3, np.random.default_rng(seed))[0].any() for seed in range(200)]
    assert np.mean(nothing) == pytest.approx(1 - 0.85**3, abs=0.1)
    chosen, hidden = choose_regions(1000, np.random.default_rng(0), hide=1.0)
    np.testing.assert_array_equal(chosen, hidden)
    assert chosen.any()
    for count, probability in ((0, 0.15), (50, 0.0)):
        assert not choose_regions(count, np.random.default_rng(0), probability)[0].any()
