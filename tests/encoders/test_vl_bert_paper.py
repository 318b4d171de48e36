"""VL-BERT where paper and official code differ: the word of a region, the whole image, the start of new layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.structures import TextRegions
from tests.encoders.test_vl_bert import SMALL, changed, make_inputs, make_model

PAPER = {
    "geometry": "corners",
    "visual_part_on_end": True,
    "region_word": "img",
    "new_layers": "normal",
    "whole_image_in_sequence": False,
    "text_only_embedding": True,
}


def with_whole_image(regions: TextRegions) -> TextRegions:
    """The same regions; row 0 of each text that has one is the whole image."""
    return dataclasses.replace(regions, row=regions.row - regions.attention_mask.long())


def with_other_feature(regions: TextRegions, row: int | slice) -> TextRegions:
    other = dataclasses.replace(regions, features=regions.features.clone())
    other.features[:, row] += 1
    return other


def test_all_choices_of_the_paper_survive_saving(tmp_path):
    model = make_model(**PAPER)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    loaded = VLBertModel.from_pretrained(tmp_path)
    assert {name: getattr(loaded.config, name) for name in PAPER} == PAPER
    texts, regions = make_inputs(counts=(2, 4, 1))
    one, other = (either(texts, with_whole_image(regions)) for either in (model, loaded))
    torch.testing.assert_close(one.text, other.text, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.regions, other.regions, rtol=1e-5, atol=1e-6)


# The word of a region


@pytest.mark.parametrize("word", ["learned", "img"])
def test_hidden_regions_have_a_word_of_their_own_only_in_the_official_code(word):
    model = make_model(region_word=word, masked_region_embedding=word == "learned")
    texts, regions = make_inputs()
    hidden = dataclasses.replace(regions, is_masked=regions.attention_mask.clone())
    differs = changed(model(texts, hidden).regions, model(texts, regions).regions)
    assert differs.any() == (word == "learned")
    with torch.no_grad():
        before = model(texts, hidden).regions
        model.embeddings.region_word_embedding.weight += torch.randn(1, SMALL["hidden_size"])
        moved = changed(model(texts, hidden).regions, before)
    assert torch.equal(moved, regions.attention_mask) == (
        word == "img"
    )  # [IMG] stands in the place of hidden regions too


def test_img_is_no_wordpiece():
    """It lies beside the word table, whose size is the vocabulary's, and starts as BERT's embeddings do."""
    model = make_model(region_word="img", hidden_size=512, initializer_range=0.3).requires_grad_(False)
    assert len(model.get_input_embeddings().weight) == SMALL["vocab_size"]
    assert model.embeddings.region_word_embedding.weight.shape == (1, 512)
    assert model.embeddings.region_word_embedding.weight.std() == pytest.approx(0.3, rel=0.15)
    assert model.embeddings.masked_region_word_embedding is None


# The whole image


def test_the_whole_image_is_no_region_of_the_sequence():
    """Without its part on words the model computes what it does without any whole image."""
    model = make_model(image_feature_on_words=False, whole_image_in_sequence=False)
    without = make_model(image_feature_on_words=False, uses_whole_image=False)
    assert (model.uses_whole_image, model.whole_image_is_region) == (True, False)
    assert not without.whole_image_is_region and make_model().whole_image_is_region
    texts, regions = make_inputs(counts=(2, 4, 1))
    rest = TextRegions(*(getattr(regions, field.name)[:, 1:] for field in dataclasses.fields(regions)))
    output, expected = model(texts, with_whole_image(regions)), without(texts, rest)
    torch.testing.assert_close(output.text, expected.text, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.regions[:, 1:], expected.regions, rtol=1e-4, atol=1e-5)
    assert output.regions[:, 0].abs().sum() == 0
    assert not torch.allclose(make_model(image_feature_on_words=False)(texts, regions).text, output.text, atol=1e-3)


def test_words_still_carry_the_whole_image():
    model = make_model(num_hidden_layers=0, whole_image_in_sequence=False, text_only_embedding=True)
    texts, regions = make_inputs(counts=(2, 1, 0))  # the second image has no other region
    regions = with_whole_image(regions)
    first, second = model(texts, regions), model(texts, with_other_feature(regions, 0))
    assert torch.equal(changed(first.text, second.text), texts.attention_mask & torch.tensor([[True], [True], [False]]))
    assert not changed(first.regions, second.regions).any()


def test_nothing_attends_to_the_whole_image():
    model = make_model(whole_image_in_sequence=False)
    texts, regions = make_inputs(counts=(2, 4, 1))
    output = model(texts, with_whole_image(regions), output_attentions=True)
    column = texts.attention_mask.shape[1]
    for maps in output.attentions:
        assert maps[..., column].abs().sum() == maps[:, :, column].abs().sum() == 0
        assert (maps[1, :, :, column + 1 : column + 4].sum(dim=(0, 1)) > 0).all()


def test_one_text_with_two_images_loses_both_whole_images():
    model = make_model(whole_image_in_sequence=False)
    texts, regions = make_inputs(lengths=(5,), counts=(5,))
    regions = dataclasses.replace(regions, row=torch.tensor([[-1, 0, -1, 0, 1]]))
    kept = (model(texts, regions).regions.abs().sum(dim=-1) > 0).tolist()
    assert kept == [[False, True, False, True, True]]
    assert regions.without_whole_image().attention_mask.tolist() == kept
    assert regions.attention_mask.all()


# New layers


def test_new_layers_can_all_start_as_in_bert():
    official, normal = (
        make_model(new_layers=kind, initializer_range=0.05, visual_size=40, feature_dim=600)
        .requires_grad_(False)
        .embeddings
        for kind in ("official", "normal")
    )
    assert normal.region_projection.weight.std() == pytest.approx(0.05, rel=0.05)
    assert normal.region_projection.weight.abs().max() > 0.15  # a normal distribution has tails
    assert normal.region_projection.bias.abs().sum() == 0
    bound = (SMALL["geometry_dim"] + 600) ** -0.5
    assert official.region_projection.weight.abs().max() == pytest.approx(bound, rel=0.01)
    assert official.region_projection.bias.abs().sum() > 0
    for part in (normal.text_visual, normal.region_visual):
        assert part.projection.weight.std() == pytest.approx(0.05, rel=0.1)
