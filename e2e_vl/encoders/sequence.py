"""Texts and regions as one sequence without gaps.

Shape legend
    M  texts in the batch
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    Z  positions of the longest packed sequence
    E  hidden size of the encoder
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from e2e_vl.structures import TextBatch, TextRegions, take_along


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """Which of the slots of a text sits at which position of its packed sequence.

    The slots are [words | regions], L + R, or [words | regions | END], L + R + 1, for an encoder that has an end.

    Slots are easy to address, but padding lies between a short text and its regions; in the packed sequence all
    padding is at the end. That saves computation where long texts with few regions share a batch with short texts
    with many.
    """

    slot: Int64[Tensor, "M Z"]  # slot that is shown at a position
    position: Int64[Tensor, "M slots"]  # position of a slot; any valid one for padding
    is_real: Bool[Tensor, "M slots"]  # slots that are not padding
    attend: Bool[Tensor, "M Z"]  # positions that are not padding
    has_end: bool  # the last slot is [END]

    @classmethod
    def from_masks(
        cls, text_attend: Bool[Tensor, "M L"], region_attend: Bool[Tensor, "M R"], *, has_end: bool = True
    ) -> SequenceLayout:
        """Args: True at real words and regions. With `has_end` there is one more slot ([END]), which is always real."""
        end = text_attend.new_ones(len(text_attend), int(has_end))
        is_real = torch.cat([text_attend, region_attend, end], dim=1)
        longest = max(int(is_real.sum(dim=1).max()) if len(is_real) else 1, 1)
        slot = (~is_real).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        position = (is_real.cumsum(dim=1) - 1).clamp(min=0)
        return cls(slot=slot, position=position, is_real=is_real, attend=is_real.gather(1, slot), has_end=has_end)

    def pack(self, slots: Shaped[Tensor, "M slots E"]) -> Shaped[Tensor, "M Z E"]:
        """Slots -> positions."""
        return take_along(slots, self.slot[..., None], dim=1)

    def unpack(self, packed: Shaped[Tensor, "M Z E"]) -> Shaped[Tensor, "M slots E"]:
        """Positions -> slots, zero at padding."""
        return take_along(packed, self.position[..., None], dim=1) * self.is_real[..., None]

    def pack_pairs(self, slots: Shaped[Tensor, "M heads slots slots"]) -> Shaped[Tensor, "M heads Z Z"]:
        """Pairs of slots -> pairs of positions."""
        return _gather_pairs(slots, self.slot)

    def unpack_pairs(self, packed: Shaped[Tensor, "M heads Z Z"]) -> Shaped[Tensor, "M heads slots slots"]:
        """Pairs of positions -> pairs of slots, zero at padding."""
        is_pair = self.is_real[:, None, :, None] & self.is_real[:, None, None, :]
        return _gather_pairs(packed, self.position) * is_pair


def _gather_pairs(
    values: Shaped[Tensor, "M heads old old"], index: Int64[Tensor, "M new"]
) -> Shaped[Tensor, "M heads new new"]:
    """Select rows and columns by an index."""
    rows = take_along(values, index[:, None, :, None], dim=2)
    return take_along(rows, index[:, None, None, :], dim=3)


def naming_words(texts: TextBatch, regions: TextRegions, dtype: torch.dtype) -> Float[Tensor, "M R L"] | None:
    """1 where a word names a region, which is a candidate box of the text's first image; None: no word names any."""
    if texts.region_of_token is None:
        return None
    can_be_named = regions.attend & (regions.row >= 0) & (regions.image_slot == 0)
    is_named = regions.row[:, :, None] == texts.region_of_token[:, None]
    return (is_named & can_be_named[:, :, None]).to(dtype)
