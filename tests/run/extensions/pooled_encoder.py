"""An encoder whose summary is a pooled vector: it has no place for answers, and no whole image as region 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from e2e_vl.encoders.base import Encoder, PretrainedEncoderConfig, read_summary
from e2e_vl.registry import Config
from e2e_vl.structures import Ability, EncoderOutput, TextBatch, TextRegions


class PooledEncoderConfig(Config, frozen=True):
    hidden_size: int = 16
    uses_whole_image: bool = False


class PooledConfig(PretrainedEncoderConfig, settings=PooledEncoderConfig):
    model_type = "pooled"


class PooledEncoder(Encoder):
    """Words and regions are added up, and each of them sees the mean of all. BERT's layout of texts is the default."""

    config_class = PooledConfig
    abilities = frozenset(Ability) - {Ability.MASKED_FEATURES, Ability.IMAGE_PAIRS}

    def __init__(self, config: PooledConfig):
        super().__init__(config)
        size = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, size)
        self.segments = nn.Embedding(2, size)
        self.projection = nn.Linear(config.feature_dim + 4, size)
        self.hidden_region = nn.Embedding(1, size)
        self.pooler = nn.Linear(size, size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def forward(self, texts: TextBatch, regions: TextRegions, output_attentions: bool = False) -> EncoderOutput:
        places = regions.boxes / regions.image_sizes.flip(-1).repeat(1, 1, 2)
        objects = self.projection(torch.cat([regions.features, places], dim=-1))
        objects = torch.where(regions.is_masked[..., None], objects + self.hidden_region.weight, objects)
        objects = objects * regions.attention_mask[..., None]
        words = self.words(texts.input_ids) + self.segments(texts.token_type_ids)
        if texts.region_of_token is not None:
            is_named = (texts.region_of_token[..., None] == regions.row[:, None]) & regions.attention_mask[:, None]
            words = words + is_named.to(words.dtype) @ objects
        words = words * texts.attention_mask[..., None]
        slots, attention_mask = (
            torch.cat([words, objects], dim=1),
            torch.cat([texts.attention_mask, regions.attention_mask], dim=1),
        )
        maps = (slots @ slots.mT).masked_fill(~attention_mask[:, None], -torch.inf).softmax(dim=-1)[:, None]
        is_word = torch.arange(slots.shape[1]) < words.shape[1]
        apart = maps * (is_word[:, None] == is_word)  # a second step, in which words see no region
        pooled = torch.tanh(self.pooler(_mean(words, texts.attention_mask) + _mean(objects, regions.attention_mask)))
        return EncoderOutput(
            text=(words + pooled[:, None]) * texts.attention_mask[..., None],
            regions=(objects + pooled[:, None]) * regions.attention_mask[..., None],
            summary=read_summary(words, pooled, texts.summary),
            attentions=(maps, apart) if output_attentions else None,
            word_embeddings=self.words.weight,
        )


def _mean(vectors: Tensor, attention_mask: Tensor) -> Tensor:
    return vectors.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True).clamp(min=1)
