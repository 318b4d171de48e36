"""The layers of LXMERT, with the parameter names of transformers' `LxmertModel`; attention is fused.

Shape legend
    M  texts in the batch, here one for each image that a text looks at
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    D  width of a region feature
    E  hidden size of the encoder
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertSelfOutput

from detector.errors import UserError
from e2e_vl.structures import TextBatch

Map = Float[Tensor, "M heads _ _"]  # attention probabilities (query, key) before dropout


class TextEmbeddings(nn.Module):
    """Word + position + segment vector, LayerNorm, dropout.

    As in the official code, row 0 of each table is a padding row, which gets no gradient through the lookup: so the
    position of [CLS] and segment 0, which every official text has, keep their start values, which are not zero.
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
        """Raises ValueError for texts that are longer than the position table."""
        length, limit = texts.input_ids.shape[1], self.position_embeddings.num_embeddings
        if length > limit:
            raise UserError(
                f"A text of {length} wordpieces does not fit into max_position_embeddings = {limit}; cut the texts or "
                "raise the encoder's limit."
            )
        positions = torch.arange(length, device=texts.input_ids.device)
        vectors = self.word_embeddings(texts.input_ids) + self.position_embeddings(positions)
        if self.token_type_embeddings is not None:
            vectors = vectors + self.token_type_embeddings(texts.segment_ids)
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
        """Features, and x1, y1, x2, y2 as shares of the image's width and height."""
        seen = self.visn_layer_norm(self.visn_fc(features))
        placed = self.box_layer_norm(self.box_fc(boxes.to(features.dtype)))
        return self.dropout((seen + placed) / 2)


class MultiHeadAttention(nn.Module):
    """Queries of one sequence, keys and values of the same or of another one."""

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
        attend: Bool[Tensor, "M keys"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads queries keys"] | None = None,
    ) -> tuple[Float[Tensor, "M queries E"], Map | None]:
        """What the states read from the context, and the map if asked for; the bias is added to the logits.

        Where there is nothing to read, such as the regions of a text without an image, it is zero, and so is the map.
        (The official code would average over the padding, whose masked scores are all alike.)
        """
        split = (-1, self.head_size)
        query = self.query(states).unflatten(-1, split).transpose(1, 2)
        key, value = (module(context).unflatten(-1, split).transpose(1, 2) for module in (self.key, self.value))
        has_key = attend.any(dim=1)[:, None, None, None]
        mask = attend[:, None, None, :] | ~has_key
        if bias is not None:
            bias = bias.to(query.dtype).masked_fill(~mask, -torch.inf)
        read = F.scaled_dot_product_attention(
            *(query, key, value),
            attn_mask=mask.expand(-1, 1, query.shape[2], -1) if bias is None else bias,
            dropout_p=self.dropout if self.training else 0.0,
        )
        read = (read * has_key).transpose(1, 2).flatten(2)
        if not output_attentions:
            return read, None
        scores = query @ key.transpose(2, 3) * self.head_size**-0.5
        scores = scores if bias is None else scores + bias
        return read, scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) * has_key


class AttentionStep(nn.Module):
    """Attention, Linear, dropout, residual, LayerNorm. `inner` is the name of the attention among the parameters."""

    def __init__(self, config, inner: str = "self"):
        super().__init__()
        self.inner = inner
        self.add_module(inner, MultiHeadAttention(config))
        self.output = BertSelfOutput(config)

    def forward(
        self,
        states: Float[Tensor, "M queries E"],
        context: Float[Tensor, "M keys E"],
        attend: Bool[Tensor, "M keys"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads queries keys"] | None = None,
    ) -> tuple[Float[Tensor, "M queries E"], Map | None]:
        """See `MultiHeadAttention.forward`."""
        read, found = self.get_submodule(self.inner)(states, context, attend, output_attentions, bias)
        return self.output(read, states), found


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
        attend: Bool[Tensor, "M length"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads length length"] | None = None,
    ) -> tuple[Float[Tensor, "M length E"], Map | None]:
        """States -> states, and the map if asked for; the bias is added to the attention logits."""
        states, found = self.attention(states, states, attend, output_attentions, bias)
        return self.output(self.intermediate(states), states), found


class CrossModalityLayer(GradientCheckpointingLayer):
    """Cross attention both ways, then self-attention and feed-forward of words and of regions.

    Both directions of the cross attention read the layer's input: regions do not see the words that have just been
    updated. They share one module in the official code; with `cross_attention: separate` each has its own (paper,
    section 2.2).
    """

    def __init__(self, config):
        super().__init__()
        self.visual_attention = AttentionStep(config, "att")
        self.text_attention = AttentionStep(config, "att") if config.cross_attention == "separate" else None
        self.lang_self_att = AttentionStep(config)
        self.visn_self_att = AttentionStep(config)
        self.lang_inter, self.lang_output = BertIntermediate(config), BertOutput(config)
        self.visn_inter, self.visn_output = BertIntermediate(config), BertOutput(config)

    def forward(
        self,
        words: Float[Tensor, "M L E"],
        regions: Float[Tensor, "M R E"],
        word_attend: Bool[Tensor, "M L"],
        region_attend: Bool[Tensor, "M R"],
        output_attentions: bool = False,
        bias: Float[Tensor, "M heads R R"] | None = None,
    ) -> tuple[Float[Tensor, "M L E"], Float[Tensor, "M R E"], tuple[Map | None, ...]]:
        """Words and regions -> words and regions, and four maps (None unless asked for); the bias is among regions.

        These are from words to regions, from regions to words, among words, among regions.
        """
        to_text = self.visual_attention if self.text_attention is None else self.text_attention
        (words, to_regions), (regions, to_words) = (
            self.visual_attention(words, regions, region_attend, output_attentions),
            to_text(regions, words, word_attend, output_attentions),
        )
        words, among_words = self.lang_self_att(words, words, word_attend, output_attentions)
        regions, among_regions = self.visn_self_att(regions, regions, region_attend, output_attentions, bias)
        words = self.lang_output(self.lang_inter(words), words)
        regions = self.visn_output(self.visn_inter(regions), regions)
        return words, regions, (to_regions, to_words, among_words, among_regions)


class LayerStacks(nn.Module):
    """Region embeddings and the three stacks of layers: of words, of regions, and of both."""

    def __init__(self, config):
        super().__init__()
        self.visn_fc = RegionEmbeddings(config)
        self.layer = nn.ModuleList(SelfAttentionLayer(config) for _ in range(config.l_layers))
        self.x_layers = nn.ModuleList(CrossModalityLayer(config) for _ in range(config.x_layers))
        self.r_layers = nn.ModuleList(SelfAttentionLayer(config) for _ in range(config.r_layers))
