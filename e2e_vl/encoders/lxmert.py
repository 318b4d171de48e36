"""LXMERT (Tan and Bansal, EMNLP 2019): a Transformer over words, one over regions, and cross attention between them.

Shape legend
    M  texts in the batch
    I  images that one text looks at, at most
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    E  hidden size of the encoder
    X  width of a summary
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.bert.modeling_bert import BertPooler

from detector.errors import UserError
from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.geometry import GEOMETRY_LAYERS, RelativeGeometryBias
from e2e_vl.encoders.image_passes import AttentionMaps, ImagePasses
from e2e_vl.encoders.lxmert_layers import LayerStacks, TextEmbeddings
from e2e_vl.encoders.sequence import naming_words
from e2e_vl.encoders.size_limits import check_sizes
from e2e_vl.structures import (
    Ability,
    AttentionBlock,
    AttentionGraph,
    EncoderOutput,
    InnerStates,
    TextBatch,
    TextRegions,
)

CHOICES = {
    "cross_attention": ("shared", "separate"),
    "pooled": ("tanh", "state"),
    "bert_layers": ("first", "last"),
}


class LxmertEncoderConfig(PreTrainedConfig):
    """The defaults are LXMERT base as in the official code."""

    model_type = "lxmert_encoder"

    vocab_size: int = 30522
    feature_dim: int = 2048  # width of the detector's region features
    hidden_size: int = 768
    l_layers: int = 9  # layers over words
    r_layers: int = 5  # layers over regions
    x_layers: int = 5  # layers with cross attention
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    uses_whole_image: bool = False  # region 0 is the whole image
    # "shared": one module attends from words to regions and from regions to words (official code). "separate": each
    # direction has its own (paper, section 2.2).
    cross_attention: str = "shared"
    # words carry the vector of their segment (official code: always the same one); False: word and position (paper,
    # section 2.1)
    with_segments: bool = True
    # the summary. "tanh": tanh(Linear([CLS])) (official code). "state": the state of [CLS] (paper, section 2.3).
    pooled: str = "tanh"
    # which layers of a BERT the layers over words start from. "first": by their numbers (official code). "last": the
    # top ones (paper).
    bert_layers: str = "first"
    # zeros replace the feature of a hidden region (pre-training on saved features; official code). False: it is what
    # the detector makes of hidden pixels.
    hidden_region_feature: bool = False
    # a region also carries the mean of the position vectors of the words that name it, as VisualBERT's do (for VCR);
    # official code has no such link
    named_regions: bool = False
    # most images that one text looks at. Each is read in a pass of its own, and the summaries of the passes stand side
    # by side.
    image_slots: int = 1
    # a learned bias among regions from where they lie relative to each other, see `RelativeGeometryBias`; official
    # checkpoints do not have it
    relative_geometry: bool = False
    relative_geometry_size: int = 64  # width of the hidden layer of that bias

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_sizes(self)
        for name, (one, other) in CHOICES.items():
            if getattr(self, name) not in (one, other):
                raise UserError(f'{name} is "{getattr(self, name)}"; it must be "{one}" or "{other}".')
        if self.image_slots < 1:
            raise UserError(f"image_slots is {self.image_slots}; every text needs room for one image.")


class LxmertEncoder(Encoder):
    """Words and regions each through layers of their own, then through layers with cross attention.

    Each image of a text is read in a pass of its own, as the official code reads NLVR2's two. Then a wordpiece has the
    mean of its states over the passes with an image, a region has the state of its image's pass, and the
    summary is [first image's summary; second image's summary], X = I x E with I = `image_slots`. A pass without an
    image reads zeros where others read regions.

    Attention maps come back over the L + R slots [words | regions] in this order: a map per layer over words; a map per
    layer over regions; then of each layer with cross attention two maps, and of several images two maps for each image:
    the cross attention (from words to regions and from regions to words), and the self-attentions (among words and
    among regions).
    """

    config_class = LxmertEncoderConfig
    base_model_prefix = "lxmert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ("SelfAttentionLayer", "CrossModalityLayer")
    abilities = frozenset(
        {
            Ability.SUMMARY_OF_SINGLE,
            Ability.SUMMARY_OF_QUESTION,
            Ability.SUMMARY_OF_PAIR,
            Ability.WORD_TABLE,
            Ability.INNER_STATES,
        }
    )

    def __init__(self, config: LxmertEncoderConfig):
        super().__init__(config)
        self.embeddings = TextEmbeddings(config)
        self.encoder = LayerStacks(config)
        self.pooler = BertPooler(config) if config.pooled == "tanh" else None
        self.relative_geometry = None
        if config.relative_geometry:
            layers, heads = config.r_layers + config.x_layers, config.num_attention_heads
            self.relative_geometry = RelativeGeometryBias(layers, heads, config.relative_geometry_size)
        self.post_init()

    @property
    def summary_size(self) -> int:
        """X; a vector for each image that a text may look at."""
        return self.config.hidden_size * self.config.image_slots

    @property
    def num_joint_layers(self) -> int:
        """See `Encoder`; those with cross attention."""
        return self.config.x_layers

    @property
    def max_images(self) -> int:
        """See `Encoder`; `config.image_slots`."""
        return self.config.image_slots

    @property
    def attention_graphs(self) -> dict[str, AttentionGraph]:
        """See `Encoder`: the layers over words, the layers over regions, both with the self-attention of the layers
        with cross attention behind them; and the cross attention.
        """
        config = self.config
        before, each = config.l_layers + config.r_layers, 2 * config.image_slots
        across = tuple(before + each * layer for layer in range(config.x_layers))
        among = tuple(step + 1 for step in across)
        return {
            "language": AttentionGraph((*range(config.l_layers), *among), frozenset({AttentionBlock.WORDS_TO_WORDS})),
            "vision": AttentionGraph(
                (*range(config.l_layers, before), *among), frozenset({AttentionBlock.REGIONS_TO_REGIONS})
            ),
            "cross": AttentionGraph(
                across, frozenset({AttentionBlock.WORDS_TO_REGIONS, AttentionBlock.REGIONS_TO_WORDS})
            ),
        }

    def lacks(self, ability: Ability) -> str | None:
        """See `Encoder.lacks`."""
        config = self.config
        wanted = {
            Ability.HIDDEN_REGIONS: (config.hidden_region_feature, "hidden_region_feature to true"),
            Ability.HIDDEN_FEATURES: (config.hidden_region_feature, "hidden_region_feature to true"),
            Ability.NAMED_REGIONS: (config.named_regions, "named_regions to true"),
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
        """See `Encoder.forward`, and above.

        Raises:
            ValueError: texts longer than the position table, or with more images than `image_slots`.
        """
        passes = ImagePasses.of(regions, self.config.image_slots)
        maps = AttentionMaps(texts, passes) if output_attentions else None
        words = self.encode_words(texts, maps)
        biases = self.biases(regions, passes)
        objects = self.encode_regions(texts, regions, passes, maps, biases)
        words, objects, between = self.encode_together(words, objects, texts, passes, maps, biases, inner_layer)
        pooled = words[:, 0] if self.pooler is None else self.pooler(words)
        states = self.of_texts(words, objects, texts, passes)
        return EncoderOutput(
            text=states.text,
            regions=states.regions,
            summary=pooled.unflatten(0, (len(texts), -1)).flatten(1),
            attentions=tuple(maps.found) if output_attentions else None,
            word_table=self.get_input_embeddings().weight,
            inner=None if inner_layer is None else self.of_texts(*between, texts, passes),
        )

    def biases(self, regions: TextRegions, passes: ImagePasses) -> list[Float[Tensor, "passes heads own own"] | None]:
        """What is added to the attention logits among regions: for each layer over regions, then for each of both."""
        if self.relative_geometry is None:
            return [None] * (self.config.r_layers + self.config.x_layers)
        attend = passes.attend.flatten(0, 1)
        is_pair = attend[:, :, None] & attend[:, None]
        return self.relative_geometry(passes.split(regions.boxes), passes.split(regions.image_sizes), is_pair)

    def encode_words(self, texts: TextBatch, maps: AttentionMaps | None) -> Float[Tensor, "M L E"]:
        """Through the layers over words, which do not depend on images."""
        words = self.embeddings(texts)
        for layer in self.encoder.layer:
            words, found = layer(words, texts.attend, maps is not None)
            if maps is not None:
                maps.add_words(found)
        return words

    def encode_regions(
        self,
        texts: TextBatch,
        regions: TextRegions,
        passes: ImagePasses,
        maps: AttentionMaps | None,
        biases: list[Float[Tensor, "passes heads own own"] | None],
    ) -> Float[Tensor, "passes own E"]:
        """Through the layers over regions, image by image."""
        features = regions.features
        if self.config.hidden_region_feature:
            features = features.masked_fill(regions.is_hidden[..., None], 0.0)
        shares = regions.boxes / regions.image_sizes.flip(-1).repeat(1, 1, 2)  # x by the width, y by the height
        objects = self.encoder.visn_fc(passes.split(features), passes.split(shares))
        places = self.embeddings.position_embeddings.weight[: texts.input_ids.shape[1]]
        named = naming_words(texts, regions, places.dtype) if self.config.named_regions else None
        if named is not None:
            objects = objects + passes.split(named / named.sum(dim=2, keepdim=True).clamp(min=1) @ places)
        attend = passes.attend.flatten(0, 1)
        for layer, bias in zip(self.encoder.r_layers, biases[: self.config.r_layers], strict=True):
            objects, found = layer(objects, attend, maps is not None, bias)
            if maps is not None:
                maps.add_regions(found)
        return objects

    def encode_together(
        self,
        words: Float[Tensor, "M L E"],
        objects: Float[Tensor, "passes own E"],
        texts: TextBatch,
        passes: ImagePasses,
        maps: AttentionMaps | None,
        biases: list[Float[Tensor, "passes heads own own"] | None],
        inner_layer: int | None,
    ) -> tuple[
        Float[Tensor, "passes L E"],
        Float[Tensor, "passes own E"],
        tuple[Float[Tensor, "passes L E"], Float[Tensor, "passes own E"]],
    ]:
        """Through the layers with cross attention; from here on each image of a text has words of its own.

        Returns:
            Words, regions, and both after `inner_layer` of these layers (None: after all).
        """
        words, text_attend, attend = passes.repeat(words), passes.repeat(texts.attend), passes.attend.flatten(0, 1)
        between = None
        for number, (layer, bias) in enumerate(zip(self.encoder.x_layers, biases[self.config.r_layers :], strict=True)):
            if number == inner_layer:
                between = words, objects
            words, objects, found = layer(words, objects, text_attend, attend, maps is not None, bias)
            if maps is not None:
                maps.add_cross(*found)
        return words, objects, between or (words, objects)

    def of_texts(
        self,
        words: Float[Tensor, "passes L E"],
        objects: Float[Tensor, "passes own E"],
        texts: TextBatch,
        passes: ImagePasses,
    ) -> InnerStates:
        """Words and regions of passes -> of texts, zero at padding."""
        return InnerStates(self.mean_of_images(words, passes) * texts.attend[..., None], passes.join(objects))

    def mean_of_images(self, words: Float[Tensor, "passes L E"], passes: ImagePasses) -> Float[Tensor, "M L E"]:
        """The mean over the passes with an image, or over all where a text has none."""
        words = words.unflatten(0, (-1, passes.row.shape[1]))
        has_image = passes.attend.any(dim=2)
        shares = (has_image | ~has_image.any(dim=1, keepdim=True)).to(words.dtype)
        shares = shares / shares.sum(dim=1, keepdim=True)
        return (words * shares[..., None, None]).sum(dim=1)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in transformers, but padding rows of tables start as the others do (official code)."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, GEOMETRY_LAYERS):
            module.reset_parameters()
        else:
            super()._init_weights(module)
