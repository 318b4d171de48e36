"""LXMERT (Tan and Bansal, EMNLP 2019): a Transformer over words, one over regions, and cross attention between them.

Shape legend: see `e2e_vl/structures.py`; `passes` is M x I, `per_image` the largest number of regions of one image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertPooler, BertSelfOutput
from typing_extensions import override

from e2e_vl.encoders.base import Encoder, PretrainedEncoderConfig
from e2e_vl.encoders.config import LxmertEncoderConfig
from e2e_vl.encoders.layers import RelativeGeometryBias, check_length, gather_pairs, region_word_alignment
from e2e_vl.structures import (
    Ability,
    AttentionBlock,
    AttentionGraph,
    EncoderOutput,
    IntermediateStates,
    TextBatch,
    TextRegions,
    take_along_dim,
)

# The layers of LXMERT, with fused attention and the parameter names of transformers' `LxmertModel`

Map = Float[Tensor, "M heads _ _"]  # attention probabilities (query, key) before dropout


class TextEmbeddings(nn.Module):
    """Word + position + segment vector, LayerNorm, dropout.

    As in the official code, row 0 of each table is a padding row and gets no gradient from the lookup. Therefore the
    vectors of position 0 ([CLS]) and of segment 0 (all texts of the official code) keep their random initial values.
    """

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size, padding_idx=0)
        self.token_type_embeddings = None
        if config.with_segments:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size, padding_idx=0)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, texts: TextBatch) -> Float[Tensor, "M L E"]:
        length = check_length(texts, self.position_embeddings.num_embeddings)
        positions = torch.arange(length, device=texts.input_ids.device)
        vectors = self.word_embeddings(texts.input_ids) + self.position_embeddings(positions)
        if self.token_type_embeddings is not None:
            vectors = vectors + self.token_type_embeddings(texts.token_type_ids)
        return self.dropout(self.LayerNorm(vectors))


class RegionEmbeddings(nn.Module):
    """(LayerNorm(Linear(feature)) + LayerNorm(Linear(box))) / 2, then dropout (paper, section 2.1)."""

    def __init__(self, config):
        super().__init__()
        self.visn_fc = nn.Linear(config.feature_dim, config.hidden_size)
        self.visn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.box_fc = nn.Linear(4, config.hidden_size)
        self.box_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, features: Float[Tensor, "M R D"], boxes: Float[Tensor, "M R 4"]) -> Float[Tensor, "M R E"]:
        """Embed regions; `boxes` are xyxy divided by the image's width and height."""
        feature_vectors = self.visn_layer_norm(self.visn_fc(features))
        box_vectors = self.box_layer_norm(self.box_fc(boxes.to(features.dtype)))
        return self.dropout((feature_vectors + box_vectors) / 2)


class MultiHeadAttention(nn.Module):
    """Multi-head attention with keys and values from the same or another sequence."""

    def __init__(self, config):
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        states: Float[Tensor, "M queries E"],
        context: Float[Tensor, "M keys E"],
        attention_mask: Bool[Tensor, "M keys"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads queries keys"] | None = None,
    ) -> tuple[Float[Tensor, "M queries E"], Map | None]:
        """Return the output, and the attention map with `output_attentions`; the bias is added to the logits.

        If the context is empty, such as the regions of a text without an image, the output and the map are zero.
        (The official code would average over the padding, because all masked scores are equal.)
        """
        split = (-1, self.head_size)
        query = self.query(states).unflatten(-1, split).transpose(1, 2)
        key = self.key(context).unflatten(-1, split).transpose(1, 2)
        value = self.value(context).unflatten(-1, split).transpose(1, 2)
        has_key = attention_mask.any(dim=1)[:, None, None, None]
        mask = attention_mask[:, None, None, :] | ~has_key
        if bias is None:
            logit_mask = mask.expand(-1, 1, query.shape[2], -1)
        else:
            bias = bias.to(query.dtype).masked_fill(~mask, -torch.inf)
            logit_mask = bias
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=logit_mask, dropout_p=dropout)
        output = (output * has_key).transpose(1, 2).flatten(2)
        if not output_attentions:
            return output, None
        logits = query @ key.transpose(2, 3) * self.head_size**-0.5
        if bias is not None:
            logits = logits + bias
        return output, logits.masked_fill(~mask, -torch.inf).softmax(dim=-1) * has_key


