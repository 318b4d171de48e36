"""Names of the official VL-BERT parameters -> names of this project's detector, encoder and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from detector.weight_names import from_vl_bert
from e2e_vl.weights.vl_bert import encoder_name, from_official, head_name, is_detector_name, recognise_task


def split_state(official: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Official state -> {"detector", "encoder", "task"} states. Raises ValueError for a key that none of them has."""
    parts = from_official(official, "official state")
    drop = "num_batches_tracked"
    detector = {name: value for name, value in parts.detector.items() if not name.endswith(drop)}
    return {"detector": detector, "encoder": parts.encoder, "task": parts.task}


def our_key(official: str) -> str:
    """Name in `VisionLanguageModel`, e.g. final_mlp.2.bias -> task.head.output.bias."""
    name = official.replace("vlbert._module.", "vlbert.", 1)
    if is_detector_name(name):
        return f"detector.{next(iter(from_vl_bert({name: torch.empty(0)}, name)))}"
    if (ours := encoder_name(name)) is not None:
        return f"encoder.{ours}"
    # final_mlp.0.dense and final_mlp.2 are RefCOCO's or VQA's, with the same names here
    if (ours := head_name(name, recognise_task({name: torch.empty(0)}))) is not None:
        return f"task.{ours}"
    raise ValueError(f"{official} is not mapped to anything")
