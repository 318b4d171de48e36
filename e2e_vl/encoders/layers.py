"""BERT layers with fused attention and optional attention maps, packed sequences, and the geometry of regions.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
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
from e2e_vl.structures import PROPOSAL_NUMBERS, IntermediateStates, TextBatch, TextRegions, take_along_dim


class BertLayerWithAttentions(GradientCheckpointingLayer):
    """A BERT layer that can return attention maps; parameters have the names of transformers' `BertLayer`."""

    def __init__(self, config: BertConfig, index: int):
        super().__init__()
        self.attention = BertAttention(config, layer_idx=index)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"], output_attentions: bool = False
    ) -> tuple[Float[Tensor, "M Z E"], Float[Tensor, "M heads Z Z"] | None]:
        """Update hidden states under an additive mask; return the attention map too with `output_attentions`."""
        cast = hidden.to(matmul_dtype(hidden))  # autocast alone would cast the states for query, key and value each
        probabilities = attention_probabilities(self.attention.self, cast, mask) if output_attentions else None
        context, _ = self.attention.self(cast, mask)
        hidden = self.attention.output(context, hidden)
        return self.output(self.intermediate(hidden), hidden), probabilities


def matmul_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of these values are computed: autocast's, or their own."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


class LayerOutputs(NamedTuple):
    """The outputs of `run_layers`."""

    output: Float[Tensor, "M Z E"]
    attentions: list[Float[Tensor, "M heads Z Z"]]  # a map per layer, or empty without `output_attentions`
    # number of layers -> the states after them, for each of `intermediate_layers`
    intermediate: dict[int, Float[Tensor, "M Z E"]]


def run_layers(
    layers: Sequence[BertLayerWithAttentions],
    hidden: Float[Tensor, "M Z E"],
    attention_mask: Bool[Tensor, "M Z"],
    output_attentions: bool = False,
    biases: Sequence[Float[Tensor, "M heads Z Z"]] = (),
    intermediate_layers: Collection[int] = (),
) -> LayerOutputs:
    """Apply layers in turn; padding is masked.

    Args:
        biases: one per layer, added to the attention logits; may be empty.
        intermediate_layers: also return the states after these numbers of layers; 0: the input.
    """
    # additive mask: 0 at real positions, the smallest number elsewhere
    dtype = matmul_dtype(hidden)  # autocast alone would cast the mask in each layer
    mask = torch.zeros(attention_mask.shape, dtype=dtype, device=hidden.device)
    mask = mask.masked_fill(~attention_mask, torch.finfo(dtype).min)[:, None, None, :]
    attentions = []
    intermediate = {}
    for number, layer in enumerate(layers):
        if number in intermediate_layers:
            intermediate[number] = hidden
        layer_mask = mask
        if biases:
            layer_mask = mask + biases[number].to(mask.dtype)
        hidden, attention = layer(hidden, layer_mask, output_attentions)
        if output_attentions:
            attentions.append(attention)
    if len(layers) in intermediate_layers:
        intermediate[len(layers)] = hidden
    return LayerOutputs(hidden, attentions, intermediate)


def attention_probabilities(
    attention: BertSelfAttention, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"]
) -> Float[Tensor, "M heads Z Z"]:
    """Compute attention maps before dropout, separately because fused attention does not return them."""
    split = (*hidden.shape[:-1], -1, attention.attention_head_size)
    query = attention.query(hidden).view(split).transpose(1, 2)
    key = attention.key(hidden).view(split).transpose(1, 2)
    return (query @ key.transpose(2, 3) * attention.scaling + mask).softmax(dim=-1)


# Texts and regions packed into one sequence


