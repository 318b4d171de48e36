"""Small encoders and their inputs."""

from __future__ import annotations

import dataclasses

import torch

from detector.structures import Regions
from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig, VisualBertEncoder
from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig, VLBertModel
from e2e_vl.structures import TextBatch, TextRegions, gather_regions
from tests.regions import regions_of_own_images

SHARED = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "feature_dim": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VL_BERT = {
    **SHARED,
    "num_hidden_layers": 2,
    "geometry_dim": 32,
    "region_dropout_prob": 0.0,
    "visual_scale_text_init": 0.5,
    "visual_scale_object_init": 0.5,
}
VISUAL_BERT = {**SHARED, "num_hidden_layers": 2, "initializer_range": 0.3}
LXMERT = {**SHARED, "l_layers": 2, "r_layers": 1, "x_layers": 2, "initializer_range": 0.2}  # so that parts matter


def make_vl_bert(**changes) -> VLBertModel:
    torch.manual_seed(0)
    return VLBertModel(PretrainedVLBertConfig(**{**VL_BERT, **changes})).eval()


def make_visual_bert(seed: int = 0, **changes) -> VisualBertEncoder:
    torch.manual_seed(seed)
    return VisualBertEncoder(PretrainedVisualBertConfig(**{**VISUAL_BERT, **changes})).eval()


def make_lxmert(**changes) -> LxmertEncoder:
    torch.manual_seed(0)
    return LxmertEncoder(PretrainedLxmertConfig(**{**LXMERT, **changes})).eval()


def make_inputs(lengths=(6, 3, 5), counts=(2, 4, 0), seed=1) -> tuple[TextBatch, TextRegions]:
    """Texts of the given lengths with the given numbers of regions, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    texts, length, count = len(lengths), max(lengths), max(*counts, 1)
    attend_text = torch.arange(length) < torch.tensor(lengths)[:, None]
    attention_mask = torch.arange(count) < torch.tensor(counts)[:, None]
    corner = torch.rand(texts, count, 2, generator=generator) * 40
    side = torch.rand(texts, count, 2, generator=generator) * 20 + 2
    ids = torch.randint(1, SHARED["vocab_size"], (texts, length), generator=generator)
    features = torch.randn(texts, count, SHARED["feature_dim"], generator=generator)
    return (
        TextBatch(ids * attend_text, (torch.arange(length) > 2).long() * attend_text, attend_text),
        regions_of_own_images(
            features=features * attention_mask[..., None],
            boxes=torch.cat([corner, corner + side], dim=-1) * attention_mask[..., None],
            image_sizes=torch.where(attention_mask[..., None], torch.tensor([60.0, 80.0]), torch.ones(2)),
            attention_mask=attention_mask,
            image_slot=torch.zeros(texts, count, dtype=torch.long),
        ),
    )


def changed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """bool [M, L or R]: whether the vectors differ by more than rounding."""
    return (one - other).abs().sum(dim=-1) > 1e-4


def select(texts: TextBatch, regions: TextRegions, row: int) -> tuple[TextBatch, TextRegions]:
    """One text without padding."""
    length, count = int(texts.attention_mask[row].sum()), max(int(regions.attention_mask[row].sum()), 1)
    return (
        TextBatch(
            *(rows[row : row + 1, :length] for rows in (texts.input_ids, texts.token_type_ids, texts.attention_mask))
        ),
        TextRegions(*(getattr(regions, f.name)[row : row + 1, :count] for f in dataclasses.fields(regions))),
    )


def name_regions(texts: TextBatch, rows: list[list[int]]) -> TextBatch:
    """Set the regions to which the first words of each text refer; -1 = none, as for the other words."""
    named = torch.full_like(texts.input_ids, -1)
    for text, wanted in enumerate(rows):
        named[text, : len(wanted)] = torch.tensor(wanted)
    return dataclasses.replace(texts, region_of_token=named)


def regions_of_images(*image_index: tuple[int, ...], whole_image: bool = True) -> TextRegions:
    """The regions of each text from two images with 3 and 4 regions, including the whole image."""
    generator = torch.Generator().manual_seed(3)
    boxes, counts = [], (3, 4)
    for count in counts:
        corner = torch.rand(count, 2, generator=generator) * 30
        boxes.append(torch.cat([corner, corner + 5 + torch.rand(count, 2, generator=generator) * 20], dim=1))
    features = [torch.randn(count, SHARED["feature_dim"], generator=generator) for count in counts]
    regions = Regions(boxes, features, [torch.zeros(count, 2) for count in counts])
    sizes = torch.tensor([[60, 80], [50, 90]])
    return gather_regions(regions, sizes, torch.tensor(image_index), whole_image=whole_image)


def one_text(times: int = 1) -> TextBatch:
    """A text of five wordpieces, repeated."""
    text, _ = make_inputs(lengths=(5,), counts=(1,))
    return TextBatch(*(rows.expand(times, -1) for rows in (text.input_ids, text.token_type_ids, text.attention_mask)))
