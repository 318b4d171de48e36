"""What goes into VisualBERT's first layer: words as in BERT, and regions with tables of their own.

Shape legend
    M  texts in the batch
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    Z  positions of the longest packed sequence
    D  width of a region feature
    E  hidden size of the encoder
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor, nn

from detector.errors import UserError
from e2e_vl.encoders.sequence import SequenceLayout, naming_words
from e2e_vl.structures import TextBatch, TextRegions

BOX_NUMBERS = 6  # width of `box_numbers`


def box_numbers(boxes: Float[Tensor, "*shape 4"], image_sizes: Num[Tensor, "*shape 2"]) -> Float[Tensor, "*shape 6"]:
    """x1, y1, x2, y2, width and height of a box as shares of its image's width and height.

    The six numbers stand behind the features of Flickr30K Entities (BAN's files) in the official code.
    """
    height, width = image_sizes.to(boxes.dtype).unbind(-1)
    corners = boxes / torch.stack([width, height, width, height], dim=-1)
    return torch.cat([corners, corners[..., 2:] - corners[..., :2]], dim=-1)


class VisualBertTables(nn.Module):
    """Texts and their regions -> the packed input sequence `words, regions`.

    Facts of the official code that the paper does not state: no [SEP] follows the regions, one LayerNorm serves words
    and regions, and all regions share row 0 of their position table, whose other rows are never read.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, positions, types = config.hidden_size, config.max_position_embeddings, config.type_vocab_size
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

    @torch.no_grad()
    def copy_text_tables(self) -> None:
        """The segment and position tables of regions become copies of the text's; they are trained apart."""
        self.visual_token_type_embeddings.weight.copy_(self.token_type_embeddings.weight)
        self.visual_position_embeddings.weight.copy_(self.position_embeddings.weight)

    def forward(self, texts: TextBatch, regions: TextRegions) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Args: M texts and their regions. Returns: the input, and which slot sits at which position.

        Raises:
            ValueError: texts longer than the position table.
        """
        return self.join(texts, regions, self.alignment(texts, regions))

    def alignment(self, texts: TextBatch, regions: TextRegions) -> Float[Tensor, "M R L"] | None:
        """1 where a word names a region, which is a candidate box of the text's first image; None: no word names any.

        The official code lists the words of each region (`image_text_alignment`).
        """
        return naming_words(texts, regions, self.position_embeddings.weight.dtype)

    def join(
        self, texts: TextBatch, regions: TextRegions, alignment: Float[Tensor, "M R L"] | None
    ) -> tuple[Float[Tensor, "M Z E"], SequenceLayout]:
        """Add up the embeddings and pack them.

        Args:
            alignment: how often each word is listed for each region; None: no word is listed.

        Returns:
            The input after LayerNorm and dropout; the layout.
        """
        length, limit = texts.input_ids.shape[1], self.config.max_position_embeddings
        if length > limit:
            raise UserError(
                f"A text of {length} wordpieces does not fit into max_position_embeddings = {limit}; cut the texts or "
                "raise the encoder's limit."
            )
        words = self.word_embeddings(texts.input_ids) + self.token_type_embeddings(texts.segment_ids)
        words = words + self.position_embeddings.weight[:length]
        objects = self.visual_projection(self.region_features(regions))
        objects = objects + self.region_types(regions) + self.region_positions(alignment)
        layout = SequenceLayout.from_masks(texts.attend, regions.attend, has_end=False)
        slots = torch.cat([words, objects.to(words.dtype)], dim=1)
        return self.dropout(self.LayerNorm(layout.pack(slots))), layout

    def region_features(self, regions: TextRegions) -> Float[Tensor, "M R _"]:
        """The features, with `config.with_box_numbers` followed by the six numbers of the box."""
        if not self.config.with_box_numbers:
            return regions.features
        numbers = box_numbers(regions.boxes, regions.image_sizes)
        return torch.cat([regions.features, numbers.to(regions.features.dtype)], dim=-1)

    def region_types(self, regions: TextRegions) -> Float[Tensor, "M R E"]:
        """The segment vector of each region, which says from which of the text's images it comes."""
        rows = torch.stack([self.visual_token_type_embeddings.weight[row] for row in self.config.region_types])
        return F.embedding(regions.image_slot, rows)

    def region_positions(self, alignment: Float[Tensor, "M R L"] | None) -> Float[Tensor, "*shape E"]:
        """The position vector of each region, from the vectors of the words that are listed for it; or one for all."""
        is_official = self.config.region_position == "official"
        shared = self.visual_position_embeddings.weight[0]
        result = shared if is_official else torch.zeros_like(shared)
        if alignment is None:
            return result
        if is_official:
            alignment = alignment / alignment.sum(dim=2, keepdim=True).clamp(min=1)
        return result + alignment @ self.position_embeddings.weight[: alignment.shape[2]]
