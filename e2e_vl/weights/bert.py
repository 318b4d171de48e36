"""BERT checkpoints of transformers as a start for VL-BERT: names, old and new ones. Other encoders change the tables.

A file holds `bert.encoder.layer.N.*` or, without the language-modelling head, `encoder.layer.N.*`; the oldest have
`gamma` and `beta` in LayerNorms. As in the official VL-BERT code, BERT's two segment rows become rows 0 and 1, row 2
(regions) stays random, and `cls.predictions.*` is the start of the masked-language-modelling head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from detector.errors import UserError
from e2e_vl.weights.base import (
    WORD_EMBEDDINGS,
    ModelWeights,
    WeightAdapter,
    as_float32,
    check_tied,
    replace_module,
    unknown_name,
)
from e2e_vl.weights.vl_bert import SEGMENTS

ENCODER = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "embeddings.segment_embeddings",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer": "layers",
    "pooler": "pooler",
}
WORD_HEAD = {
    "cls.predictions.transform.dense": "word_head.transform.dense",
    "cls.predictions.transform.LayerNorm": "word_head.transform.norm",
    "cls.predictions.bias": "word_head.bias",
    "cls.predictions.decoder.bias": "word_head.bias",  # the same, twice in files of some versions
}
DECODER = "cls.predictions.decoder.weight"
UNUSED = ("cls.seq_relationship.", "embeddings.position_ids")  # next-sentence head; indices that old versions saved
POSITIONS = "embeddings.position_embeddings.weight"


class BertStart(WeightAdapter):
    """BERT fills the parts of VL-BERT that it has; the rest stays random."""

    layout = "BERT"
    required = tuple(f"{module}." for module in ENCODER.values() if module != "pooler")
    names: ClassVar[Mapping[str, str]] = ENCODER  # BERT's -> ours
    head_names: ClassVar[Mapping[str, str]] = WORD_HEAD  # of its heads
    transferable: ClassVar[tuple[str, ...]] = ("word_head.",)  # see `Task.transferable`

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.removeprefix("bert.") == "embeddings.token_type_embeddings.weight" for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """`task` holds the heads that `head_names` names, if the file has them."""
        encoder, head, decoder = {}, {}, None
        for name, value in as_float32(tensors).items():
            new = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)).removeprefix("bert.")
            if (ours := replace_module(new, self.names)) is not None:
                encoder[ours] = value
            elif (ours := replace_module(new, self.head_names)) is not None:
                head[ours] = value
            elif new == DECODER:
                decoder = value
            elif not new.startswith(UNUSED):
                raise unknown_name(name, "BERT", source)
        check_tied(decoder, encoder, source)
        return ModelWeights({}, encoder, head, transferable=self.transferable)

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The encoder's own rows are added to the segment table."""
        self.check_tables(tensors, encoder, source)
        own = encoder.state_dict()[SEGMENTS]
        segments = tensors.get(SEGMENTS)
        # otherwise the loader's report says what is wrong
        if segments is not None and segments.shape[1] == own.shape[1] and len(segments) <= len(own):
            tensors = {**tensors, SEGMENTS: torch.cat([segments, own[len(segments) :].float()])}
        return tensors, [f"segment rows of BERT -> the first rows of {SEGMENTS}"]

    def check_tables(self, tensors: Mapping[str, Tensor], encoder: nn.Module, source: str | Path) -> None:
        """Refuse another vocabulary or another number of positions, with the setting to change."""
        own = encoder.state_dict()
        for name, what, remedy in (
            (WORD_EMBEDDINGS, "wordpieces", "data.vocabulary to the vocabulary of this BERT"),
            (POSITIONS, "positions", "encoder.config.max_position_embeddings to this number"),
        ):
            if name in tensors and len(tensors[name]) != len(own[name]):
                raise UserError(
                    f"{source}: this BERT has {len(tensors[name])} {what}, the run's encoder {len(own[name])}; set "
                    f"{remedy}."
                )
