"""BERT's layer with fused attention and optional attention maps, packed sequences, and the geometry of regions.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Num, Shaped
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput, BertSelfAttention

from detector.errors import UserError
from e2e_vl.structures import IntermediateStates, TextBatch, TextRegions, take_along_dim


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
    intermediate: Float[Tensor, "M Z E"]  # the states after the number of layers that was asked for, or else the output


def run_layers(
    layers: Sequence[BertLayerWithMaps],
    hidden: Float[Tensor, "M Z E"],
    attention_mask: Bool[Tensor, "M Z"],
    output_attentions: bool = False,
    biases: Sequence[Float[Tensor, "M heads Z Z"]] = (),
    intermediate: int | None = None,
) -> LayersRun:
    """One layer after the other, each of which attends to the real positions alone.

    Args:
        biases: added to the attention logits, one per layer; or none.
        intermediate: number of layers after which the states are wanted too; 0: the input.
    """
    # added to the attention logits: 0 at real positions, the smallest number elsewhere
    mask = torch.zeros(attention_mask.shape, dtype=hidden.dtype, device=hidden.device)
    mask = mask.masked_fill(~attention_mask, torch.finfo(hidden.dtype).min)[:, None, None, :]
    attentions, kept = [], None
    for number, layer in enumerate(layers):
        if number == intermediate:
            kept = hidden
        layer_mask = mask + biases[number].to(mask.dtype) if biases else mask
        hidden, attention = layer(hidden, layer_mask, output_attentions)
        if output_attentions:
            attentions.append(attention)
    return LayersRun(hidden, attentions, hidden if kept is None else kept)


def attention_probabilities(
    attention: BertSelfAttention, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"]
) -> Float[Tensor, "M heads Z Z"]:
    """Attention maps before dropout, computed apart because fused attention does not return them."""
    split = (*hidden.shape[:-1], -1, attention.attention_head_size)
    query = attention.query(hidden).view(split).transpose(1, 2)
    key = attention.key(hidden).view(split).transpose(1, 2)
    return (query @ key.transpose(2, 3) * attention.scaling + mask).softmax(dim=-1)


# Texts and regions as one sequence without gaps.


def check_length(texts: TextBatch, limit: int, extra: int = 0) -> int:
    """The number of wordpieces of the longest text; `extra` positions of regions need rows of the table too."""
    length = texts.input_ids.shape[1]
    if length + extra > limit:
        raise UserError(
            f"A text of {length} wordpieces (with all positions {length + extra}) does not fit into "
            f"max_position_embeddings = {limit}; set data.max_text_length, or raise the encoder's limit."
        )
    return length


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """Which of the slots of a text sits at which position of its packed sequence.

    The slots are [words | regions], L + R, or [words | regions | END], L + R + 1, for an encoder that has an end.

    Slots are easy to address, but padding lies between a short text and its regions; in the packed sequence all
    padding is at the end. That saves computation where long texts with few regions share a batch with short texts
    with many.
    """

    slot: Int64[Tensor, "M Z"]  # slot that is shown at a position
    position: Int64[Tensor, "M slots"]  # position of a slot; any valid one for padding
    is_real: Bool[Tensor, "M slots"]  # slots that are not padding
    attention_mask: Bool[Tensor, "M Z"]  # positions that are not padding
    has_end: bool  # the last slot is [END]

    @classmethod
    def from_masks(
        cls, text_mask: Bool[Tensor, "M L"], region_mask: Bool[Tensor, "M R"], *, has_end: bool = True
    ) -> SequenceLayout:
        """Args: True at real words and regions. With `has_end` there is one more slot ([END]), which is always real."""
        end = text_mask.new_ones(len(text_mask), int(has_end))
        is_real = torch.cat([text_mask, region_mask, end], dim=1)
        longest = max(int(is_real.sum(dim=1).max()) if len(is_real) else 1, 1)
        slot = (~is_real).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        position = (is_real.cumsum(dim=1) - 1).clamp(min=0)
        return cls(
            slot=slot, position=position, is_real=is_real, attention_mask=is_real.gather(1, slot), has_end=has_end
        )

    def pack(self, slots: Shaped[Tensor, "M slots E"]) -> Shaped[Tensor, "M Z E"]:
        """Slots -> positions."""
        return take_along_dim(slots, self.slot[..., None], dim=1)

    def unpack(self, packed: Shaped[Tensor, "M Z E"]) -> Shaped[Tensor, "M slots E"]:
        """Positions -> slots, zero at padding."""
        return take_along_dim(packed, self.position[..., None], dim=1) * self.is_real[..., None]

    def split(self, packed: Float[Tensor, "M Z E"], length: int) -> IntermediateStates:
        """Positions -> the vectors of words, of which the longest text has `length`, and of regions."""
        ends = int(self.has_end)
        words, regions, _ = self.unpack(packed).split([length, self.is_real.shape[1] - length - ends, ends], dim=1)
        return IntermediateStates(words, regions)

    def pack_pairs(self, slots: Shaped[Tensor, "M heads slots slots"]) -> Shaped[Tensor, "M heads Z Z"]:
        """Pairs of slots -> pairs of positions."""
        return gather_pairs(slots, self.slot)

    def unpack_pairs(self, packed: Shaped[Tensor, "M heads Z Z"]) -> Shaped[Tensor, "M heads slots slots"]:
        """Pairs of positions -> pairs of slots, zero at padding."""
        is_pair = self.is_real[:, None, :, None] & self.is_real[:, None, None, :]
        return gather_pairs(packed, self.position) * is_pair


def gather_pairs(
    values: Shaped[Tensor, "M heads old old"], index: Int64[Tensor, "M new"]
) -> Shaped[Tensor, "M heads new new"]:
    """Select rows and columns by an index."""
    rows = take_along_dim(values, index[:, None, :, None], dim=2)
    return take_along_dim(rows, index[:, None, None, :], dim=3)


def region_word_alignment(texts: TextBatch, regions: TextRegions, dtype: torch.dtype) -> Float[Tensor, "M R L"] | None:
    """1 where a word names a region, which is a candidate box of the text's first image; None: no word names any."""
    if texts.region_of_token is None:
        return None
    can_be_named = regions.attention_mask & (regions.row >= 0) & (regions.image_slot == 0)
    is_named = regions.row[:, :, None] == texts.region_of_token[:, None]
    return (is_named & can_be_named[:, :, None]).to(dtype)


