"""Attention of an answer over regions, read from the maps that an encoder gives.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from e2e_vl.structures import EncoderOutput, TextBatch


def attention_to_regions(encoded: EncoderOutput, texts: TextBatch, attend: Bool[Tensor, "M R"]) -> Float[Tensor, "M R"]:
    """How much each answer looks at each region; of every text it adds up to 1, or is 0 where it reads no region.

    Taken from the last step in which the text attends to regions, at the place of its summary ([CLS] where the summary
    is the pooled vector), as a mean over the heads.

    Args:
        encoded: with attention maps.
        attend: real regions; a text without regions gets 0 everywhere.
    """
    length = texts.input_ids.shape[1]
    place = torch.zeros(len(texts), dtype=torch.int64, device=attend.device)
    place = place if texts.summary is None else texts.summary
    rows = torch.arange(len(texts), device=attend.device)
    found = torch.zeros_like(attend, dtype=torch.float32)
    for one in encoded.attentions:
        seen = one[rows, :, place, length : length + attend.shape[1]].float().mean(dim=1) * attend
        found = torch.where((seen.sum(dim=1) > 0)[:, None], seen, found)
    return found / found.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
