"""LXMERT beyond parity: texts without regions, two images, options of the paper, named regions, initialization."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.encoders.small import changed, make_inputs, one_text, regions_of_images
from tests.encoders.small import make_lxmert as make_model

TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


def test_a_text_without_regions_reads_zeros():
    """As if the cross attention of its words were only a bias: no NaN, and no influence of the padding's content."""
    model, (texts, regions) = make_model(), make_inputs()
    other = dataclasses.replace(regions, features=regions.features + 3 * ~regions.attention_mask[..., None])
    one, two = model(texts, regions), model(texts, other)
    torch.testing.assert_close(one.text, two.text)
    torch.testing.assert_close(one.summary, two.summary)
    one.summary.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_two_images_are_two_passes():
    pair, single = make_model(max_images=2), make_model()
    single.load_state_dict(pair.state_dict())
    both = pair(one_text(), regions_of_images((0, 1), whole_image=False), output_attentions=True)
    passes = [
        single(one_text(), regions_of_images((image,), whole_image=False), output_attentions=True) for image in (0, 1)
    ]
    torch.testing.assert_close(both.summary, torch.cat([one.summary for one in passes], dim=1))
    torch.testing.assert_close(both.regions, torch.cat([one.regions for one in passes], dim=1))
    torch.testing.assert_close(both.text, sum(one.text for one in passes) / 2)
    length = one_text().attention_mask.shape[1]
    words, (first, second) = torch.arange(length), (torch.arange(3) + length, torch.arange(4) + length + 3)
    cross = len(both.attentions) - 2 * 2 * 2
    for layer in range(2):
        for image, places in enumerate((torch.cat([words, first]), torch.cat([words, second]))):
            for step in range(2):
                found = both.attentions[cross + 4 * layer + 2 * image + step]
                alone = passes[image].attentions[cross + 2 * layer + step]
                torch.testing.assert_close(found[:, :, places][..., places], alone)
                torch.testing.assert_close(found.sum(), alone.sum())


def test_images_may_be_missing():
    model = make_model(max_images=2)
    output = model(one_text(3), regions_of_images((0, 1), (1, -1), (-1, -1), whole_image=False))
    alone = model(one_text(), regions_of_images((1, -1), whole_image=False))
    torch.testing.assert_close(output.summary[1], alone.summary[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.summary[1, 32:], output.summary[2, :32], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.summary[2, :32], output.summary[2, 32:], rtol=1e-4, atol=1e-5)
    assert output.text.isfinite().all()


def test_padding_rows_start_like_others_and_get_no_gradient_through_the_lookup():
    model, (texts, regions) = make_model(), make_inputs()
    ids = texts.input_ids.clone()
    ids[0, 1] = 0  # [PAD] as a word
    output = model(dataclasses.replace(texts, input_ids=ids), regions)
    output.text.pow(3).sum().backward()
    for name in TABLES:
        table = model.embeddings.get_submodule(name).weight
        assert 0.1 < table[0].std() < 0.3
        assert not table.grad[0].any()
        assert table.grad[1].any()
    output = model(texts, regions)
    (output.word_embeddings[0] * output.text[0, 0]).sum().backward()  # as a tied output layer reads it
    assert model.embeddings.word_embeddings.weight.grad[0].any()


def test_masked_features_are_zeros_and_masked_boxes_stay():
    texts, regions = make_inputs()
    regions.is_masked[0, 0] = True
    model = make_model(masked_region_feature=True)
    other = dataclasses.replace(regions, features=regions.features + 5 * regions.is_masked[..., None])
    torch.testing.assert_close(model(texts, regions).text, model(texts, other).text)
    zeros = dataclasses.replace(
        regions, features=regions.features * ~regions.is_masked[..., None], is_masked=regions.is_masked & False
    )
    torch.testing.assert_close(model(texts, regions).regions, model(texts, zeros).regions)
    moved = dataclasses.replace(regions, boxes=regions.boxes.flip(-1))
    assert changed(model(texts, regions).regions, model(texts, moved).regions)[0, 0]
    plain = make_model()
    assert changed(plain(texts, regions).regions, plain(texts, other).regions)[0, 0]


def test_the_options_of_the_paper():
    texts, regions = make_inputs()
    shared, separate = make_model(), make_model(cross_attention="separate")
    extra = {name for name in separate.state_dict() if ".text_attention." in name}
    assert set(separate.state_dict()) - extra == set(shared.state_dict())
    state = shared.state_dict()
    separate.load_state_dict(state | {name: state[name.replace("text_", "visual_")] for name in extra})
    torch.testing.assert_close(shared(texts, regions).regions, separate(texts, regions).regions)
    with torch.no_grad():
        separate.encoder.x_layers[0].text_attention.att.value.weight.mul_(2)
    before, after = shared(texts, regions), separate(texts, regions)
    assert changed(before.regions, after.regions)[regions.attention_mask].all()

    plain = make_model(with_segments=False, pooled="state")
    output = plain(texts, regions)
    torch.testing.assert_close(output.summary, output.text[:, 0])
    other = dataclasses.replace(texts, token_type_ids=1 - texts.token_type_ids)
    torch.testing.assert_close(plain(other, regions).text, output.text)
    assert not {name for name in plain.state_dict() if name.startswith(("pooler", "embeddings.token_type"))}


@pytest.mark.parametrize("slots", [1, 2])
def test_a_named_region_carries_the_mean_position_of_its_words(slots):
    model, (texts, regions) = make_model(named_regions=True, max_images=slots), make_inputs()
    seen = []
    model.encoder.r_layers[0].register_forward_pre_hook(lambda _layer, given: seen.append(given[0].detach()))
    region_of_token = torch.full_like(texts.input_ids, -1)
    region_of_token[0, 1] = region_of_token[0, 3] = 1  # row 1 by two words, row 0 by one
    region_of_token[0, 2] = 0
    with torch.no_grad():
        plain = model(texts, regions)
        named = model(dataclasses.replace(texts, region_of_token=region_of_token), regions)
    places = model.embeddings.position_embeddings.weight.detach()
    added = seen[1] - seen[0]
    expected = torch.stack([places[2], (places[1] + places[3]) / 2])
    torch.testing.assert_close(added[0, :2], expected, rtol=1e-4, atol=1e-5)  # the first text's first image
    assert not added[0, 2:].any() and not added[slots:].any()  # (regions of the first text's second pass are padding)
    assert (named.text[0] - plain.text[0]).abs().max() > 1e-3
    torch.testing.assert_close(named.text[1:], plain.text[1:])
    official = make_model(max_images=slots)
    torch.testing.assert_close(
        official(dataclasses.replace(texts, region_of_token=region_of_token), regions).text, plain.text
    )