class AttentionStep(nn.Module):
    """Attention, Linear, dropout, residual, LayerNorm. `inner` is the attention's name in the state dict."""

    def __init__(self, config, inner: str = "self"):
        super().__init__()
        self.inner = inner
        self.add_module(inner, MultiHeadAttention(config))
        self.output = BertSelfOutput(config)

    def forward(
        self,
        states: Float[Tensor, "M queries E"],
        context: Float[Tensor, "M keys E"],
        attention_mask: Bool[Tensor, "M keys"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads queries keys"] | None = None,
    ) -> tuple[Float[Tensor, "M queries E"], Map | None]:
        attention = self.get_submodule(self.inner)
        read, attention_map = attention(states, context, attention_mask, output_attentions, bias)
        return self.output(read, states), attention_map


class SelfAttentionLayer(GradientCheckpointingLayer):
    """A BERT layer (post-LN) over words alone or over regions alone."""

    def __init__(self, config):
        super().__init__()
        self.attention = AttentionStep(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self,
        states: Float[Tensor, "M length E"],
        attention_mask: Bool[Tensor, "M length"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads length length"] | None = None,
    ) -> tuple[Float[Tensor, "M length E"], Map | None]:
        states, attention_map = self.attention(states, states, attention_mask, output_attentions, bias)
        return self.output(self.intermediate(states), states), attention_map


class CrossModalityLayer(GradientCheckpointingLayer):
    """Cross attention both ways, then self-attention and feed-forward of words and of regions.

    Both directions of the cross attention read the layer's input: regions do not attend to the updated words. The
    directions share one module in the official code; with `cross_attention: separate` each has its own (paper, section
    2.2).
    """

    def __init__(self, config):
        super().__init__()
        self.visual_attention = AttentionStep(config, "att")
        self.text_attention = AttentionStep(config, "att") if config.cross_attention == "separate" else None
        self.lang_self_att = AttentionStep(config)
        self.visn_self_att = AttentionStep(config)
        self.lang_inter = BertIntermediate(config)
        self.lang_output = BertOutput(config)
        self.visn_inter = BertIntermediate(config)
        self.visn_output = BertOutput(config)

    def forward(
        self,
        words: Float[Tensor, "M L E"],
        regions: Float[Tensor, "M R E"],
        word_mask: Bool[Tensor, "M L"],
        region_mask: Bool[Tensor, "M R"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads R R"] | None = None,
    ) -> tuple[Float[Tensor, "M L E"], Float[Tensor, "M R E"], tuple[Map | None, ...]]:
        """Update words and regions, and return them with four attention maps (None without `output_attentions`).

        The maps are words to regions, regions to words, among words, among regions; the bias is for the last one.
        """
        to_text = self.visual_attention if self.text_attention is None else self.text_attention
        crossed_words, to_regions = self.visual_attention(words, regions, region_mask, output_attentions)
        crossed_regions, to_words = to_text(regions, words, word_mask, output_attentions)
        words, among_words = self.lang_self_att(crossed_words, crossed_words, word_mask, output_attentions)
        regions, among_regions = self.visn_self_att(
            crossed_regions, crossed_regions, region_mask, output_attentions, bias
        )
        words = self.lang_output(self.lang_inter(words), words)
        regions = self.visn_output(self.visn_inter(regions), regions)
        return words, regions, (to_regions, to_words, among_words, among_regions)


# Bottom-up and top-down attention (Anderson et al., CVPR 2018), which LXMERT's paper compares with in table 3


def gated_tanh(states: Float[Tensor, "*shape twice"]) -> Float[Tensor, "*shape E"]:
    """Multiply the tanh of the first half by the sigmoid of the second."""
    values, gates = states.chunk(2, dim=-1)
    return values.tanh() * gates.sigmoid()


class TopDownAttention(nn.Module):
    """The state of [CLS] attends once to the detector's features; the summary is the product of both vectors."""

    def __init__(self, config):
        super().__init__()
        feature_dim = config.feature_dim
        hidden_size = config.hidden_size
        self.both = nn.Linear(feature_dim + hidden_size, 2 * hidden_size)
        self.score = nn.Linear(hidden_size, 1, bias=False)
        self.text = nn.Linear(hidden_size, 2 * hidden_size)
        self.image = nn.Linear(feature_dim, 2 * hidden_size)

    def forward(
        self, words: Float[Tensor, "M L E"], features: Float[Tensor, "M R D"], region_mask: Bool[Tensor, "M R"]
    ) -> Float[Tensor, "M E"]:
        """Compute the summary of M texts; the attention on padding is 0."""
        text = words[:, 0]
        mask = region_mask[..., None]
        both = torch.cat([features, text[:, None].expand(-1, features.shape[1], -1)], dim=2)
        logits = self.score(gated_tanh(self.both(both)))
        attention = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(dim=1) * mask
        image = (attention * features).sum(dim=1)
        return gated_tanh(self.text(text)) * gated_tanh(self.image(image))


class SentenceLSTM(nn.LSTM):
    """An LSTM over the states of words; the state of [CLS] becomes that of the last word."""

    def forward(self, words: Float[Tensor, "M L E"], word_mask: Bool[Tensor, "M L"]) -> Float[Tensor, "M L E"]:
        states, _ = super().forward(words)
        last = word_mask.sum(dim=1, keepdim=True) - 1
        return torch.cat([take_along_dim(states, last[..., None], dim=1), states[:, 1:]], dim=1)


# One pass per image of a text


@dataclasses.dataclass(frozen=True)
class ImagePasses:
    """The mapping between the regions of M texts and the M x I passes of the encoder, one per image of a text."""

    row: Int64[Tensor, "M I per_image"]  # region of the text at each position of a pass
    attention_mask: Bool[Tensor, "M I per_image"]  # positions with a region
    slot: Int64[Tensor, "M R"]  # image of a region; I at padding
    position: Int64[Tensor, "M R"]  # of a region in the pass of its image; arbitrary but valid at padding

    @classmethod
    def from_regions(cls, regions: TextRegions, count: int) -> ImagePasses:
        """Make the passes for texts with at most `count` images."""
        attention_mask = regions.attention_mask
        slot = regions.image_slot.masked_fill(~attention_mask, count)
        if count == 1:
            row = torch.arange(attention_mask.shape[1], device=attention_mask.device).expand_as(attention_mask)
            return cls(row[:, None], attention_mask[:, None], slot, row)
        is_of_image = slot[:, None] == torch.arange(count, device=slot.device)[:, None]  # [M, I, R]
        per_image = max(int(is_of_image.sum(dim=2).max()), 1)
        row = (~is_of_image).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :per_image]
        positions = is_of_image.cumsum(dim=2) - 1  # in the pass of each image
        position = positions.gather(1, slot.clamp(max=count - 1)[:, None])[:, 0].clamp(0, per_image - 1)
        return cls(row, is_of_image.gather(2, row), slot, position)

    def split(self, values: Shaped[Tensor, "M R width"]) -> Shaped[Tensor, "passes per_image width"]:
        """Turn regions of texts into regions of passes; meaningless at padding."""
        rows = self.row.flatten(1)[..., None]
        return take_along_dim(values, rows, dim=1).unflatten(1, self.row.shape[1:]).flatten(0, 1)

    def join(self, states: Float[Tensor, "passes per_image E"]) -> Float[Tensor, "M R E"]:
        """Turn regions of passes into regions of texts, zero at padding."""
        count, per_image = self.row.shape[1:]
        positions = self.slot.clamp(max=count - 1) * per_image + self.position
        states = states.unflatten(0, (-1, count)).flatten(1, 2)
        return take_along_dim(states, positions[..., None], dim=1) * (self.slot < count)[..., None]

    def repeat(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "passes ..."]:
        return values.repeat_interleave(self.row.shape[1], dim=0)


def merge_maps(
    texts: TextBatch,
    passes: ImagePasses,
    of_words: list[Float[Tensor, "M heads L L"]],
    of_regions: list[Float[Tensor, "passes heads per_image per_image"]],
    across: list[tuple[Tensor, ...]],
) -> tuple[Float[Tensor, "M heads slots slots"], ...]:
    """Merge the maps of all layers into maps over the L + R slots [words | regions] of M texts.

    Args:
        of_words: a map per layer over words.
        of_regions: a map per layer over regions and pass; the maps of all images are added up, as regions of different
            images do not attend to each other.
        across: four maps per layer with cross attention and pass; they become two maps per image.
    """
    attention_mask = texts.attention_mask
    num_images = passes.row.shape[1]
    num_words = attention_mask.shape[1]
    num_regions = passes.slot.shape[1]
    words = torch.arange(num_words, device=attention_mask.device).expand_as(attention_mask)
    positions = torch.cat([words, num_words + passes.position], dim=1)

    def split_images(maps: Float[Tensor, "passes heads positions positions"]) -> list[Float[Tensor, "M heads _ _"]]:
        """Turn maps over the positions [words | regions of the image] into a map over all slots for each image."""
        image_maps = []
        for image, position_maps in enumerate(maps.unflatten(0, (-1, num_images)).unbind(dim=1)):
            is_real = torch.cat([attention_mask, passes.slot == image], dim=1)
            is_real_pair = is_real[:, None, :, None] & is_real[:, None, None, :]
            image_maps.append(gather_pairs(position_maps, positions) * is_real_pair)
        return image_maps

    merged = []
    is_word_pair = attention_mask[:, None, :, None] & attention_mask[:, None, None, :]
    for word_map in of_words:
        merged.append(F.pad(word_map * is_word_pair, (0, num_regions, 0, num_regions)))
    for region_map in of_regions:
        image_maps = split_images(F.pad(region_map, (num_words, 0, num_words, 0)))
        merged.append(torch.stack(image_maps).sum(dim=0))
    for to_regions, to_words, among_words, among_regions in across:
        cross_attention = join_blocks(
            torch.zeros_like(among_words), to_regions, to_words, torch.zeros_like(among_regions)
        )
        self_attention = join_blocks(
            among_words, torch.zeros_like(to_regions), torch.zeros_like(to_words), among_regions
        )
        for steps in zip(split_images(cross_attention), split_images(self_attention), strict=True):
            merged += steps
    return tuple(merged)


def join_blocks(among_words: Map, to_regions: Map, to_words: Map, among_regions: Map) -> Map:
    """Join the blocks of a map to the map over [words | regions]."""
    of_words = torch.cat([among_words, to_regions], dim=3)
    of_regions = torch.cat([to_words, among_regions], dim=3)
    return torch.cat([of_words, of_regions], dim=2)


class PretrainedLxmertConfig(PretrainedEncoderConfig, settings=LxmertEncoderConfig):
    """The config of LXMERT."""

    model_type = "lxmert_encoder"


class LxmertEncoder(Encoder):
    """Separate layers for words and for regions, then layers with cross attention.

    Each image of a text is encoded in a separate pass, as in the official code for NLVR2. The state of a wordpiece is
    its mean over the passes with an image, and the summary is [first image's summary; second image's summary] with X =
    I x E and I = `max_images`. In a pass without an image, the cross attention of words is zero.

    The attention maps are over the L + R slots [words | regions], in this order: one per layer over words; one per
    layer over regions; two per layer with cross attention and image, the cross attention (words to regions and regions
    to words) and the self-attention (among words and among regions).
    """

    config_class = PretrainedLxmertConfig
    base_model_prefix = "lxmert"
    supports_gradient_checkpointing = True
    has_optional_outputs = True
    region_modules = ("encoder.visn_fc",)
    _supports_sdpa = True
    _no_split_modules = ("SelfAttentionLayer", "CrossModalityLayer")
    abilities = frozenset(
        {
            Ability.SUMMARY_OF_SINGLE,
            Ability.SUMMARY_OF_QUESTION,
            Ability.SUMMARY_OF_PAIR,
            Ability.WORD_EMBEDDINGS,
            Ability.INTERMEDIATE_STATES,
        }
    )

    def __init__(self, config: PretrainedLxmertConfig):
        super().__init__(config)
        self.embeddings = TextEmbeddings(config)
        self.encoder = nn.Module()  # for the parameter names of transformers
        self.encoder.visn_fc = RegionEmbeddings(config)
        self.encoder.layer = nn.ModuleList(SelfAttentionLayer(config) for _ in range(config.l_layers))
        self.encoder.x_layers = nn.ModuleList(CrossModalityLayer(config) for _ in range(config.x_layers))
        self.encoder.r_layers = nn.ModuleList(SelfAttentionLayer(config) for _ in range(config.r_layers))
        self.lstm = None
        if config.with_lstm:
            self.lstm = SentenceLSTM(config.hidden_size, config.hidden_size, batch_first=True)
        self.pooler = BertPooler(config) if config.pooling == "tanh" else None
        self.top_down = TopDownAttention(config) if config.pooling == "butd" else None
        self.relative_geometry = None
        if config.relative_geometry:
            self.relative_geometry = RelativeGeometryBias(config, config.r_layers + config.x_layers)
        self.post_init()

    @property
    @override
    def summary_size(self) -> int:
        return self.config.hidden_size * self.config.max_images

    @property
    @override
    def max_text_length(self) -> int:
        return self.config.max_position_embeddings

    @property
    @override
    def num_joint_layers(self) -> int:
        return self.config.x_layers

    @property
    @override
    def attention_graphs(self) -> dict[str, AttentionGraph]:
        config = self.config
        first = config.l_layers + config.r_layers  # map of the first layer with cross attention
        cross_maps = tuple(first + 2 * config.max_images * layer for layer in range(config.x_layers))
        self_maps = tuple(number + 1 for number in cross_maps)
        word_maps = (*range(config.l_layers), *self_maps)
        region_maps = (*range(config.l_layers, first), *self_maps)
        across = frozenset({AttentionBlock.WORDS_TO_REGIONS, AttentionBlock.REGIONS_TO_WORDS})
        return {
            "language": AttentionGraph(word_maps, frozenset({AttentionBlock.WORDS_TO_WORDS})),
            "vision": AttentionGraph(region_maps, frozenset({AttentionBlock.REGIONS_TO_REGIONS})),
            "cross": AttentionGraph(cross_maps, across),
        }

    @property
    @override
    def abilities_by_config(self) -> dict[Ability, tuple[bool, str]]:
        config = self.config
        return {
            Ability.MASKED_REGIONS: (config.masked_region_feature, "masked_region_feature to true"),
            Ability.MASKED_FEATURES: (config.masked_region_feature, "masked_region_feature to true"),
            Ability.NAMED_REGIONS: (config.named_regions, "named_regions to true"),
            Ability.IMAGE_PAIRS: (config.max_images > 1, "max_images to 2"),
        }

    def forward(
        self,
        texts: TextBatch,
        regions: TextRegions,
        output_attentions: bool = False,
        intermediate_layers: Collection[int] = (),
    ) -> EncoderOutput:
        regions = self.with_proposals(regions)
        passes = ImagePasses.from_regions(regions, self.config.max_images)
        region_mask = passes.attention_mask.flatten(0, 1)
        word_maps = []
        region_maps = []
        cross_maps = []
        # one per layer over regions, then one per layer with cross attention
        biases = [None] * (self.config.r_layers + self.config.x_layers)
        if self.relative_geometry is not None:
            is_pair = region_mask[:, :, None] & region_mask[:, None]
            biases = self.relative_geometry(passes.split(regions.boxes), passes.split(regions.image_sizes), is_pair)

        words = self.embeddings(texts)  # the layers over words do not depend on images
        if self.lstm is not None:
            words = self.lstm(words, texts.attention_mask)
        for layer in self.encoder.layer:
            words, attention_map = layer(words, texts.attention_mask, output_attentions)
            word_maps.append(attention_map)
        objects = self.embed_regions(texts, regions, passes)
        for layer, bias in zip(self.encoder.r_layers, biases[: self.config.r_layers], strict=True):
            objects, attention_map = layer(objects, region_mask, output_attentions, bias)
            region_maps.append(attention_map)
        # from here on, words are separate for each image of a text
        words = passes.repeat(words)
        word_mask = passes.repeat(texts.attention_mask)
        inner_passes = {}
        for number, (layer, bias) in enumerate(zip(self.encoder.x_layers, biases[self.config.r_layers :], strict=True)):
            if number in intermediate_layers:
                inner_passes[number] = words, objects
            words, objects, four_maps = layer(words, objects, word_mask, region_mask, output_attentions, bias)
            cross_maps.append(four_maps)

        pooled = words[:, 0] if self.pooler is None else self.pooler(words)
        if self.top_down is not None:
            pooled = self.top_down(words, passes.split(regions.features), region_mask)
        states = self.combine_passes(words, objects, texts, passes)
        intermediate = {number: self.combine_passes(*inner, texts, passes) for number, inner in inner_passes.items()}
        if self.num_joint_layers in intermediate_layers:
            intermediate[self.num_joint_layers] = states
        attentions = None
        if output_attentions:
            attentions = merge_maps(texts, passes, word_maps, region_maps, cross_maps)
        return EncoderOutput(
            text=states.text,
            regions=states.regions,
            summary=pooled.unflatten(0, (len(texts), -1)).flatten(1),
            attentions=attentions,
            word_embeddings=self.get_input_embeddings().weight,
            intermediate=intermediate,
        )

    def embed_regions(
        self, texts: TextBatch, regions: TextRegions, passes: ImagePasses
    ) -> Float[Tensor, "passes per_image E"]:
        features = regions.features
        if self.config.masked_region_feature:
            features = features.masked_fill(regions.is_masked[..., None], 0.0)
        relative_boxes = regions.boxes / regions.image_sizes.flip(-1).repeat(1, 1, 2)  # x by the width, y by the height
        objects = self.encoder.visn_fc(passes.split(features), passes.split(relative_boxes))
        if not self.config.named_regions:
            return objects
        positions = self.embeddings.position_embeddings.weight[: texts.input_ids.shape[1]]
        alignment = region_word_alignment(texts, regions, positions.dtype)
        if alignment is None:
            return objects
        alignment = alignment / alignment.sum(dim=2, keepdim=True).clamp(min=1)
        return objects + passes.split(alignment @ positions)

    def combine_passes(
        self,
        words: Float[Tensor, "passes L E"],
        objects: Float[Tensor, "passes per_image E"],
        texts: TextBatch,
        passes: ImagePasses,
    ) -> IntermediateStates:
        """Turn states of passes into states of texts, zero at padding.

        The states of words are averaged over the passes with an image, or over all passes if a text has no image.
        """
        words = words.unflatten(0, (-1, passes.row.shape[1]))
        has_image = passes.attention_mask.any(dim=2)
        weights = (has_image | ~has_image.any(dim=1, keepdim=True)).to(words.dtype)
        weights = weights / weights.sum(dim=1, keepdim=True)
        mean = (words * weights[..., None, None]).sum(dim=1)
        return IntermediateStates(mean * texts.attention_mask[..., None], passes.join(objects))

    @torch.no_grad()
    @override
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as in `Encoder`, but padding rows of tables like the other rows (official code)."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        else:
            super()._init_weights(module)
