"""VL-BERT (Su et al., ICLR 2020): one BERT over words and regions. Shape legend: see `e2e_vl/structures.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertPooler
from typing_extensions import override

from e2e_vl.encoders.base import Encoder, PretrainedEncoderConfig, read_summary
from e2e_vl.encoders.config import VLBertEncoderConfig
from e2e_vl.encoders.layers import (
    BertLayerWithAttentions,
    LayerOutputs,
    RelativeGeometryBias,
    SequenceLayout,
    attention_probabilities,
    check_length,
    geometry_embedding,
    pack_biases,
    run_layers,
)
from e2e_vl.structures import Ability, AttentionGraph, EncoderOutput, TextBatch, TextRegions, take_along_dim
from e2e_vl.text import CLS, MASK, SEP, Template, TextLayout

# Input embeddings: word + visual + position + segment embeddings (paper, section 3.2)

REGION_SEGMENT = 2  # segment of regions and [END]; words have 0 or 1


class RegionProjection(nn.Linear):
    """ReLU(Linear(Dropout([geometry, feature]))), the vector of a region; initialised as in PyTorch."""

    def __init__(self, geometry_dim: int, feature_dim: int, visual_size: int, dropout: float):
        super().__init__(geometry_dim + feature_dim, visual_size)
        self.dropout = dropout

    def forward(
        self, geometry: Float[Tensor, "*shape _"], features: Float[Tensor, "*shape D"]
    ) -> Float[Tensor, "*shape F"]:
        joined = torch.cat([geometry.to(features.dtype), features], dim=-1)
        return super().forward(F.dropout(joined, self.dropout, self.training)).relu()


class ScaledLayerNorm(nn.LayerNorm):
    """A LayerNorm whose weight is initially `scale` instead of 1."""

    def __init__(self, hidden_size: int, scale: float, eps: float):
        self.scale = scale  # before the parent's constructor, which calls reset_parameters
        super().__init__(hidden_size, eps=eps)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scale)
        nn.init.zeros_(self.bias)


class ScalarFactor(nn.Module):
    """One learned factor, initially `scale`."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scale)

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors * self.weight


