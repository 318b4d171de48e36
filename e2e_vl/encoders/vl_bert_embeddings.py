"""What goes into VL-BERT's first layer: word + visual + position + segment embeddings (paper, section 3.2).

Shape legend
    M  texts in the batch
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    Z  positions of the longest packed sequence
    D  width of a region feature
    F  width of a region vector
    E  hidden size of the encoder
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.errors import UserError
from e2e_vl.encoders.geometry import geometry_embedding
from e2e_vl.encoders.sequence import SequenceLayout
from e2e_vl.structures import TextBatch, TextRegions, take_along

REGION_SEGMENT = 2  # segment of regions and [END]; words have 0 or 1


class RegionProjection(nn.Linear):
    """ReLU(Linear(Dropout([geometry, feature]))), the vector of a region; keeps torch's default start values."""

    def __init__(self, geometry_dim: int, feature_dim: int, visual_size: int, dropout: float):
        super().__init__(geometry_dim + feature_dim, visual_size)
        self.dropout = dropout

    def forward(
        self, geometry: Float[Tensor, "*shape _"], features: Float[Tensor, "*shape D"]
    ) -> Float[Tensor, "*shape F"]:
        joined = torch.cat([geometry.to(features.dtype), features], dim=-1)
        return super().forward(F.dropout(joined, self.dropout, self.training)).relu()


class ScaledLayerNorm(nn.LayerNorm):
    """A LayerNorm whose weight starts at `scale` instead of 1."""

    def __init__(self, hidden_size: int, scale: float, eps: float):
        self.scale = scale  # before the parent's constructor, which calls reset_parameters
        super().__init__(hidden_size, eps=eps)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scale)
        nn.init.zeros_(self.bias)


class ScalarFactor(nn.Module):
    """One learned factor that starts at `scale`."""

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
    """What a region vector adds to the embedding of a word or a region.

    A Linear where F differs from E, then LayerNorm, or a scalar factor without `layer_norm`. The weight of either
    starts at `scale`; at the official 0.0 the visual part is exactly zero at first, and no gradient gets through it.
    """

    def __init__(self, visual_size: int, hidden_size: int, scale: float, layer_norm: bool, eps: float):
        super().__init__()
        self.projection = nn.Linear(visual_size, hidden_size) if visual_size != hidden_size else nn.Identity()
        self.norm = ScaledLayerNorm(hidden_size, scale, eps) if layer_norm else ScalarFactor(scale)

    def forward(self, vectors: Float[Tensor, "*shape F"]) -> Float[Tensor, "*shape E"]:
        return self.norm(self.projection(vectors))


class HiddenRegionFeature(nn.Module):
    """One learned feature, zero at the start, in place of the features of hidden regions."""

    def __init__(self, feature_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, feature_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, features: Float[Tensor, "M R D"], is_hidden: Bool[Tensor, "M R"]) -> Float[Tensor, "M R D"]:
        return torch.where(is_hidden[..., None], self.weight.to(features.dtype), features)


