"""BERT's layer with fused attention, and its attention maps where somebody asks for them.

Shape legend
    M  texts in the batch
    Z  positions of the longest packed sequence
    E  hidden size of the encoder
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput, BertSelfAttention


class BertLayerWithMaps(GradientCheckpointingLayer):
    """A BERT layer with the parameter names of transformers' `BertLayer`."""

    def __init__(self, config: BertConfig, index: int):
        super().__init__()
        self.attention = BertAttention(config, layer_idx=index)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"], output_attentions: bool = False
    ) -> tuple[Float[Tensor, "M Z E"], Float[Tensor, "M heads Z Z"] | None]:
        """Hidden states and an additive mask -> hidden states, and attention if asked for."""
        probabilities = attention_probabilities(self.attention.self, hidden, mask) if output_attentions else None
        context, _ = self.attention.self(hidden, mask)
        hidden = self.attention.output(context, hidden)
        return self.output(self.intermediate(hidden), hidden), probabilities


def run_layers(
    layers: Iterable[BertLayerWithMaps],
    hidden: Float[Tensor, "M Z E"],
    attend: Bool[Tensor, "M Z"],
    output_attentions: bool = False,
) -> tuple[Float[Tensor, "M Z E"], list[Float[Tensor, "M heads Z Z"]]]:
    """One layer after the other, each of which attends to the real positions alone.

    Returns:
        The output, and the attention map of each layer if asked for, otherwise none.
    """
    mask = additive_mask(attend, hidden.dtype)
    attentions = []
    for layer in layers:
        hidden, attention = layer(hidden, mask, output_attentions)
        if output_attentions:
            attentions.append(attention)
    return hidden, attentions


def additive_mask(attend: Bool[Tensor, "M Z"], dtype: torch.dtype) -> Float[Tensor, "M 1 1 Z"]:
    """What is added to attention logits: 0 at real positions, the smallest number elsewhere."""
    mask = torch.zeros(attend.shape, dtype=dtype, device=attend.device)
    return mask.masked_fill(~attend, torch.finfo(dtype).min)[:, None, None, :]


def attention_probabilities(
    attention: BertSelfAttention, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"]
) -> Float[Tensor, "M heads Z Z"]:
    """Attention maps before dropout, computed apart because fused attention does not return them."""
    split = (*hidden.shape[:-1], -1, attention.attention_head_size)
    query = attention.query(hidden).view(split).transpose(1, 2)
    key = attention.key(hidden).view(split).transpose(1, 2)
    return (query @ key.transpose(2, 3) * attention.scaling + mask).softmax(dim=-1)
