"""Names of the official VL-BERT parameters -> names of this project's detector, encoder and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from e2e_vl.weights.vl_bert import OfficialVLBert


def split_state(official: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Official state -> {"detector", "encoder", "task"} states. Raises ValueError for a key that none of them has."""
    parts = OfficialVLBert().convert(official, "official state")
    drop = "num_batches_tracked"
    detector = {name: value for name, value in parts.detector.items() if not name.endswith(drop)}
    return {"detector": detector, "encoder": parts.encoder, "task": parts.task}


def our_key(official: str) -> str:
    """Name in `VisionLanguageModel`, e.g. final_mlp.2.bias -> task.head.output.bias.

    A name alone says which task it belongs to, except the names that RefCOCO's and VQA's heads share; those are the
    same here.
    """
    [ours] = [f"{part}.{name}" for part, state in split_state({official: torch.empty(0)}).items() for name in state]
    return ours
