from __future__ import annotations

import torch

from detector.checkpoint import load_strictly
from e2e_vl.encoders.base import NoEncoder, NoEncoderConfig
from e2e_vl.structures import TextBatch
from tests.regions import regions_of_own_images


def test_regions_go_through_unchanged_with_their_gradient():
    features = torch.randn(2, 4, 7, requires_grad=True)
    attention_mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    regions = regions_of_own_images(
        features, torch.rand(2, 4, 4), torch.ones(2, 4, 2), attention_mask, torch.zeros(2, 4).long()
    )
    texts = TextBatch(torch.zeros(2, 3).long(), torch.zeros(2, 3).long(), torch.ones(2, 3, dtype=torch.bool))
    encoder = NoEncoder(NoEncoderConfig(vocab_size=5, feature_dim=7))
    encoded = encoder(texts, regions)
    assert encoder.hidden_size == 7
    assert not encoder.uses_whole_image
    assert torch.equal(encoded.regions, features)
    assert torch.equal(encoded.text, torch.zeros(2, 3, 7))
    encoded.regions.sum().backward()
    assert torch.equal(features.grad, torch.ones(2, 4, 7))


def test_it_is_saved_and_loaded_like_every_encoder(tmp_path):
    encoder = NoEncoder(NoEncoderConfig(vocab_size=5, feature_dim=7))
    assert list(encoder.parameters()) == []
    encoder.save_pretrained(tmp_path)
    load_strictly(encoder, tmp_path / "model.safetensors")
    assert NoEncoder.from_pretrained(tmp_path).hidden_size == 7