def check_length(texts: TextBatch, limit: int, extra: int = 0) -> int:
    """Return L, or raise a UserError if L and `extra` positions of regions exceed the position table."""
    length = texts.input_ids.shape[1]
    if length + extra > limit:
        raise UserError(
            f"A text of {length} wordpieces ({length + extra} positions in all) does not fit into "
            f"max_position_embeddings = {limit}; set data.max_text_length or increase max_position_embeddings."
        )
    return length


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """The mapping between the slots of a padded batch and the positions of the packed sequences.

    The slots are [words | regions] (L + R), or [words | regions | END] (L + R + 1) for an encoder with an [END] token.

    In slots, padding separates a short text from its regions. In a packed sequence all padding is at the end, which
    saves computation if one text of a batch is long and another one has many regions.
    """

    slot: Int64[Tensor, "M Z"]  # slot of a position
    position: Int64[Tensor, "M slots"]  # position of a slot; arbitrary but valid at padding
    is_real: Bool[Tensor, "M slots"]  # slots that are not padding
    attention_mask: Bool[Tensor, "M Z"]  # positions that are not padding
    has_end: bool  # the last slot is [END]

    @classmethod
    def from_masks(
        cls,
        text_mask: Bool[Tensor, "M L"],
        region_mask: Bool[Tensor, "M R"],
        longest: int | None = None,
        *,
        has_end: bool = True,
    ) -> SequenceLayout:
        """Make the layout of texts and their regions.

        Args:
            text_mask, region_mask: True at real words and regions.
            longest: Z, the number of real slots of the longest text; None: counted from the masks (a GPU waits).
            has_end: there is one more slot ([END]), which is always real.
        """
        end = text_mask.new_ones(len(text_mask), int(has_end))
        is_real = torch.cat([text_mask, region_mask, end], dim=1)
        if longest is None:
            longest = max(is_real.sum(dim=1).tolist(), default=0) or 1
        slot = (~is_real).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        position = (is_real.cumsum(dim=1) - 1).clamp(min=0)
        return cls(
            slot=slot, position=position, is_real=is_real, attention_mask=is_real.gather(1, slot), has_end=has_end
        )

    def pack(self, slots: Shaped[Tensor, "M slots E"]) -> Shaped[Tensor, "M Z E"]:
        """Turn slots into positions."""
        return take_along_dim(slots, self.slot[..., None], dim=1)

    def unpack(self, packed: Shaped[Tensor, "M Z E"]) -> Shaped[Tensor, "M slots E"]:
        """Turn positions into slots, zero at padding."""
        return take_along_dim(packed, self.position[..., None], dim=1) * self.is_real[..., None]

    def split(self, packed: Float[Tensor, "M Z E"], length: int) -> IntermediateStates:
        """Turn positions into vectors of words (L = `length`) and of regions, zero at padding."""
        ends = int(self.has_end)
        words, regions, _ = self.unpack(packed).split([length, self.is_real.shape[1] - length - ends, ends], dim=1)
        return IntermediateStates(words, regions)

    def pack_pairs(self, slots: Shaped[Tensor, "M heads slots slots"]) -> Shaped[Tensor, "M heads Z Z"]:
        """Turn pairs of slots into pairs of positions."""
        return gather_pairs(slots, self.slot)

    def unpack_pairs(self, packed: Shaped[Tensor, "M heads Z Z"]) -> Shaped[Tensor, "M heads slots slots"]:
        """Turn pairs of positions into pairs of slots, zero at padding."""
        is_pair = self.is_real[:, None, :, None] & self.is_real[:, None, None, :]
        return gather_pairs(packed, self.position) * is_pair


def gather_pairs(
    values: Shaped[Tensor, "M heads old old"], index: Int64[Tensor, "M new"]
) -> Shaped[Tensor, "M heads new new"]:
    """Select rows and columns of square matrices with the same index."""
    rows = take_along_dim(values, index[:, None, :, None], dim=2)
    return take_along_dim(rows, index[:, None, None, :], dim=3)