class VisualPart(nn.Module):
    """The visual part of the embedding of a word or a region.

    A Linear if F differs from E, then LayerNorm (or a scalar factor without `layer_norm`) with the initial weight
    `scale`. At the official 0.0 the visual part is zero at first, and features get no gradient through it.
    """

    def __init__(self, visual_size: int, hidden_size: int, scale: float, layer_norm: bool, eps: float):
        super().__init__()
        self.projection = nn.Linear(visual_size, hidden_size) if visual_size != hidden_size else nn.Identity()
        self.norm = ScaledLayerNorm(hidden_size, scale, eps) if layer_norm else ScalarFactor(scale)

    def forward(self, vectors: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape E"]:
        return self.norm(self.projection(vectors))


class MaskedRegionFeature(nn.Module):
    """A learned vector, initially zero, that replaces the features of masked regions."""

    def __init__(self, feature_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, feature_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, features: Float[Tensor, "M R D"], is_masked: Bool[Tensor, "M R"]) -> Float[Tensor, "M R D"]:
        return torch.where(is_masked[..., None], self.weight.to(features.dtype), features)


class ImageSlotEmbedding(nn.Embedding):
    """A learned vector for each image of a text, initially zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class VLBertEmbeddings(nn.Module):
    """Texts and their regions -> the packed input sequence `words, regions, [END]`.

    Details of the official code that are not in the paper: the word embedding of regions is one learned vector; all
    regions have the position after the last word, and [END] the next one; [END] is a learned vector without a visual
    part (except with `visual_part_on_end`); the whole image is also a region (except without
    `whole_image_in_sequence`); regions and [END] have segment 2.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        visual = config.visual_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.segment_embeddings = nn.Embedding(config.type_vocab_size, hidden)
        self.region_word_embedding = nn.Embedding(1, hidden)
        self.masked_region_word_embedding = nn.Embedding(1, hidden) if config.masked_region_embedding else None
        self.masked_region_feature = MaskedRegionFeature(config.feature_dim) if config.masked_region_feature else None
        slots = config.max_images
        self.image_slot_embeddings = ImageSlotEmbedding(slots, hidden) if slots > 1 else None
        self.end_embedding = nn.Embedding(1, hidden)
        self.text_only_embedding = nn.Embedding(1, visual) if config.text_only_embedding else None
        self.region_projection = RegionProjection(
            config.geometry_dim, config.feature_dim, visual, config.region_dropout_prob
        )
        scales = {"layer_norm": config.visual_layer_norm, "eps": config.layer_norm_eps}
        self.text_visual = None
        if config.image_feature_on_words:
            self.text_visual = VisualPart(visual, hidden, config.visual_scale_text_init, **scales)
        self.region_visual = VisualPart(visual, hidden, config.visual_scale_object_init, **scales)
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, texts: TextBatch, regions: TextRegions) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Return the input of the layers, and the layout of the packed sequence."""
        vectors = self.region_vectors(regions)
        word_vectors = self.word_vectors(texts, vectors, regions)
        region_words = self.region_word_embedding.weight.expand(*regions.attention_mask.shape, -1)
        if self.masked_region_word_embedding is not None:
            hidden = self.masked_region_word_embedding.weight
            region_words = torch.where(regions.is_masked[..., None], hidden, region_words)
        if self.image_slot_embeddings is not None:
            region_words = region_words + self.image_slot_embeddings(regions.image_slot)
        in_sequence = regions if self.config.whole_image_in_sequence else regions.without_whole_image()
        lengths = [length + count for length, count in zip(texts.lengths.tolist(), in_sequence.lengths, strict=True)]
        longest = max(lengths, default=0) + 1  # [END]
        mask = in_sequence.attention_mask
        return self.join(texts, word_vectors, region_words, vectors, mask, regions.image_slot, longest)

    def region_vectors(self, regions: TextRegions) -> Float[Tensor, "M R F"]:
        """Project geometry and feature of each region to one vector; meaningless at padding."""
        geometry = geometry_embedding(
            regions.boxes, regions.image_sizes, self.config.geometry_dim, self.config.geometry
        )
        features = regions.features
        if self.masked_region_feature is not None:
            features = self.masked_region_feature(features, regions.is_masked)
        return self.region_projection(geometry, features)

    def word_vectors(
        self, texts: TextBatch, vectors: Float[Tensor, "M R F"], regions: TextRegions
    ) -> Float[Tensor, "M _ F"] | None:
        """Return the region vector of each word: of the first image's region that it refers to, or the whole image.

        For several images the vectors of the whole images are averaged. Row 0 of the regions is the first whole image.
        Returns one row per text if all its words have the same vector; None if words have no visual part. Texts without
        regions get the learned text-only vector, or zeros without `text_only_embedding`.
        """
        if self.text_visual is None:
            return None
        if self.image_slot_embeddings is not None:
            whole = regions.is_whole_image.to(vectors.dtype)
            weights = whole / whole.sum(dim=1, keepdim=True).clamp(min=1)
            vectors = torch.cat([(weights[:, None] @ vectors), vectors[:, 1:]], dim=1)
        if texts.region_of_token is None:
            word_vectors = vectors[:, :1]
        else:
            rows = texts.region_of_token + 1  # -1 (no region) becomes row 0, the whole image
            word_vectors = take_along_dim(vectors, rows[..., None], dim=1)
        has_region = regions.attention_mask.any(dim=1)[:, None, None]
        if self.text_only_embedding is None:
            return word_vectors * has_region
        return torch.where(has_region, word_vectors, self.text_only_embedding.weight)

    def join(
        self,
        texts: TextBatch,
        word_vectors: Float[Tensor, "M _ F"] | None,
        region_words: Float[Tensor, "M R E"],
        vectors: Float[Tensor, "M R F"],
        region_mask: Bool[Tensor, "M R"],
        image_slot: Int64[Tensor, "M R"],
        longest: int | None = None,
    ) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Add up the embeddings and pack them.

        Args:
            longest: see `SequenceLayout.from_masks`.

        Returns:
            The input after LayerNorm and dropout; the layout.
        """
        check_length(texts, self.config.max_position_embeddings, extra=self.config.max_images + 1)
        words = self.word_embeddings(texts.input_ids)
        if word_vectors is not None:
            words = words + self.text_visual(word_vectors)
        objects = region_words + self.region_visual(vectors)
        end = self.end_embedding.weight.expand(len(texts), 1, -1)
        if self.config.visual_part_on_end:
            end = end + self.text_visual(word_vectors[:, :1])  # as [CLS], which never refers to a region
        slots = torch.cat([words, objects.to(words.dtype), end], dim=1)

        positions = self.position_ids(texts.attention_mask, image_slot)
        segments = self.token_type_ids(texts.token_type_ids, region_mask)
        slots = slots + self.position_embeddings(positions) + self.segment_embeddings(segments)
        layout = SequenceLayout.from_masks(texts.attention_mask, region_mask, longest)
        return self.dropout(self.norm(layout.pack(slots))), layout

    def position_ids(
        self, text_mask: Bool[Tensor, "M L"], image_slot: Int64[Tensor, "M R"]
    ) -> Int64[Tensor, "M L+R+1"]:
        """Return 0 .. n - 1 for the words of a text of n wordpieces, n for its regions, n + 1 for [END].

        Regions of the second image have n + 1 and so on; [END] comes after the last image.
        """
        length = text_mask.sum(dim=1, keepdim=True)
        words = (text_mask.cumsum(dim=1) - 1).clamp(min=0)
        regions = length + image_slot
        return torch.cat([words, regions, regions.amax(dim=1, keepdim=True) + 1], dim=1)

    def token_type_ids(
        self, text_segments: Int64[Tensor, "M L"], region_mask: Bool[Tensor, "M R"]
    ) -> Int64[Tensor, "M L+R+1"]:
        """Return the segments of the words, then 2 for regions and [END]."""
        rest = (len(text_segments), region_mask.shape[1] + 1)
        return torch.cat([text_segments, text_segments.new_full(rest, REGION_SEGMENT)], dim=1)


