"""VL-BERT beyond parity: embeddings, differences between paper and official code, two images, initialization."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.structures import TextRegions
from tests.encoders.small import VL_BERT, changed, make_inputs, one_text, regions_of_images
from tests.encoders.small import make_vl_bert as make_model
from tests.regions import learn_geometry


@pytest.mark.parametrize("has_visual_part", [False, True])
def test_whole_image_reaches_the_end_only_if_asked_for(has_visual_part):
    """[END] is the last position of the embeddings; the paper gives it the whole image's vector."""
    embeddings = make_model(visual_part_on_end=has_visual_part).embeddings
    texts, regions = make_inputs(counts=(2, 4, 1))
    other = dataclasses.replace(regions, features=regions.features.clone())
    other.features[:, 0] += 1
    last = (texts.attention_mask.sum(dim=1) + regions.attention_mask.sum(dim=1))[:, None, None]
    ends = [
        embeddings(texts, rows)[0].gather(1, last.expand(-1, 1, VL_BERT["hidden_size"])) for rows in (regions, other)
    ]
    assert changed(*ends)[:, 0].tolist() == [has_visual_part] * 3


def test_initialization():
    """With `projection_init: normal` as in BERT; otherwise the region projection has PyTorch's default."""
    fields = {"vocab_size": 2000, "initializer_range": 0.05, "embedding_init_std": 0.4}
    fields |= {"visual_size": 40, "feature_dim": 600}
    model = make_model(**fields).requires_grad_(False)
    assert model.layers[0].intermediate.dense.weight.std() == pytest.approx(0.05, rel=0.1)
    official = model.embeddings
    assert official.word_embeddings.weight.std() == pytest.approx(0.4, rel=0.05)
    assert official.norm.weight.unique().tolist() == [1]
    assert make_model(visual_layer_norm=False).embeddings.text_visual.norm.weight == 0.5
    bound = (VL_BERT["geometry_dim"] + 600) ** -0.5  # PyTorch's default for a Linear
    assert official.region_projection.weight.abs().max() == pytest.approx(bound, rel=0.01)
    assert official.region_projection.bias.abs().sum() > 0
    normal = make_model(projection_init="normal", **fields).requires_grad_(False).embeddings
    assert normal.region_projection.weight.std() == pytest.approx(0.05, rel=0.05)
    assert normal.region_projection.weight.abs().max() > 0.15  # a normal distribution has tails
    assert normal.region_projection.bias.abs().sum() == 0
    for part in (normal.text_visual, normal.region_visual):
        assert part.projection.weight.std() == pytest.approx(0.05, rel=0.1)
        assert part.norm.weight.unique().tolist() == [0.5]


def test_pre_ln_learns_to_find_the_named_region():
    """Word w means the region whose feature is w's one-hot vector: learned from scratch in a second."""
    names, texts_per_step = 6, 32
    model = make_model(
        norm_first=True,
        embedding_init_std=0.5,
        visual_scale_object_init=1.0,
        feature_dim=names,
        image_feature_on_words=False,
    ).train()
    head = nn.Linear(model.hidden_size, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3, betas=(0.9, 0.98))
    texts, regions = make_inputs(lengths=(3,) * texts_per_step, counts=(4,) * texts_per_step)
    correct = []
    for _ in range(200):
        objects = torch.rand(texts_per_step, names).argsort(dim=1)[:, :4]
        regions.features = nn.functional.one_hot(objects, names).float()
        target = torch.randint(4, (texts_per_step,))
        texts.input_ids[:, 1] = 1 + objects.gather(1, target[:, None])[:, 0]
        logits = head(model(texts, regions).regions).squeeze(-1)
        loss = nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct.append((logits.argmax(dim=1) == target).float().mean())
    assert torch.stack(correct[:10]).mean() < 0.5
    assert torch.stack(correct[-20:]).mean() > 0.85


# Differences between paper and official code


@pytest.mark.parametrize("word", ["learned", "img"])
def test_masked_regions_have_a_word_of_their_own_only_in_the_official_code(word):
    model = make_model(region_word=word, masked_region_embedding=word == "learned")
    texts, regions = make_inputs()
    masked = dataclasses.replace(regions, is_masked=regions.attention_mask.clone())
    differs = changed(model(texts, masked).regions, model(texts, regions).regions)
    assert differs.any() == (word == "learned")
    with torch.no_grad():
        before = model(texts, masked).regions
        model.embeddings.region_word_embedding.weight += torch.randn(1, VL_BERT["hidden_size"])
        moved = changed(model(texts, masked).regions, before)
    # [IMG] takes the place of masked regions too
    assert torch.equal(moved, regions.attention_mask) == (word == "img")


def test_the_whole_image_is_no_region_of_the_sequence():
    """Without its part on words the model computes what it does without any whole image."""
    model = make_model(image_feature_on_words=False, whole_image_in_sequence=False)
    without = make_model(image_feature_on_words=False, uses_whole_image=False)
    assert (model.uses_whole_image, model.whole_image_is_region) == (True, False)
    assert not without.whole_image_is_region and make_model().whole_image_is_region
    texts, regions = make_inputs(counts=(2, 4, 1))
    rest = TextRegions(*(getattr(regions, field.name)[:, 1:] for field in dataclasses.fields(regions)))
    with_whole_image = dataclasses.replace(regions, row=regions.row - regions.attention_mask.long())  # row 0 is it
    output, expected = model(texts, with_whole_image), without(texts, rest)
    torch.testing.assert_close(output.text, expected.text, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.regions[:, 1:], expected.regions, rtol=1e-4, atol=1e-5)
    assert output.regions[:, 0].abs().sum() == 0
    assert not torch.allclose(make_model(image_feature_on_words=False)(texts, regions).text, output.text, atol=1e-3)


