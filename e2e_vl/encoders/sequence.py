"""Texts and regions as one sequence without gaps.

Shape legend
    M   texts in the batch
    L   wordpieces of the longest text
    R   regions of the text with the most regions
    Z   positions of the longest packed sequence
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """Which of the L + R + 1 slots [words | regions | END] of a text sits at which position of its packed sequence.

    Slots are easy to address, but padding lies between a short text and its regions; in the packed sequence all
    padding is at the end. That saves computation where long texts with few regions share a batch with short texts
    with many.
    """

    slot: Tensor  # int64 [M, Z], slot that is shown at a position
    position: Tensor  # int64 [M, L + R + 1], position of a slot; any valid one for padding
    is_real: Tensor  # bool [M, L + R + 1], slots that are not padding
    attend: Tensor  # bool [M, Z], positions that are not padding

    @classmethod
    def from_masks(cls, text_attend: Tensor, region_attend: Tensor) -> SequenceLayout:
        """Args: bool [M, L] and bool [M, R], True at real words and regions. The last slot ([END]) is always real."""
        is_real = torch.cat([text_attend, region_attend, text_attend.new_ones(len(text_attend), 1)], dim=1)
        longest = int(is_real.sum(dim=1).max()) if len(is_real) else 1
        slot = (~is_real).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        position = (is_real.cumsum(dim=1) - 1).clamp(min=0)
        return cls(slot=slot, position=position, is_real=is_real, attend=is_real.gather(1, slot))

    def pack(self, slots: Tensor) -> Tensor:
        """[M, L + R + 1, ...] -> [M, Z, ...]."""
        return slots.gather(1, self.slot[..., None].expand(-1, -1, slots.shape[-1]))

    def unpack(self, packed: Tensor) -> Tensor:
        """[M, Z, ...] -> [M, L + R + 1, ...], zero at padding."""
        slots = packed.gather(1, self.position[..., None].expand(-1, -1, packed.shape[-1]))
        return slots * self.is_real[..., None]

    def pack_pairs(self, slots: Tensor) -> Tensor:
        """[M, heads, L + R + 1, L + R + 1] -> [M, heads, Z, Z]."""
        return _gather_pairs(slots, self.slot)

    def unpack_pairs(self, packed: Tensor) -> Tensor:
        """[M, heads, Z, Z] -> [M, heads, L + R + 1, L + R + 1], zero at padding."""
        is_pair = self.is_real[:, None, :, None] & self.is_real[:, None, None, :]
        return _gather_pairs(packed, self.position) * is_pair


def _gather_pairs(values: Tensor, index: Tensor) -> Tensor:
    """Select rows and columns of [M, heads, a, a] by an index [M, b] -> [M, heads, b, b]."""
    heads, size = values.shape[1], values.shape[2]
    length = index.shape[1]
    rows = values.gather(2, index[:, None, :, None].expand(-1, heads, -1, size))
    return rows.gather(3, index[:, None, None, :].expand(-1, heads, length, -1))
