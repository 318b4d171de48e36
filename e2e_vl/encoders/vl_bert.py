"""VL-BERT (Su et al., ICLR 2020): one BERT over words and regions.

Shape legend
    M  texts in the batch
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    Z  positions of the longest packed sequence
    E  hidden size of the encoder
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertPooler

from detector.errors import UserError
from e2e_vl.encoders.base import Encoder, read_summary
from e2e_vl.encoders.bert_layer import BertLayerWithMaps, LayersRun, attention_probabilities, run_layers
from e2e_vl.encoders.geometry import GEOMETRY_LAYERS, RelativeGeometryBias, packed_biases
from e2e_vl.encoders.sequence import SequenceLayout
from e2e_vl.encoders.size_limits import check_sizes
from e2e_vl.encoders.vl_bert_embeddings import (
    HiddenRegionFeature,
    ImageSlotEmbedding,
    RegionProjection,
    ScalarFactor,
    ScaledLayerNorm,
    VLBertEmbeddings,
)
from e2e_vl.layout import CLS, MASK, SEP, Template, TextLayout
from e2e_vl.structures import Ability, AttentionGraph, EncoderOutput, InnerStates, TextBatch, TextRegions

CHOICES = {
    "geometry": ("centre_size", "corners"),
    "region_word": ("learned", "img"),
    "new_layers": ("official", "normal"),
}
ANSWER_SLOT = Template((CLS, 0, SEP, MASK, SEP), (0, 0, 0, 1, 1), summary=3)
# not initialised as in BERT
OWN_START = (
    HiddenRegionFeature,
    ImageSlotEmbedding,
    RegionProjection,
    ScaledLayerNorm,
    ScalarFactor,
    *GEOMETRY_LAYERS,
)


class VLBertConfig(BertConfig):
    """BERT's fields (`vocab_size`, `hidden_size`, `num_hidden_layers`, ... `initializer_range`) and those below.

    The defaults are VL-BERT base as in the official code. The fields marked "scratch" depart from it: they let a small
    model learn without a pre-trained BERT.
    """

    model_type = "vl_bert"

    type_vocab_size: int = 3  # segments: two of the text, one of the regions
    feature_dim: int = 2048  # width of the detector's region features
    visual_size: int | None = None  # width of a region vector; None = `hidden_size`
    geometry: str = "centre_size"  # "centre_size" (official code) or "corners" (paper), see `geometry_embedding`
    geometry_dim: int = 2048  # width of the geometry embedding, a multiple of 8
    region_dropout_prob: float = 0.1  # dropout before the Linear that joins geometry and feature
    visual_layer_norm: bool = True  # LayerNorm on the visual part; False = a scalar factor
    visual_scale_text_init: float = 0.0  # start of that LayerNorm's weight (or of the factor) for words
    visual_scale_object_init: float = 0.0  # the same for regions
    uses_whole_image: bool = True  # region 0 is the whole image
    # the whole image is also a region of the sequence (official code). False: it is only the visual part of words
    # (paper, section 3.2); its row of the output is zero and tasks do not see it.
    whole_image_in_sequence: bool = True
    image_feature_on_words: bool = True  # words carry the vector of region 0 (scratch: False)
    # [END] carries the vector of region 0 as words do (paper); False: no visual part (official)
    visual_part_on_end: bool = False
    text_only_embedding: bool = False  # a learned vector that words of texts without a region carry (pre-training)
    # what stands in a region's place of a word. "learned": a learned vector, and another one for hidden regions with
    # `hidden_region_embedding` (official code). "img": the one vector of the token [IMG], hidden or not (paper, section
    # 3.2). It lies beside the word table, so that the vocabulary stays BERT's.
    region_word: str = "learned"
    # another learned vector stands in a hidden region's place of a word (pre-training)
    hidden_region_embedding: bool = False
    # a learned vector replaces the feature of a hidden region (pre-training on precomputed features, or without hiding
    # pixels)
    hidden_region_feature: bool = False
    # start of the Linear that makes region vectors. "official": PyTorch's default. "normal": N(0, `initializer_range`)
    # and zero biases, as all other new layers (paper, section 4.1). The weight of the visual LayerNorms is
    # `visual_scale_*_init` in both.
    new_layers: str = "official"
    with_pooler: bool = False  # tanh pooler on the first position
    # most images that one text looks at. Above 1, regions of each image carry a learned vector of their slot, which
    # starts at zero and which official checkpoints do not have.
    image_slots: int = 1
    # standard deviation of the embedding tables at the start (scratch); None = `initializer_range`
    embedding_init_std: float | None = None
    norm_first: bool = False  # LayerNorm before attention and feed-forward instead of after ("pre-LN", scratch)
    # a learned bias between regions from where they lie relative to each other, see `RelativeGeometryBias`; official
    # checkpoints do not have it
    relative_geometry: bool = False
    relative_geometry_size: int = 64  # width of the hidden layer of that bias

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.visual_size is None:
            self.visual_size = self.hidden_size
        check_sizes(self)
        for name, (one, other) in CHOICES.items():
            if getattr(self, name) not in (one, other):
                raise UserError(f'{name} is "{getattr(self, name)}"; it must be "{one}" or "{other}".')
        if self.geometry_dim % 8:
            raise UserError(f"geometry_dim is {self.geometry_dim}; it must be a positive multiple of 8.")
        if self.image_slots < 1:
            raise UserError(f"image_slots is {self.image_slots}; every text needs room for one image.")
        if self.type_vocab_size < 3:
            raise UserError(f"type_vocab_size is {self.type_vocab_size}; VL-BERT needs 3: two of text, regions.")
        if self.image_feature_on_words and not self.uses_whole_image:
            raise UserError(
                "image_feature_on_words needs the whole image as region 0; set uses_whole_image to true, or both to "
                "false."
            )
        if self.visual_part_on_end and not self.image_feature_on_words:
            raise UserError("visual_part_on_end needs image_feature_on_words; set it to true, or both to false.")
        if self.region_word == "img" and self.hidden_region_embedding:
            raise UserError(
                "region_word: img leaves hidden regions no vector of their own; set hidden_region_embedding to false."
            )


class VLBertLayer(BertLayerWithMaps):
    """A BERT layer, post-LN as in BERT or pre-LN."""

    def __init__(self, config: VLBertConfig, index: int):
        super().__init__(config, index)
        self.norm_first = config.norm_first

    def forward(
        self, hidden: Float[Tensor, "M Z E"], mask: Float[Tensor, "M _ _ Z"], output_attentions: bool = False
    ) -> tuple[Float[Tensor, "M Z E"], Float[Tensor, "M heads Z Z"] | None]:
        """See `BertLayerWithMaps.forward`."""
        if not self.norm_first:
            return super().forward(hidden, mask, output_attentions)
        attention, output = self.attention.output, self.output
        attended_to = attention.LayerNorm(hidden)
        probabilities = attention_probabilities(self.attention.self, attended_to, mask) if output_attentions else None
        context, _ = self.attention.self(attended_to, mask)
        hidden = hidden + attention.dropout(attention.dense(context))
        expanded = self.intermediate(output.LayerNorm(hidden))
        return hidden + output.dropout(output.dense(expanded)), probabilities


class VLBertModel(Encoder):
    """Words and regions in one sequence through BERT layers.

    The sequence of a text is `words, regions, [END]`; see `VLBertEmbeddings` for what each position is made of.
    Attention maps come back over the L + R + 1 slots [words | regions | END] of the padded batch.
    """

    config_class = VLBertConfig
    base_model_prefix = "vl_bert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ("VLBertLayer",)
    layout = TextLayout(question=ANSWER_SLOT)
    abilities = frozenset({Ability.SUMMARY_OF_QUESTION, Ability.WORD_TABLE, Ability.INNER_STATES})

    def __init__(self, config: VLBertConfig):
        super().__init__(config)
        self.embeddings = VLBertEmbeddings(config)
        self.layers = nn.ModuleList(VLBertLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else None
        self.pooler = BertPooler(config) if config.with_pooler else None
        self.relative_geometry = None
        if config.relative_geometry:
            self.relative_geometry = RelativeGeometryBias(
                config.num_hidden_layers, config.num_attention_heads, config.relative_geometry_size
            )
        self.post_init()

    @property
    def whole_image_is_region(self) -> bool:
        """See `Encoder`; `config.whole_image_in_sequence`."""
        return self.uses_whole_image and self.config.whole_image_in_sequence

    @property
    def max_images(self) -> int:
        """See `Encoder`; `config.image_slots`."""
        return self.config.image_slots

    @property
    def attention_graphs(self) -> dict[str, AttentionGraph]:
        """See `Encoder`; one graph of words and regions."""
        return {"joint": AttentionGraph(tuple(range(self.config.num_hidden_layers)))}

    def lacks(self, ability: Ability) -> str | None:
        """See `Encoder.lacks`."""
        config = self.config
        wanted = {
            Ability.SUMMARY_OF_SINGLE: (config.with_pooler, "with_pooler to true"),
            Ability.SUMMARY_OF_PAIR: (config.with_pooler, "with_pooler to true"),
            Ability.HIDDEN_REGIONS: (
                config.hidden_region_embedding or config.region_word == "img",
                "hidden_region_embedding to true, or region_word to img",
            ),
            Ability.HIDDEN_FEATURES: (config.hidden_region_feature, "hidden_region_feature to true"),
            Ability.NAMED_REGIONS: (config.image_feature_on_words, "image_feature_on_words to true"),
            Ability.IMAGE_PAIRS: (config.image_slots > 1, "image_slots to 2"),
        }
        if ability not in wanted:
            return super().lacks(ability)
        is_able, setting = wanted[ability]
        return None if is_able else f"set encoder.config.{setting}"

    def get_input_embeddings(self) -> nn.Embedding:
        """The word table [vocabulary, E]; a masked-language-modelling head shares it."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        texts: TextBatch,
        regions: TextRegions,
        output_attentions: bool = False,
        inner_layer: int | None = None,
    ) -> EncoderOutput:
        """See `Encoder.forward`; with `config.uses_whole_image`, row 0 of the regions is the whole image.

        Returns:
            Vectors that are zero at padding; a summary where an answer has its place or with `config.with_pooler`; maps
            (query, key).

        Raises:
            ValueError: see `VLBertEmbeddings.forward`.
        """
        hidden, layout = self.embeddings(texts, regions)
        run = self.encode(hidden, layout, regions, output_attentions, inner_layer)
        sizes = [texts.attend.shape[1], regions.attend.shape[1], 1]
        words, objects, _ = layout.unpack(run.output).split(sizes, dim=1)
        pooled = None if self.pooler is None else self.pooler(run.output)
        inner = None
        if inner_layer is not None:
            inner = InnerStates(*layout.unpack(run.inner).split(sizes, dim=1)[:2])
        return EncoderOutput(
            text=words,
            regions=objects,
            summary=read_summary(words, pooled, texts.summary),
            attentions=tuple(layout.unpack_pairs(maps) for maps in run.attentions) if output_attentions else None,
            word_table=self.get_input_embeddings().weight,
            inner=inner,
        )

    def encode(
        self,
        hidden: Float[Tensor, "M Z E"],
        layout: SequenceLayout,
        regions: TextRegions | None,
        output_attentions: bool = False,
        inner_layer: int | None = None,
    ) -> LayersRun:
        """Run the layers over the packed sequence; `regions` are for the relative geometry, and not used without it."""
        biases = [] if self.relative_geometry is None else packed_biases(self.relative_geometry, regions, layout)
        run = run_layers(self.layers, hidden, layout.attend, output_attentions, biases, inner_layer)
        if self.final_norm is None:
            return run
        return run._replace(output=self.final_norm(run.output), inner=self.final_norm(run.inner))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start values of a module's own parameters; those that a checkpoint has loaded stay as they are."""
        if isinstance(module, RegionProjection) and self.config.new_layers == "normal":
            super()._init_weights(module)
        elif isinstance(module, OWN_START):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            std = self.config.embedding_init_std
            init.normal_(module.weight, std=self.config.initializer_range if std is None else std)
        else:
            super()._init_weights(module)
