"""Packing words, regions and [END] without gaps, and back."""

from __future__ import annotations

import torch

from e2e_vl.encoders.layers import SequenceLayout

TEXT = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
REGIONS = torch.tensor([[True, True], [False, False], [True, False]])
ORDER = [[0, 1, 3, 4, 5], [0, 1, 2, 5], [0, 3, 5]]  # slots of each text's packed sequence


def slot_numbers() -> torch.Tensor:
    """[3, 6, 1], every slot holding 100 * text + slot."""
    return (torch.arange(3)[:, None] * 100 + torch.arange(6)).float()[..., None]


def test_packed_sequences_have_no_gaps():
    layout = SequenceLayout.from_masks(TEXT, REGIONS)
    packed = layout.pack(slot_numbers())
    assert packed.shape == (3, 5, 1)
    assert layout.attention_mask.sum(dim=1).tolist() == [len(slots) for slots in ORDER]
    for text, slots in enumerate(ORDER):
        assert packed[text, : len(slots), 0].tolist() == [100 * text + slot for slot in slots]
        assert layout.attention_mask[text].tolist() == [position < len(slots) for position in range(5)]


def test_unpack_reverses_pack_and_zeroes_padding():
    layout = SequenceLayout.from_masks(TEXT, REGIONS)
    slots = slot_numbers() + 1
    restored = layout.unpack(layout.pack(slots))
    assert torch.equal(restored, slots * layout.is_real[..., None])
    assert layout.is_real.tolist() == torch.cat([TEXT, REGIONS, torch.ones(3, 1).bool()], dim=1).tolist()


def test_pairs_follow_the_same_order():
    layout = SequenceLayout.from_masks(TEXT, REGIONS)
    pairs = torch.arange(36.0).reshape(1, 1, 6, 6).expand(3, 2, 6, 6)  # 6 * query slot + key slot
    packed = layout.pack_pairs(pairs)
    assert packed.shape == (3, 2, 5, 5)
    assert packed[0, 1, 2].tolist() == [6 * 3 + key for key in ORDER[0]]
    is_pair = layout.is_real[:, :, None] & layout.is_real[:, None]
    assert torch.equal(layout.unpack_pairs(packed), pairs * is_pair[:, None])