# Two images per text


VARIANTS = {
    "official": {},
    "whole image not in the sequence": {"whole_image_in_sequence": False},
    "relative geometry": {"norm_first": True, "relative_geometry": True, "relative_geometry_size": 16},
    "visual part on [END]": {"visual_part_on_end": True, "text_only_embedding": True},
    "no whole image": {"image_feature_on_words": False, "uses_whole_image": False},
    "pooler": {"with_pooler": True},
}


def make_slots(**changes) -> VLBertModel:
    model = make_model(**{"max_images": 2} | changes)
    if model.relative_geometry is not None:
        learn_geometry(model)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_swapped_images_give_another_result_and_a_text_does_not_depend_on_its_batch(variant):
    """Swapped ones already at the start, where the vectors of the slots are zero: each has a position of its own."""
    changes = VARIANTS[variant]
    whole_image = changes.get("uses_whole_image", True)
    model = make_slots(**changes)
    slots = model.embeddings.image_slot_embeddings.weight
    assert not slots.any()
    output = model(one_text(2), regions_of_images((0, 1), (1, 0), whole_image=whole_image))
    assert changed(output.text[0], output.text[1]).all()
    assert output.summary is None or changed(output.summary[0], output.summary[1])
    nn.init.normal_(slots)
    image_index = ((0, 1), (1, -1), (-1, -1), (1, 0))
    together = model(one_text(4), regions_of_images(*image_index, whole_image=whole_image))
    for row, images in enumerate(image_index):
        alone = model(one_text(), regions_of_images(images, whole_image=whole_image))
        torch.testing.assert_close(together.text[row], alone.text[0], rtol=1e-4, atol=1e-5)
        count = alone.regions.shape[1]
        torch.testing.assert_close(together.regions[row, :count], alone.regions[0], rtol=1e-4, atol=1e-5)
        assert not together.regions[row, count:].any()


def test_the_vector_of_a_slot_tells_images_apart_by_itself():
    """Where all positions are alike, nothing else does."""
    model = make_slots()
    with torch.no_grad():
        positions = model.embeddings.position_embeddings.weight
        positions.copy_(positions[:1].expand_as(positions).clone())
        same = model(one_text(2), regions_of_images((0, 1), (1, 0)))
        model.embeddings.image_slot_embeddings.weight.normal_()
        other = model(one_text(2), regions_of_images((0, 1), (1, 0)))
    torch.testing.assert_close(same.text[0], same.text[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(same.regions[0, :3], same.regions[1, 4:], rtol=1e-4, atol=1e-5)
    assert changed(other.text[0], other.text[1]).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_image_is_as_if_there_were_no_slots(variant):
    changes = VARIANTS[variant]
    whole_image = changes.get("uses_whole_image", True)
    plain, slots = make_slots(**changes, max_images=1), make_slots(**changes)
    missing, unexpected = slots.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == (["embeddings.image_slot_embeddings.weight"], [])
    expected = plain(one_text(3), regions_of_images((0,), (1,), (-1,), whole_image=whole_image))
    for image_index in (((0,), (1,), (-1,)), ((0, -1), (1, -1), (-1, -1))):
        output = slots(one_text(3), regions_of_images(*image_index, whole_image=whole_image))
        for name in ("text", "regions", "summary"):
            torch.testing.assert_close(getattr(output, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_sequence", [True, False])
def test_words_carry_the_mean_of_the_whole_images(in_sequence):
    embeddings = make_slots(whole_image_in_sequence=in_sequence, text_only_embedding=True).embeddings
    regions = regions_of_images((0, 1), (1, -1), (-1, -1), (-1, 1))
    vectors = embeddings.region_vectors(regions)
    words = embeddings.word_vectors(one_text(4), vectors, regions)
    assert words.shape == (4, 1, VL_BERT["hidden_size"])
    torch.testing.assert_close(words[0, 0], (vectors[0, 0] + vectors[0, 3]) / 2)
    torch.testing.assert_close(words[1, 0], vectors[1, 0])
    torch.testing.assert_close(words[2, 0], embeddings.text_only_embedding.weight[0])
    torch.testing.assert_close(words[3, 0], vectors[3, 0])
    named = dataclasses.replace(one_text(4), region_of_token=torch.tensor([[-1, 0, 1, -1, -1]] * 4))
    words = embeddings.word_vectors(named, vectors, regions)
    torch.testing.assert_close(words[0, [0, 3]], ((vectors[0, 0] + vectors[0, 3]) / 2).expand(2, -1))
    torch.testing.assert_close(words[0, [1, 2]], vectors[0, [1, 2]])  # regions of the first image


def test_positions_and_segments_of_two_images():
    embeddings = make_slots().embeddings
    regions = regions_of_images((0, 1), (1, -1))
    positions = embeddings.position_ids(one_text(2).attention_mask, regions.image_slot)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 5, 5, 6, 6, 6, 6, 7], [0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 6]]