def region_word_alignment(texts: TextBatch, regions: TextRegions, dtype: torch.dtype) -> Float[Tensor, "M R L"] | None:
    """Return 1 where a word refers to a region (a candidate box of the text's first image); None: no word does."""
    if texts.region_of_token is None:
        return None
    can_be_named = regions.attention_mask & (regions.row >= 0) & (regions.image_slot == 0)
    is_named = regions.row[:, :, None] == texts.region_of_token[:, None]
    return (is_named & can_be_named[:, :, None]).to(dtype)


# Geometry of regions: embeddings of box coordinates, and relative positions

GeometryKind = Literal["centre_size", "corners"]


def sinusoids(values: Float[Tensor, "*shape"], wavelengths: int) -> Float[Tensor, "*shape 2*{wavelengths}"]:
    """Compute sines, then cosines, of `100 * value / 1000^(i / wavelengths)` for i = 0 .. wavelengths - 1.

    The Transformer's embedding as used in Relation Networks (Hu et al., CVPR 2018, section 3); the factors 100 and 1000
    are those of its code and of the official VL-BERT code.
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
    """Embed the position and size of a box within its image.

    Args:
        dim: width of the result, a multiple of 8: sine and cosine of dim / 8 wavelengths for four coordinates.
        kind: "centre_size" embeds (centre x, centre y, width, height) as in the official VL-BERT code; "corners"
            embeds (x1, y1, x2, y2) as in the paper, section 3.2. Both are divided by the image's width and height.

    Returns:
        For each coordinate dim / 8 sines, then dim / 8 cosines.
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    if kind == "centre_size":
        low, high = boxes.split(2, dim=-1)
        boxes = torch.cat([(low + high) / 2, high - low], dim=-1)
    relative = boxes / torch.stack([width, height, width, height], dim=-1)
    return sinusoids(relative, dim // 8).flatten(-2)


RELATIVE_NUMBERS = 10  # width of `relative_geometry`


def relative_geometry(
    boxes: Float[Tensor, "*shape R 4"], image_sizes: Num[Tensor, "*shape R 2"]
) -> Float[Tensor, "*shape R R 10"]:
    """Compute the position and size of every region m relative to every region n.

    Returns:
        Entry [n, m] in fractions of the image's width (x) and height (y): the offset from the centre of n to the centre
        of m in x and y, the absolute values of both, the gap between the boxes in x and y (negative where they
        overlap), the log ratios of m's width and height to n's (sides are at least 1/1000), the Euclidean norm of the
        offset, and the Euclidean norm of the gaps (negative ones clamped to 0).
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    low, high = (boxes / torch.stack([width, height, width, height], dim=-1)).split(2, dim=-1)
    centres = (low + high) / 2
    log_sides = (high - low).clamp(min=1e-3).log()
    offset = centres[..., None, :, :] - centres[..., :, None, :]
    gap = torch.maximum(low[..., None, :, :] - high[..., :, None, :], low[..., :, None, :] - high[..., None, :, :])
    log_ratio = log_sides[..., None, :, :] - log_sides[..., :, None, :]
    # epsilon: the derivative of the norm at 0 is NaN
    norms = [(values.square().sum(dim=-1, keepdim=True) + 1e-12).sqrt() for values in (offset, gap.clamp(min=0))]
    return torch.cat([offset, offset.abs(), gap, log_ratio, *norms], dim=-1)


class _GeometryHidden(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)


class _GeometryOutput(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


# Factor of the inputs. A few hundredths of the image decide whether a region is "next to" another; without the factor
# the weights would have to grow large first. With it, relations in synthetic scenes are learned in half of the steps.
INPUT_SCALE = 20.0

GEOMETRY_LAYERS = (_GeometryHidden, _GeometryOutput)  # initialised by `reset_parameters`, unlike other Linears


class RelativeGeometryBias(nn.Module):
    """A learned attention bias per layer and head for each pair of regions of one image.

    Each layer has an MLP (Linear, GELU, Linear) over 20 times `relative_geometry`. Relation Networks (Hu et al., CVPR
    2018, equations 3 to 5) multiply the exponential of the attention logit by a weight, a linear map of sinusoids that
    can express neither a direction nor a distance; here the *logarithm* of such a weight is learned. The bias is
    initially 0 (plain attention), so checkpoints without it can be loaded.

    Args:
        config: config of the encoder.
        num_layers: number of layers with attention among regions.
    """

    starts_at_zero = True  # an untrained bias adds nothing, so a checkpoint may lack all of it

    def __init__(self, config: PreTrainedConfig, num_layers: int):
        super().__init__()
        num_heads = config.num_attention_heads
        width = config.relative_geometry_size
        self.hidden = nn.ModuleList(_GeometryHidden(RELATIVE_NUMBERS, width) for _ in range(num_layers))
        self.output = nn.ModuleList(_GeometryOutput(width, num_heads) for _ in range(num_layers))

    def forward(
        self, boxes: Float[Tensor, "M R 4"], image_sizes: Num[Tensor, "M R 2"], is_pair: Bool[Tensor, "M R R"]
    ) -> list[Float[Tensor, "M heads R R"]]:
        """Compute a bias (query, key) per layer for the regions of M texts, 0 where `is_pair` is False.

        The bias of texts with the same boxes, usually texts about one image, is computed once.
        """
        boxes_and_sizes = torch.cat([boxes, image_sizes.to(boxes.dtype)], dim=-1).flatten(1).detach()
        if len(boxes_and_sizes) == 1:  # without `unique`, so that it can be exported
            distinct_index = torch.zeros(1, dtype=torch.long, device=boxes.device)
            representative = distinct_index
        else:
            distinct, distinct_index = torch.unique(boxes_and_sizes, dim=0, return_inverse=True)
            # one of the texts with these boxes
            texts = torch.arange(len(distinct_index), device=boxes.device)
            representative = distinct_index.new_zeros(len(distinct)).scatter(0, distinct_index, texts)
        geometry = relative_geometry(boxes[representative], image_sizes[representative])
        numbers = INPUT_SCALE * geometry.to(self.hidden[0].weight.dtype)
        biases = []
        for hidden, output in zip(self.hidden, self.output, strict=True):
            bias = output(F.gelu(hidden(numbers))).index_select(0, distinct_index) * is_pair[..., None]
            biases.append(bias.permute(0, 3, 1, 2))
        return biases


def pack_biases(
    bias: RelativeGeometryBias, regions: TextRegions, layout: SequenceLayout
) -> list[Float[Tensor, "M heads Z Z"]]:
    """Compute the biases of packed sequences: those among regions, and zero elsewhere."""
    num_regions = regions.attention_mask.shape[1]
    num_ends = int(layout.has_end)
    num_words = layout.is_real.shape[1] - num_regions - num_ends
    margins = (num_words, num_ends, num_words, num_ends)
    region_biases = bias(regions.boxes, regions.image_sizes, same_image_mask(regions))
    return [layout.pack_pairs(F.pad(region_bias, margins)) for region_bias in region_biases]


def same_image_mask(regions: TextRegions) -> Bool[Tensor, "M R R"]:
    """Return True for pairs of regions from the same image of a text."""
    same_image = regions.image_slot[:, :, None] == regions.image_slot[:, None]
    return same_image & regions.attention_mask[:, :, None] & regions.attention_mask[:, None]


# What a proposer says of a region


class ProposalEmbedding(nn.Linear):
    """A learned map from `TextRegions.proposals` to what is added to the feature of a region, initially zero.

    It has no bias, so nothing is added to a region of which no proposer says anything.
    """

    starts_at_zero = True  # as `RelativeGeometryBias`

    def __init__(self, feature_dim: int):
        super().__init__(PROPOSAL_NUMBERS, feature_dim, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, proposals: Float[Tensor, "M R 4"]) -> Float[Tensor, "M R D"]:
        return super().forward(proposals)
