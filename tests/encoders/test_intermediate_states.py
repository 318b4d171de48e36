"""What all encoders offer beside their output: states between the layers, and a bias from relative geometry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.layers import pairs_of_one_image
from tests.encoders import test_lxmert, test_visual_bert, test_vl_bert
from tests.encoders.test_vl_bert import make_inputs, select
from tests.encoders.test_vl_bert_image_slots import look, one_text
from tests.regions import learn_geometry

MAKERS = {
    "vl_bert": (test_vl_bert.make_model, {}),
    "vl_bert_pre_ln": (test_vl_bert.make_model, {"norm_first": True}),
    "visual_bert": (test_visual_bert.make_encoder, {}),
    "visual_bert_late_fusion": (test_visual_bert.make_encoder, {"bypass_transformer": True}),
    "lxmert": (test_lxmert.make_model, {}),
}
OF_PAIRS = {
    "vl_bert": {"max_images": 2, "image_feature_on_words": False, "uses_whole_image": False},
    "visual_bert": {},
    "lxmert": {"max_images": 2},
}


def make(name: str, **changes) -> Encoder:
    maker, own = MAKERS[name]
    return maker(**own, **changes)


def joint_layers(encoder: Encoder, name: str) -> list[nn.Module]:
    if name == "lxmert":
        return list(encoder.encoder.x_layers)
    if name == "visual_bert_late_fusion":
        return [encoder.additional_layer]
    return list(encoder.layers if name.startswith("vl_bert") else encoder.encoder["layer"])


@pytest.mark.parametrize("name", MAKERS)
def test_inner_states_are_those_after_so_many_layers(name):
    encoder, inputs = make(name), make_inputs()
    layers = joint_layers(encoder, name)
    assert encoder.num_joint_layers == len(layers)
    plain = encoder(*inputs)
    assert plain.intermediate is None
    last = encoder(*inputs, intermediate_layer=len(layers))
    torch.testing.assert_close(last.intermediate.text, plain.text)
    torch.testing.assert_close(last.intermediate.regions, plain.regions)
    first = encoder(*inputs, intermediate_layer=len(layers) - 1).intermediate
    assert (first.text - plain.text).abs().max() > 1e-3 and (first.regions - plain.regions).abs().max() > 1e-3
    texts, regions = inputs
    assert not first.text[~texts.attention_mask].any() and not first.regions[~regions.attention_mask].any()
    for parameter in layers[-1].parameters():  # what comes later does not matter
        nn.init.normal_(parameter)
    changed = encoder(*inputs, intermediate_layer=len(layers) - 1)
    assert torch.equal(changed.intermediate.text, first.text) and torch.equal(
        changed.intermediate.regions, first.regions
    )
    assert not torch.allclose(changed.text, plain.text, atol=1e-2)


@pytest.mark.parametrize("name", MAKERS)
def test_relative_geometry_starts_as_nothing_and_reads_places_when_learned(name):
    plain, paired = make(name), make(name, relative_geometry=True)
    missing, unexpected = paired.load_state_dict(plain.state_dict(), strict=False)
    assert {key.split(".")[0] for key in missing} == {"relative_geometry"} and not unexpected
    texts, regions = make_inputs()
    before = paired(texts, regions)
    torch.testing.assert_close(before.regions, plain(texts, regions).regions, rtol=1e-4, atol=1e-5)
    learn_geometry(paired)
    after = paired(texts, regions)
    assert not torch.allclose(after.regions, before.regions, atol=1e-2)
    torch.testing.assert_close(after.text[2], before.text[2], rtol=1e-4, atol=1e-5)  # it has no region
    assert after.text.isfinite().all() and after.regions.isfinite().all()
    for row in range(len(texts)):
        alone = paired(*select(texts, regions, row))
        count = int(regions.attention_mask[row].sum())
        torch.testing.assert_close(after.regions[row, :count], alone.regions[0, :count], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_attention_maps_with_relative_geometry_add_up_to_one(name):
    paired = make(name, relative_geometry=True)
    learn_geometry(paired)
    output = paired(*make_inputs(), output_attentions=True)
    for found in output.attentions:
        sums = found.sum(dim=-1)
        assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()
    # the same states as without maps
    torch.testing.assert_close(output.regions, paired(*make_inputs()).regions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_geometry_of_one_image_says_nothing_about_the_other(name):
    """Moving all boxes of the second image together changes no place relative to the others of that image."""
    paired = make(name, relative_geometry=True, **OF_PAIRS[name])
    learn_geometry(paired)
    regions = look((0, 1), whole_image=False)
    moved = dataclasses.replace(regions, boxes=regions.boxes + 3.0 * (regions.image_slot == 1)[..., None])
    first, second = (
        paired.relative_geometry(one.boxes, one.image_sizes, pairs_of_one_image(one)) for one in (regions, moved)
    )
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert paired(one_text(), regions).regions.isfinite().all()


def test_gradients_reach_the_geometry_of_every_layer():
    paired = make("lxmert", relative_geometry=True)
    learn_geometry(paired)
    paired(*make_inputs()).regions.square().sum().backward()
    assert all(one.weight.grad.abs().max() > 0 for one in paired.relative_geometry.hidden)