# Where a region lies: sines and cosines of its coordinates as a vector, and its place relative to other regions.


GeometryKind = Literal["centre_size", "corners"]


def sinusoids(values: Float[Tensor, "*shape"], wavelengths: int) -> Float[Tensor, "*shape 2*{wavelengths}"]:
    """Sines, then cosines, of `100 * value / 1000^(i / wavelengths)` for i = 0 .. wavelengths - 1.

    Relation Networks (Hu et al., CVPR 2018, section 3) take this embedding from the Transformer; the factors 100 and
    1000 come from its code and the official VL-BERT code.
    """
    exponents = torch.arange(wavelengths, device=values.device, dtype=values.dtype) / wavelengths
    angles = 100.0 * values[..., None] / 1000.0**exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def geometry_embedding(
    boxes: Float[Tensor, "*shape 4"],
    image_sizes: Num[Tensor, "*shape 2"],
    dim: int = 2048,
    kind: GeometryKind = "centre_size",
) -> Float[Tensor, "*shape {dim}"]:
    """Position and size of a box within its image.

    Args:
        dim: width of the result, a multiple of 8: four coordinates, sine and cosine of dim / 8 wavelengths each.
        kind: "centre_size" embeds (centre x, centre y, width, height) as the official VL-BERT code does; "corners"
            embeds (x1, y1, x2, y2) as the paper's section 3.2 says. Both are divided by the image's width and height.

    Returns:
        For each coordinate in turn dim / 8 sines, then dim / 8 cosines.
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    if kind == "centre_size":
        low, high = boxes[..., :2], boxes[..., 2:]
        boxes = torch.cat([(low + high) / 2, high - low], dim=-1)
    relative = boxes / torch.stack([width, height, width, height], dim=-1)
    return sinusoids(relative, dim // 8).flatten(-2)


RELATIVE_NUMBERS = 10  # width of `relative_geometry`


def relative_geometry(
    boxes: Float[Tensor, "*shape R 4"], image_sizes: Num[Tensor, "*shape R 2"]
) -> Float[Tensor, "*shape R R 10"]:
    """How every region m lies relative to every region n of the same image.

    Returns:
        Entry [n, m] holds, with lengths along x as shares of the image's width and along y of its height: the way from
        the centre of n to the centre of m in x and y, the absolute values of both, the gap between the boxes in x and y
        (negative where they overlap), log of m's width and height over n's (sides below 1/1000 count as that much), the
        Euclidean norm of the way, and the Euclidean norm of the gaps (a negative one counts as 0).
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    low, high = (boxes / torch.stack([width, height, width, height], dim=-1)).split(2, dim=-1)
    centres, sides = (low + high) / 2, (high - low).clamp(min=1e-3).log()
    way = centres[..., None, :, :] - centres[..., :, None, :]
    gap = torch.maximum(low[..., None, :, :] - high[..., :, None, :], low[..., :, None, :] - high[..., None, :, :])
    ratio = sides[..., None, :, :] - sides[..., :, None, :]
    # added: the derivative of a norm at 0 is not a number
    norms = [(values.square().sum(dim=-1, keepdim=True) + 1e-12).sqrt() for values in (way, gap.clamp(min=0))]
    return torch.cat([way, way.abs(), gap, ratio, *norms], dim=-1)


