"""BERT checkpoints of transformers as a start for VL-BERT: names, old and new ones, and where to find the file.

A file holds `bert.encoder.layer.N.*` or, without the language-modelling head, `encoder.layer.N.*`; the oldest have
`gamma` and `beta` in LayerNorms. As in the official VL-BERT code, BERT's two segment rows become rows 0 and 1, row 2
(regions) stays random, and `cls.predictions.*` is the start of the masked-language-modelling head.

Shape legend
    V   vocabulary
    H   hidden size
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import cached_file

from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.weights.vl_bert import WORD_TABLE, Parts, replace_module

ENCODER = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "embeddings.segment_embeddings",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer": "layers",
    "pooler": "pooler",
}
MLM = {
    "cls.predictions.transform.dense": "mlm.transform.dense",
    "cls.predictions.transform.LayerNorm": "mlm.transform.norm",
    "cls.predictions.bias": "mlm.bias",
    "cls.predictions.decoder.bias": "mlm.bias",  # the same, twice in files of some versions
}
DECODER = "cls.predictions.decoder.weight"
# Next-sentence head, and indices that old versions saved.
UNUSED = ("cls.seq_relationship.", "embeddings.position_ids")
FILES = ("model.safetensors", "pytorch_model.bin")
TASK_NAME = "bert"  # of `Parts` that come from BERT
SEGMENTS = "embeddings.segment_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"


def is_bert(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the names are those of transformers' BERT."""
    return any(name.removeprefix("bert.") == "embeddings.token_type_embeddings.weight" for name in tensors)


def from_bert(tensors: Mapping[str, Tensor], source: str | Path) -> Parts:
    """A BERT state dict in our names, in float32; `task` holds the masked-language-modelling head, if the file has it.

    Raises:
        ValueError: a name that BERT does not have, or a decoder that is not the word table.
    """
    parts = Parts(detector={}, encoder={}, task={}, task_name=TASK_NAME)
    for name, value in tensors.items():
        new = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)).removeprefix("bert.")
        value = value.float() if value.is_floating_point() else value
        if (ours := replace_module(new, ENCODER)) is not None:
            parts.encoder[ours] = value
        elif (ours := replace_module(new, MLM)) is not None:
            parts.task[ours] = value
        elif new != DECODER and not new.startswith(UNUSED):
            raise ValueError(f"{source}: {name} is no name of a BERT model.")
    words = parts.encoder.get(WORD_TABLE)
    if DECODER in tensors and (words is None or not torch.equal(tensors[DECODER].float(), words)):
        raise ValueError(f"{source}: {DECODER} is not the word table; only BERTs that share the two can be loaded.")
    return parts


def fit_to_encoder(tensors: dict[str, Tensor], encoder: VLBertModel, source: str | Path) -> dict[str, Tensor]:
    """BERT's weights with the encoder's own rows added to the segment table.

    Raises:
        ValueError: another vocabulary or another number of positions; the message says which setting to change.
    """
    own = encoder.state_dict()
    rows = {name: (len(tensors.get(name, own[name])), len(own[name])) for name in (WORD_TABLE, POSITIONS)}
    words, positions = rows[WORD_TABLE], rows[POSITIONS]
    if words[0] != words[1]:
        raise ValueError(
            f"{source}: its word table has {words[0]} wordpieces, but the run's vocabulary has {words[1]}; set "
            "data.vocabulary to the vocabulary of this BERT."
        )
    if positions[0] != positions[1]:
        raise ValueError(
            f"{source}: its position table has {positions[0]} positions, but the encoder's has {positions[1]}; set "
            f"encoder.config.max_position_embeddings to {positions[0]}."
        )
    segments = tensors.get(SEGMENTS)
    if segments is None or segments.shape[1] != own[SEGMENTS].shape[1] or len(segments) > len(own[SEGMENTS]):
        return tensors  # the loader's report says what is wrong
    return {**tensors, SEGMENTS: torch.cat([segments, own[SEGMENTS][len(segments) :].float()])}


def fetch_from_hub(name: str) -> Path:
    """Weights file of a BERT on the Hugging Face hub, or in its local cache, such as `bert-base-uncased`.

    Raises:
        FileNotFoundError: nothing of that name within reach.
    """
    try:
        cached_file(name, "config.json")  # fails for all reasons there are; `load_encoder` reads it
        new, old = FILES
        found = cached_file(name, new, _raise_exceptions_for_missing_entries=False) or cached_file(name, old)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name}: neither a local file or folder nor a model that could be fetched from the hub "
            f"({str(error).splitlines()[0]}); check the name and the connection, or give a local file."
        ) from error
    return Path(found)