ANSWER_SLOT = Template((CLS, 0, SEP, MASK, SEP), (0, 0, 0, 1, 1), summary=3)


class PretrainedVLBertConfig(PretrainedEncoderConfig, BertConfig, settings=VLBertEncoderConfig):
    """The config of VL-BERT."""

    model_type = "vl_bert"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.visual_size is None:
            self.visual_size = self.hidden_size


class VLBertLayer(BertLayerWithAttentions):
    """A BERT layer, post-LN as in BERT or pre-LN (`norm_first`)."""

    def __init__(self, config: PretrainedVLBertConfig, index: int):
        super().__init__(config, index)
        self.norm_first = config.norm_first

    def forward(
        self, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"], output_attentions: bool = False
    ) -> tuple[Float[Tensor, "M Z E"], Float[Tensor, "M heads Z Z"] | None]:
        if not self.norm_first:
            return super().forward(hidden, mask, output_attentions)
        attention = self.attention.output
        output = self.output
        normed = attention.LayerNorm(hidden)
        probabilities = attention_probabilities(self.attention.self, normed, mask) if output_attentions else None
        context, _ = self.attention.self(normed, mask)
        hidden = hidden + attention.dropout(attention.dense(context))
        expanded = self.intermediate(output.LayerNorm(hidden))
        return hidden + output.dropout(output.dense(expanded)), probabilities