class _GeometryHidden(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)


class _GeometryOutput(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


# What decides about "next to" is a few hundredths of the image. In shares of it the weights would have to grow to tens
# before the bias could follow; in units this small, drawn relations are learned in half of the steps.
UNITS = 20.0

GEOMETRY_LAYERS = (_GeometryHidden, _GeometryOutput)  # do not start as the other Linears of an encoder


class RelativeGeometryBias(nn.Module):
    """A learned number per layer and head for each pair of regions of one image, added to their attention logits.

    Each layer has a small network of its own: Linear, GELU, Linear over 20 times `relative_geometry`. Relation Networks
    (Hu et al., CVPR 2018, equations 3 to 5) multiply the exponential of the attention logit with a weight from a linear
    map of sinusoids, which can express neither a direction nor a distance; here the *logarithm* of such a weight is
    learned.
    It starts at 0, which is plain attention, so that checkpoints without it can be loaded.

    Args:
        config: of the encoder.
        num_layers: attention layers over regions.
    """

    starts_at_zero = True  # it adds nothing before it is trained, so weights may lack it as a whole

    def __init__(self, config: PreTrainedConfig, num_layers: int):
        super().__init__()
        num_heads, width = config.num_attention_heads, config.relative_geometry_size
        self.hidden = nn.ModuleList(_GeometryHidden(RELATIVE_NUMBERS, width) for _ in range(num_layers))
        self.output = nn.ModuleList(_GeometryOutput(width, num_heads) for _ in range(num_layers))

    def forward(
        self, boxes: Float[Tensor, "M R 4"], image_sizes: Num[Tensor, "M R 2"], is_pair: Bool[Tensor, "M R R"]
    ) -> list[Float[Tensor, "M heads R R"]]:
        """Regions of M texts -> a bias per layer: rows are queries, columns keys; 0 where there is no pair.

        Texts with the same boxes (as those about one image mostly have) share one run of the networks.
        """
        places = torch.cat([boxes, image_sizes.to(boxes.dtype)], dim=-1).flatten(1).detach()
        distinct, which = torch.unique(places, dim=0, return_inverse=True)
        # any text that has these boxes
        text = which.new_zeros(len(distinct)).scatter(0, which, torch.arange(len(which), device=which.device))
        numbers = UNITS * relative_geometry(boxes[text], image_sizes[text]).to(self.hidden[0].weight.dtype)
        return [
            (output(F.gelu(hidden(numbers))).index_select(0, which) * is_pair[..., None]).permute(0, 3, 1, 2)
            for hidden, output in zip(self.hidden, self.output, strict=True)
        ]


def packed_biases(
    bias: RelativeGeometryBias, regions: TextRegions, layout: SequenceLayout
) -> list[Float[Tensor, "M heads Z Z"]]:
    """The biases of a sequence of words and regions (and perhaps an end), zero but between regions."""
    count = regions.attention_mask.shape[1]
    ends = int(layout.has_end)
    words = layout.is_real.shape[1] - count - ends
    found = bias(regions.boxes, regions.image_sizes, pairs_of_one_image(regions))
    return [layout.pack_pairs(F.pad(one, (words, ends, words, ends))) for one in found]


def pairs_of_one_image(regions: TextRegions) -> Bool[Tensor, "M R R"]:
    """True for two regions that come from the same image of a text."""
    same_image = regions.image_slot[:, :, None] == regions.image_slot[:, None]
    return same_image & regions.attention_mask[:, :, None] & regions.attention_mask[:, None]
