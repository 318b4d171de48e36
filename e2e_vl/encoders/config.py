"""The settings of the encoders (`encoder.config` of a run). The defaults are those of the official base models.

`vocab_size` and `feature_dim` come from the tokenizer and the detector; only the transformers configs have them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from detector.config import Dropout, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from detector.errors import UserError
from e2e_vl.registry import Config

Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "tanh"]


class NoEncoderConfig(Config, frozen=True):
    """No encoder: tasks read the detector's features."""

    uses_whole_image: bool = False  # region 0 is the whole image


class TransformerConfig(Config, frozen=True):
    """Settings of all Transformer encoders."""

    hidden_size: PositiveInt = 768
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Dropout = 0.1
    attention_probs_dropout_prob: Dropout = 0.1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: PositiveInt = 2
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_eps: PositiveFloat = 1e-12
    # add a learned bias from the relative positions of regions to the attention logits, see `RelativeGeometryBias`; not
    # in official checkpoints
    relative_geometry: bool = False
    relative_geometry_size: PositiveInt = 64  # hidden size of its MLPs
    # add a learned embedding of the score of a proposed box, and of how well its phrase matches the text, to the
    # feature of the region, see `ProposalEmbedding`; not in official checkpoints
    proposal_scores: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {self.num_attention_heads}"
            )


class VLBertEncoderConfig(TransformerConfig, frozen=True):
    """VL-BERT. The fields marked "scratch" let a small model learn without a pre-trained BERT."""

    num_hidden_layers: NonNegativeInt = 12
    type_vocab_size: Annotated[int, Meta(ge=3)] = 3  # segments: two of the text, one of the regions
    visual_size: PositiveInt | None = None  # width of a region vector; None: `hidden_size`
    geometry: Literal["centre_size", "corners"] = "centre_size"  # official code or paper, see `geometry_embedding`
    geometry_dim: Annotated[int, Meta(ge=8, multiple_of=8)] = 2048  # width of the geometry embedding
    region_dropout_prob: Dropout = 0.1  # before the Linear over geometry and feature
    visual_layer_norm: bool = True  # LayerNorm on the visual part; False: a learned scalar factor
    visual_scale_text_init: float = 0.0  # initial weight of that LayerNorm (or the factor) for words
    visual_scale_object_init: float = 0.0  # the same for regions
    uses_whole_image: bool = True  # region 0 is the whole image
    # the whole image is also a region of the sequence (official code). False: it is only added to words (paper, section
    # 3.2); its output is zero, and tasks ignore it.
    whole_image_in_sequence: bool = True
    image_feature_on_words: bool = True  # add the vector of region 0 to words (scratch: False)
    # add the vector of region 0 to [END], as to words (paper); False: no visual part (official)
    visual_part_on_end: bool = False
    text_only_embedding: bool = False  # a learned vector for words of texts without regions (pre-training)
    # the word embedding of a region. "learned": a learned vector, and another one for masked regions with
    # `masked_region_embedding` (official code). "img": the vector of the token [IMG], masked or not (paper, section
    # 3.2). [IMG] has its own table, so the vocabulary stays BERT's.
    region_word: Literal["learned", "img"] = "learned"
    # masked regions have a separate word embedding (pre-training)
    masked_region_embedding: bool = False
    # a learned vector replaces the feature of a masked region (pre-training on precomputed features, or without masking
    # pixels)
    masked_region_feature: bool = False
    # initialisation of the region projection. "official": PyTorch's default. "normal": N(0, `initializer_range`)
    # and zero biases, like all other new layers (paper, section 4.1). The visual LayerNorms start at
    # `visual_scale_*_init` in either case.
    projection_init: Literal["official", "normal"] = "official"
    with_pooler: bool = False  # tanh pooler on the first position
    # maximum number of images per text. Above 1, the regions of each image get a learned vector, initially zero and
    # not in official checkpoints.
    max_images: PositiveInt = 1
    # standard deviation for initialising the embedding tables (scratch); None: `initializer_range`
    embedding_init_std: NonNegativeFloat | None = None
    norm_first: bool = False  # LayerNorm before attention and feed-forward instead of after ("pre-LN", scratch)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.image_feature_on_words and not self.uses_whole_image) or (
            self.visual_part_on_end and not self.image_feature_on_words
        ):
            raise UserError("visual_part_on_end needs image_feature_on_words, and that needs uses_whole_image")
        if self.region_word == "img" and self.masked_region_embedding:
            raise UserError(
                "region_word: img has no other vector for masked regions; set masked_region_embedding: false"
            )


class VisualBertEncoderConfig(TransformerConfig, frozen=True):
    """VisualBERT."""

    num_hidden_layers: NonNegativeInt = 12
    # append x1, y1, x2, y2, width and height of the box, relative to the image, to the feature (official code for
    # Flickr30K Entities)
    with_box_coordinates: bool = False
    # also project features of the hidden size (official code). False: only project other sizes (paper, section 3.2)
    project_equal_sizes: bool = True
    # row of the visual segment table for the regions of a text's first image, its second image and so on. The official
    # code has [0, 1]; transformers uses row 1 for all by default.
    region_types: Annotated[list[NonNegativeInt], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [0, 1])
    # "official": row 0 of the visual position table, plus the mean of the position vectors of the words that refer to
    # the region. "paper" (section 3.2): the sum of those vectors, and zero for regions without such words.
    region_position: Literal["official", "paper"] = "official"
    uses_whole_image: bool = False  # region 0 is the whole image (official code for VCR)
    # late fusion ("w/o early fusion"): the layers encode words only, and one more layer encodes words and regions.
    # Texts without regions skip that layer.
    bypass_transformer: bool = False
    # initialise both visual tables as copies of the text's, also when loading a BERT
    special_visual_initialize: bool = True
    train_pooler: bool = False  # quirk: the official optimiser does not train the pooler


class LxmertEncoderConfig(TransformerConfig, frozen=True):
    """LXMERT."""

    l_layers: NonNegativeInt = 9  # layers over words
    r_layers: NonNegativeInt = 5  # layers over regions
    x_layers: NonNegativeInt = 5  # layers with cross attention
    uses_whole_image: bool = False  # region 0 is the whole image
    # "shared": one module attends from words to regions and from regions to words (official code). "separate": each
    # direction has its own (paper, section 2.2).
    cross_attention: Literal["shared", "separate"] = "shared"
    # quirk: add segment embeddings to words, always of the same segment (official code); False: word and position only
    # (paper, section 2.1)
    with_segments: bool = True
    # the summary. "tanh": tanh(Linear([CLS])) (official code). "state": the state of [CLS] (paper, section 2.3).
    # "butd": the state of [CLS] attends to the detector's features, see `TopDownAttention` (paper's table 3).
    pooling: Literal["tanh", "state", "butd"] = "tanh"
    with_lstm: bool = False  # an LSTM before the layers over words, and its last state as [CLS] (table 3, LSTM + BUTD)
    # BERT layers that initialise the language layers. "first": the first ones (official code). "last": the last ones
    # (paper).
    bert_layers: Literal["first", "last"] = "first"
    # set the feature of a masked region to zero (pre-training on saved features; official code). False: use the
    # detector's feature of the masked pixels.
    masked_region_feature: bool = False
    # add to a region the mean position vector of the words that refer to it, as in VisualBERT (for VCR); not in the
    # official code
    named_regions: bool = False
    # maximum number of images per text. Each is encoded in a separate pass, and the summaries are concatenated.
    max_images: PositiveInt = 1