class VLBertModel(Encoder):
    """BERT layers over one sequence of words and regions.

    The sequence of a text is `words, regions, [END]`; see `VLBertEmbeddings` for the input embeddings. Attention maps
    are over the L + R + 1 slots [words | regions | END] of the padded batch.
    """

    config_class = PretrainedVLBertConfig
    base_model_prefix = "vl_bert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ("VLBertLayer",)
    layout = TextLayout(question=ANSWER_SLOT)
    self_initialized = (
        MaskedRegionFeature,
        ImageSlotEmbedding,
        RegionProjection,
        ScaledLayerNorm,
        ScalarFactor,
        *Encoder.self_initialized,
    )
    region_modules = ("embeddings.region_projection", "embeddings.region_visual")
    abilities = frozenset({Ability.SUMMARY_OF_QUESTION, Ability.WORD_EMBEDDINGS, Ability.INTERMEDIATE_STATES})

    def __init__(self, config: PretrainedVLBertConfig):
        super().__init__(config)
        self.embeddings = VLBertEmbeddings(config)
        self.layers = nn.ModuleList(VLBertLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else None
        self.pooler = BertPooler(config) if config.with_pooler else None
        self.relative_geometry = None
        if config.relative_geometry:
            self.relative_geometry = RelativeGeometryBias(config, config.num_hidden_layers)
        self.post_init()

    @property
    @override
    def max_text_length(self) -> int:
        """The positions that the regions of each image and [END] leave."""
        return self.config.max_position_embeddings - self.config.max_images - 1

    @property
    @override
    def whole_image_is_region(self) -> bool:
        return self.uses_whole_image and self.config.whole_image_in_sequence

    @property
    @override
    def attention_graphs(self) -> dict[str, AttentionGraph]:
        return {"joint": AttentionGraph(tuple(range(self.config.num_hidden_layers)))}

    @property
    @override
    def abilities_by_config(self) -> dict[Ability, tuple[bool, str]]:
        config = self.config
        return {
            Ability.SUMMARY_OF_SINGLE: (config.with_pooler, "with_pooler to true"),
            Ability.SUMMARY_OF_PAIR: (config.with_pooler, "with_pooler to true"),
            Ability.MASKED_REGIONS: (
                config.masked_region_embedding or config.region_word == "img",
                "masked_region_embedding to true, or region_word to img",
            ),
            Ability.MASKED_FEATURES: (config.masked_region_feature, "masked_region_feature to true"),
            Ability.NAMED_REGIONS: (config.image_feature_on_words, "image_feature_on_words to true"),
            Ability.IMAGE_PAIRS: (config.max_images > 1, "max_images to 2"),
        }

    def forward(
        self,
        texts: TextBatch,
        regions: TextRegions,
        output_attentions: bool = False,
        intermediate_layers: Collection[int] = (),
    ) -> EncoderOutput:
        """Encode texts and regions, see `Encoder.forward`.

        With `config.uses_whole_image`, row 0 of the regions is the whole image. The summary is the state at
        `texts.summary`, or else the pooled state of [CLS] with `config.with_pooler`.
        """
        regions = self.with_proposals(regions)
        hidden, layout = self.embeddings(texts, regions)
        run = self.encode(hidden, layout, regions, output_attentions, intermediate_layers)
        length = texts.attention_mask.shape[1]
        states = layout.split(run.output, length)
        pooled = None if self.pooler is None else self.pooler(run.output)
        summary = read_summary(states.text, pooled, texts.summary)
        attentions = None
        if output_attentions:
            attentions = tuple(layout.unpack_pairs(packed_map) for packed_map in run.attentions)
        intermediate = {number: layout.split(inner, length) for number, inner in run.intermediate.items()}
        return EncoderOutput(
            text=states.text,
            regions=states.regions,
            summary=summary,
            attentions=attentions,
            word_embeddings=self.get_input_embeddings().weight,
            intermediate=intermediate,
        )

    def encode(
        self,
        hidden: Float[Tensor, "M Z E"],
        layout: SequenceLayout,
        regions: TextRegions | None,
        output_attentions: bool = False,
        intermediate_layers: Collection[int] = (),
    ) -> LayerOutputs:
        """Run the layers over the packed sequence; only the relative geometry needs `regions`."""
        biases = [] if self.relative_geometry is None else pack_biases(self.relative_geometry, regions, layout)
        run = run_layers(self.layers, hidden, layout.attention_mask, output_attentions, biases, intermediate_layers)
        if self.final_norm is None:
            return run
        output = self.final_norm(run.output)
        intermediate = {number: self.final_norm(inner) for number, inner in run.intermediate.items()}
        return run._replace(output=output, intermediate=intermediate)

    @torch.no_grad()
    @override
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as in `Encoder`, with `projection_init` and `embedding_init_std` of the config."""
        std = self.config.embedding_init_std
        if std is None:
            std = self.config.initializer_range
        if isinstance(module, RegionProjection) and self.config.projection_init == "normal":
            PreTrainedModel._init_weights(self, module)
        elif isinstance(module, nn.Embedding) and not isinstance(module, self.self_initialized):
            init.normal_(module.weight, std=std)
        else:
            super()._init_weights(module)
