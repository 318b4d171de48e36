"""BERT checkpoints of transformers as a start: old and new names, and heads.

A file holds `bert.encoder.layer.N.*` or, without the language-modelling head, `encoder.layer.N.*`; the oldest have
`gamma` and `beta` in LayerNorms. `cls.predictions.*` is the start of the masked-language-modelling head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from e2e_vl.weights.base import ModelWeights, Names, WeightAdapter, split_names

MODULES = (
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
    "embeddings.LayerNorm",
    "encoder.layer",
    "pooler",
)
WORD_HEAD = {
    "cls.predictions.transform.dense": "word_head.transform.dense",
    "cls.predictions.transform.LayerNorm": "word_head.transform.norm",
    "cls.predictions.decoder.bias": "word_head.bias",  # the next one again, in files of some versions
    "cls.predictions.bias": "word_head.bias",  # after it: `reverse` takes the last
}
POSITION_IDS = "embeddings.position_ids"  # indices that old versions saved


class BertStart(WeightAdapter):
    """BERT fills the parts of an encoder that it has; the rest stays random."""

    layout = "BERT"
    names: ClassVar[Names] = dict(zip(MODULES, MODULES, strict=True))  # of an encoder that has BERT's names
    head_names: ClassVar[Names] = WORD_HEAD
    unused: ClassVar[tuple[str, ...]] = ("cls.seq_relationship", POSITION_IDS)
    transferable: ClassVar[tuple[str, ...]] = ("word_head.",)  # see `Task.transferable`

    @property
    def required(self) -> list[str]:
        """All that it has but the pooler, which a masked language model lacks."""
        return [f"{ours}." for ours in self.names.values() if ours != "pooler"]

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.removeprefix("bert.") == "embeddings.token_type_embeddings.weight" for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        new = {
            re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)).removeprefix("bert."): value
            for name, value in tensors.items()
        }
        encoder, head = split_names(new, self.names, self.head_names, source, self.unused)
        return ModelWeights({}, encoder, head, transferable=self.transferable)