class ImageSlotEmbedding(nn.Embedding):
    """A vector for each of the images that one text looks at; zero at the start, so that one image is as if without."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class VLBertEmbeddings(nn.Module):
    """Texts and their regions -> the packed input sequence `words, regions, [END]`.

    Facts of the official VL-BERT code that the paper does not state: a region's word is one learned vector; all
    regions share the position after the last word and [END] has the one after that; [END] is a learned vector without
    a visual part (unless `visual_part_on_end`); the whole image is one of the regions (unless `whole_image_in_sequence`
    is off); regions and [END] are segment 2.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, visual = config.hidden_size, config.visual_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.segment_embeddings = nn.Embedding(config.type_vocab_size, hidden)
        self.region_word_embedding = nn.Embedding(1, hidden)
        self.hidden_region_word_embedding = nn.Embedding(1, hidden) if config.hidden_region_embedding else None
        self.hidden_region_feature = HiddenRegionFeature(config.feature_dim) if config.hidden_region_feature else None
        slots = config.image_slots
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
        """Args: M texts and their regions. Returns: the input, and which slot sits at which position.

        Raises:
            ValueError: texts longer than the position table, or words that name regions in a model whose words have
                no visual part.
        """
        vectors = self.region_vectors(regions)
        word_vectors = self.word_vectors(texts, vectors, regions)
        region_words = self.region_word_embedding.weight.expand(*regions.attend.shape, -1)
        if self.hidden_region_word_embedding is not None:
            hidden = self.hidden_region_word_embedding.weight
            region_words = torch.where(regions.is_hidden[..., None], hidden, region_words)
        if self.image_slot_embeddings is not None:
            region_words = region_words + self.image_slot_embeddings(regions.image_slot)
        in_sequence = regions.attend
        if not self.config.whole_image_in_sequence:
            in_sequence = in_sequence & ~regions.is_whole_image
        return self.join(texts, word_vectors, region_words, vectors, in_sequence, regions.image_slot)

    def region_vectors(self, regions: TextRegions) -> Float[Tensor, "M R F"]:
        """Geometry and feature of each region as one vector; meaningless at padding."""
        geometry = geometry_embedding(
            regions.boxes, regions.image_sizes, self.config.geometry_dim, self.config.geometry
        )
        features = regions.features
        if self.hidden_region_feature is not None:
            features = self.hidden_region_feature(features, regions.is_hidden)
        return self.region_projection(geometry, features)

    def word_vectors(
        self, texts: TextBatch, vectors: Float[Tensor, "M R F"], regions: TextRegions
    ) -> Float[Tensor, "M _ F"] | None:
        """The region vector each word carries: the whole image, or the region of the first image that it names.

        Of several images it is the mean of the whole images' vectors. Row 0 of the regions is the first image as a
        whole.

        Returns:
            One entry where all words of a text carry the same; None in a model whose words have no visual part. Texts
            without a region get the learned text-only vector, or zero without one.
        """
        if self.text_visual is None:
            if texts.region_of_token is not None:
                raise UserError(
                    "Words name regions (region_of_token), but image_feature_on_words is off in the encoder's config; "
                    "switch it on."
                )
            return None
        if self.image_slot_embeddings is not None:
            whole = regions.is_whole_image.to(vectors.dtype)
            weights = whole / whole.sum(dim=1, keepdim=True).clamp(min=1)
            vectors = torch.cat([(weights[:, None] @ vectors), vectors[:, 1:]], dim=1)
        if texts.region_of_token is None:
            word_vectors = vectors[:, :1]
        else:
            rows = texts.region_of_token + 1  # row 0 is the whole image, which words that name nothing carry
            word_vectors = take_along(vectors, rows[..., None], dim=1)
        has_region = regions.attend.any(dim=1)[:, None, None]
        if self.text_only_embedding is None:
            return word_vectors * has_region
        return torch.where(has_region, word_vectors, self.text_only_embedding.weight)

    def join(
        self,
        texts: TextBatch,
        word_vectors: Float[Tensor, "M _ F"] | None,
        region_words: Float[Tensor, "M R E"],
        vectors: Float[Tensor, "M R F"],
        region_attend: Bool[Tensor, "M R"],
        image_slot: Int64[Tensor, "M R"],
    ) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Add up the embeddings and pack them.

        Args:
            word_vectors: region vector that each word carries, or None.
            region_words: what stands in a region's place of a word.
            image_slot: which of the text's images a region comes from.

        Returns:
            The input after LayerNorm and dropout; the layout.
        """
        words = self.word_embeddings(texts.input_ids)
        if word_vectors is not None:
            words = words + self.text_visual(word_vectors)
        objects = region_words + self.region_visual(vectors)
        end = self.end_embedding.weight.expand(len(texts), 1, -1)
        if self.config.visual_part_on_end:
            end = end + self.text_visual(word_vectors[:, :1])  # the first word, [CLS], names no region
        slots = torch.cat([words, objects.to(words.dtype), end], dim=1)

        positions = self.position_ids(texts.attend, image_slot)
        segments = self.segment_ids(texts.segment_ids, region_attend)
        slots = slots + self.position_embeddings(positions) + self.segment_embeddings(segments)
        layout = SequenceLayout.from_masks(texts.attend, region_attend)
        return self.dropout(self.norm(layout.pack(slots))), layout

    def position_ids(
        self, text_attend: Bool[Tensor, "M L"], image_slot: Int64[Tensor, "M R"]
    ) -> Int64[Tensor, "M L+R+1"]:
        """Of a text of n wordpieces the words have 0 .. n - 1, every region has n, [END] has n + 1.

        Regions of the text's second image have n + 1, and so on: each image has a position of its own.
        """
        longest, limit = text_attend.shape[1] + self.config.image_slots + 1, self.config.max_position_embeddings
        if longest > limit:
            raise UserError(
                f"A text of {text_attend.shape[1]} wordpieces (with the regions' and [END]'s positions {longest}) does "
                f"not fit into max_position_embeddings = {limit}; cut the texts or raise the encoder's limit."
            )
        length = text_attend.sum(dim=1, keepdim=True)
        words = (text_attend.cumsum(dim=1) - 1).clamp(min=0)
        regions = length + image_slot
        return torch.cat([words, regions, regions.amax(dim=1, keepdim=True) + 1], dim=1)

    def segment_ids(
        self, text_segments: Int64[Tensor, "M L"], region_attend: Bool[Tensor, "M R"]
    ) -> Int64[Tensor, "M L+R+1"]:
        """The words' own segments, then 2 for regions and [END]."""
        rest = (len(text_segments), region_attend.shape[1] + 1)
        return torch.cat([text_segments, text_segments.new_full(rest, REGION_SEGMENT)], dim=1)
