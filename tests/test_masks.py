"""Masks as COCO's files have them: polygons and run lengths, resized, flipped, joined and compared."""

from __future__ import annotations

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.masks import RunLengths, check_mask, encode_masks, mask_overlap, resize_mask

SIZE = (6, 10)  # height, width
LEFT = [[0.0, 0.0, 4.0, 0.0, 4.0, 6.0, 0.0, 6.0]]  # columns 0 to 3
TWO_PARTS = [[0.0, 0.0, 2.0, 0.0, 2.0, 6.0, 0.0, 6.0], [8.0, 0.0, 10.0, 0.0, 10.0, 6.0, 8.0, 6.0]]
CROWD = RunLengths(SIZE, [36, 24])  # columns 6 to 9, as plain numbers


def columns(mask: np.ndarray) -> list[int]:
    """The columns of a mask that are set; each is set or not from top to bottom."""
    assert (mask == mask[0]).all()
    return np.flatnonzero(mask[0]).tolist()


def test_polygons_and_run_lengths_are_joined():
    assert columns(encode_masks([LEFT], SIZE).to_mask()) == [0, 1, 2, 3]
    assert columns(encode_masks([TWO_PARTS], SIZE).to_mask()) == [0, 1, 8, 9]
    joined = encode_masks([LEFT, CROWD], SIZE)
    assert isinstance(joined.counts, str)
    assert columns(joined.to_mask()) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert not encode_masks([], SIZE).to_mask().any()
    again = RunLengths.of_mask(joined.to_mask())
    assert again == joined


@pytest.mark.parametrize("mask", [LEFT, encode_masks([LEFT], SIZE), RunLengths(SIZE, [0, 24, 36])])
def test_a_mask_is_resized_and_flipped(mask):
    assert columns(resize_mask(mask, SIZE, (12, 20))) == list(range(8))
    assert columns(resize_mask(mask, SIZE, (3, 5), flipped=True)) == [3, 4]
    assert resize_mask(mask, SIZE, (12, 20)).shape == (12, 20)


def test_overlap_counts_pixels():
    assert mask_overlap(encode_masks([LEFT], SIZE), encode_masks([TWO_PARTS], SIZE)) == (12, 36)
    nothing = encode_masks([], SIZE)
    assert mask_overlap(nothing, nothing) == (0, 0)


def test_a_mask_of_another_image_and_half_a_point_are_refused():
    check_mask(CROWD, SIZE, "annotation 3")
    with pytest.raises(UserError, match=r"^annotation 3: its mask is of an image of 10 x 6 pixels, .* has 9 x 6"):
        check_mask(CROWD, (6, 9), "annotation 3")
    with pytest.raises(UserError, match=r"^annotation 4: a polygon of its mask has 7 numbers"):
        check_mask([[0.0, 0, 1, 0, 1, 1, 0]], SIZE, "annotation 4")


def test_lengths_of_compressed_runs_are_those_that_pycocotools_wrote():
    generator = np.random.default_rng(0)
    for size in ((1, 1), (60, 90), (1000, 1)):
        for share in (0.0, 0.01, 0.5, 1.0):
            pixels = generator.random(size) < share
            columns_in_a_row = np.concatenate([[False], pixels.T.ravel()])
            edges = np.flatnonzero(np.diff(columns_in_a_row.astype(int)))
            expected = np.diff([0, *edges, pixels.size])
            assert np.array_equal(RunLengths.of_mask(pixels).lengths(), expected)


@pytest.mark.parametrize("counts", [[], [10, 5], [60, 1], "PP1", encode_masks([LEFT], (6, 9)).counts])
def test_runs_that_do_not_fill_the_image_are_refused(counts):
    with pytest.raises(UserError, match=r"annotation 3: .* add up to [\d,]+, but the image has 60 pixels"):
        check_mask(RunLengths(SIZE, counts), SIZE, "annotation 3")
