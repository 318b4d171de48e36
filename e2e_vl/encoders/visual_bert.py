"""VisualBERT (Li et al., arXiv 1908.03557, ACL 2020): one BERT over words and regions, with BERT's own parameters.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertPooler
from typing_extensions import override

from e2e_vl.encoders.base import Encoder, PretrainedEncoderConfig, read_summary
from e2e_vl.encoders.config import VisualBertEncoderConfig
from e2e_vl.encoders.layers import (
    BertLayerWithAttentions,
    RelativeGeometryBias,
    SequenceLayout,
    check_length,
    pack_biases,
    region_word_alignment,
    run_layers,
)
from e2e_vl.structures import Ability, AttentionBlock, AttentionGraph, EncoderOutput, TextBatch, TextRegions
from e2e_vl.text import CLS, MASK, SEP, Template, TextLayout

# Input embeddings of VisualBERT

BOX_COORDINATES = 6  # width of `relative_box_coordinates`


def relative_box_coordinates(
    boxes: Float[Tensor, "*shape 4"], image_sizes: Num[Tensor, "*shape 2"]
) -> Float[Tensor, "*shape 6"]:
    """Return x1, y1, x2, y2, width and height of a box, divided by its image's width and height.

    The official code appends them to BAN's features of Flickr30K Entities.
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    corners = boxes / torch.stack([width, height, width, height], dim=-1)
    return torch.cat([corners, corners[..., 2:] - corners[..., :2]], dim=-1)


class VisualBertEmbeddings(nn.Module):
    """Texts and their regions -> the packed input sequence `words, regions`.

    Details of the official code that are not in the paper: no [SEP] follows the regions, words and regions share one
    LayerNorm, and all regions use row 0 of the visual position table; its other rows are unused.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        positions = config.max_position_embeddings
        types = config.type_vocab_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden)  # no padding row, as in the official code
        self.position_embeddings = nn.Embedding(positions, hidden)
        self.token_type_embeddings = nn.Embedding(types, hidden)
        self.visual_token_type_embeddings = nn.Embedding(types, hidden)
        self.visual_position_embeddings = nn.Embedding(positions, hidden)
        width = config.visual_embedding_dim
        is_projected = config.project_equal_sizes or width != hidden
        self.visual_projection = nn.Linear(width, hidden) if is_projected else nn.Identity()
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, texts: TextBatch, regions: TextRegions) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Return the input of the layers, and the layout of the packed sequence."""
        alignment = region_word_alignment(texts, regions, self.position_embeddings.weight.dtype)
        return self.join(texts, regions, alignment)

    def join(
        self, texts: TextBatch, regions: TextRegions, alignment: Float[Tensor, "M R L"] | None
    ) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Add up the embeddings and pack them.

        Args:
            alignment: how often each word refers to each region (`image_text_alignment` of the official code); None:
                no word refers to a region.

        Returns:
            The input after LayerNorm and dropout; the layout.
        """
        length = check_length(texts, self.config.max_position_embeddings)
        words = self.word_embeddings(texts.input_ids) + self.token_type_embeddings(texts.token_type_ids)
        words = words + self.position_embeddings.weight[:length]
        features = regions.features
        if self.config.with_box_coordinates:
            numbers = relative_box_coordinates(regions.boxes, regions.image_sizes)
            features = torch.cat([features, numbers.to(features.dtype)], dim=-1)
        # the segment embedding distinguishes the images of a text
        types = torch.stack([self.visual_token_type_embeddings.weight[row] for row in self.config.region_types])
        objects = self.visual_projection(features) + F.embedding(regions.image_slot, types)
        objects = objects + self.region_positions(alignment)
        lengths = [length + count for length, count in zip(texts.lengths.tolist(), regions.lengths, strict=True)]
        longest = max(lengths, default=0) or 1
        layout = SequenceLayout.from_masks(texts.attention_mask, regions.attention_mask, longest, has_end=False)
        slots = torch.cat([words, objects.to(words.dtype)], dim=1)
        return self.dropout(self.LayerNorm(layout.pack(slots))), layout

    def region_positions(self, alignment: Float[Tensor, "M R L"] | None) -> Float[Tensor, "*shape E"]:
        """Return the position vector of each region, see `region_position` of the config; or one vector for all."""
        is_official = self.config.region_position == "official"
        shared = self.visual_position_embeddings.weight[0]
        if not is_official:
            shared = torch.zeros_like(shared)
        if alignment is None:
            return shared
        if is_official:
            alignment = alignment / alignment.sum(dim=2, keepdim=True).clamp(min=1)
        return shared + alignment @ self.position_embeddings.weight[: alignment.shape[2]]


ANSWER_BEFORE_END = Template((CLS, 0, MASK, SEP), (0, 0, 0, 0), summary=2)


class PretrainedVisualBertConfig(PretrainedEncoderConfig, BertConfig, settings=VisualBertEncoderConfig):
    """The config of VisualBERT."""

    model_type = "visual_bert_encoder"  # transformers has a `visual_bert`

    @property
    def visual_embedding_dim(self) -> int:
        """Width of the projection's input: the feature, and the box coordinates if they are appended."""
        return self.feature_dim + BOX_COORDINATES * self.with_box_coordinates


