"""BERT's layer with fused attention, and its attention maps where somebody asks for them.

Shape legend
    M  texts in the batch
    Z  positions of the longest packed sequence
    E  hidden size of the encoder
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class LayersRun(NamedTuple):
    """What comes out of layers that run one after the other."""

    output: Float[Tensor, "M Z E"]
    attentions: list[Float[Tensor, "M heads Z Z"]]  # a map per layer if asked for, otherwise none
    inner: Float[Tensor, "M Z E"]  # the states after the number of layers that was asked for, or else the output


def run_layers(
    layers: Sequence[BertLayerWithMaps],
    hidden: Float[Tensor, "M Z E"],
    attend: Bool[Tensor, "M Z"],
    output_attentions: bool = False,
    biases: Sequence[Float[Tensor, "M heads Z Z"]] = (),
    inner: int | None = None,
) -> LayersRun:
    """One layer after the other, each of which attends to the real positions alone.

    Args:
        biases: added to the attention logits, one per layer; or none.
        inner: number of layers after which the states are wanted too; 0: the input.
    """
    mask = additive_mask(attend, hidden.dtype)
    attentions, kept = [], None
    for number, layer in enumerate(layers):
        if number == inner:
            kept = hidden
        layer_mask = mask + biases[number].to(mask.dtype) if biases else mask
        hidden, attention = layer(hidden, layer_mask, output_attentions)
        if output_attentions:
            attentions.append(attention)
    return LayersRun(hidden, attentions, hidden if kept is None else kept)


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