class VisualBertEncoder(Encoder):
    """BERT layers over one sequence of words and regions; parameters have the names of transformers' VisualBERT.

    The sequence of a text is `words, regions`; see `VisualBertEmbeddings` for the input embeddings. Attention maps are
    over the L + R slots [words | regions] of the padded batch.
    """

    config_class = PretrainedVisualBertConfig
    base_model_prefix = "visual_bert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ("BertLayerWithAttentions",)
    layout = TextLayout(question=ANSWER_BEFORE_END)
    region_modules = ("embeddings.visual_projection",)
    abilities = frozenset(
        {
            Ability.SUMMARY_OF_SINGLE,
            Ability.SUMMARY_OF_QUESTION,
            Ability.SUMMARY_OF_PAIR,
            Ability.WORD_EMBEDDINGS,
            Ability.NAMED_REGIONS,
            Ability.INTERMEDIATE_STATES,
        }
    )

    def __init__(self, config: PretrainedVisualBertConfig):
        super().__init__(config)
        count = config.num_hidden_layers
        self.embeddings = VisualBertEmbeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BertLayerWithAttentions(config, i) for i in range(count))})
        self.additional_layer = BertLayerWithAttentions(config, count) if config.bypass_transformer else None
        self.pooler = BertPooler(config)
        self.relative_geometry = None
        if config.relative_geometry:
            self.relative_geometry = RelativeGeometryBias(config, self.num_joint_layers)
        self.post_init()
        if config.special_visual_initialize:  # copies that are trained separately
            with torch.no_grad():
                tables = self.embeddings
                tables.visual_token_type_embeddings.weight.copy_(tables.token_type_embeddings.weight)
                tables.visual_position_embeddings.weight.copy_(tables.position_embeddings.weight)
        self._freeze()

    def train(self, mode: bool = True) -> VisualBertEncoder:
        """Set the mode as `nn.Module` does, and freeze again, because `from_pretrained` creates new parameters."""
        super().train(mode)
        self._freeze()
        return self

    def _freeze(self) -> None:
        if not self.config.train_pooler:
            self.pooler.requires_grad_(False)
        if self.config.region_position == "paper":  # reads no table of its own; DDP waits for every gradient
            self.embeddings.visual_position_embeddings.requires_grad_(False)

    @property
    @override
    def abilities_by_config(self) -> dict[Ability, tuple[bool, str]]:
        return {Ability.IMAGE_PAIRS: (len(set(self.config.region_types[:2])) == 2, "region_types to [0, 1]")}

    @property
    @override
    def max_text_length(self) -> int:
        return self.config.max_position_embeddings

    @property
    @override
    def num_joint_layers(self) -> int:
        """With late fusion, only the additional layer counts."""
        return 1 if self.config.bypass_transformer else self.config.num_hidden_layers

    @property
    @override
    def attention_graphs(self) -> dict[str, AttentionGraph]:
        """One graph of words and regions; with late fusion also one of words alone."""
        count = self.config.num_hidden_layers
        if not self.config.bypass_transformer:
            return {"joint": AttentionGraph(tuple(range(count)))}
        words = AttentionGraph(tuple(range(count)), frozenset({AttentionBlock.WORDS_TO_WORDS}))
        return {"language": words, "joint": AttentionGraph((count,))}

    def forward(
        self,
        texts: TextBatch,
        regions: TextRegions,
        output_attentions: bool = False,
        intermediate_layers: Collection[int] = (),
    ) -> EncoderOutput:
        """Encode texts with their regions, see `Encoder.forward`.

        The summary is the state at `texts.summary`, or else the pooled state of [CLS].
        """
        regions = self.with_proposals(regions)
        hidden, layout = self.embeddings(texts, regions)
        biases = [] if self.relative_geometry is None else pack_biases(self.relative_geometry, regions, layout)
        return self.encode(texts, hidden, layout, output_attentions, biases, intermediate_layers)

    def encode(
        self,
        texts: TextBatch,
        hidden: Float[Tensor, "M Z E"],
        layout: SequenceLayout,
        output_attentions: bool = False,
        biases: Sequence[Float[Tensor, "M heads Z Z"]] = (),
        intermediate_layers: Collection[int] = (),
    ) -> EncoderOutput:
        """Compute the output of `forward` from the packed input of the layers and the biases of their attention."""
        length = texts.attention_mask.shape[1]
        layers = self.encoder["layer"]
        options = (layout.attention_mask, output_attentions, biases, intermediate_layers)
        if self.additional_layer is None:
            run = run_layers(layers, hidden, *options)
            output = run.output
            intermediate = run.intermediate
            maps = [layout.unpack_pairs(packed_map) for packed_map in run.attentions]
        else:  # late fusion: all layers over words, then one over words and embedded regions
            slots = layout.unpack(hidden)
            is_word = layout.is_real[:, :length]
            is_region = layout.is_real[:, length:]
            words, word_maps, _ = run_layers(layers, slots[:, :length], is_word, output_attentions)
            is_word_pair = is_word[:, None, :, None] & is_word[:, None, None, :]
            count = is_region.shape[1]
            maps = [F.pad(word_map * is_word_pair, (0, count, 0, count)) for word_map in word_maps]
            joint = layout.pack(torch.cat([words, slots[:, length:]], dim=1))
            run = run_layers([self.additional_layer], joint, *options)
            has_regions = is_region.any(dim=1)[:, None, None]  # other texts skip the layer
            output = torch.where(has_regions, run.output, joint)
            intermediate = {}
            for number, inner in run.intermediate.items():
                intermediate[number] = torch.where(has_regions, inner, joint)
            maps += [layout.unpack_pairs(packed_map) * has_regions[..., None] for packed_map in run.attentions]
        states = layout.split(output, length)
        pooled = self.pooler(output) if texts.summary is None else None
        summary = read_summary(states.text, pooled, texts.summary)
        return EncoderOutput(
            text=states.text,
            regions=states.regions,
            summary=summary,
            attentions=tuple(maps) if output_attentions else None,
            word_embeddings=self.get_input_embeddings().weight,
            intermediate={number: layout.split(inner, length) for number, inner in intermediate.items()},
        )
