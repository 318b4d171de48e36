"""Tests of all encoders: saving, padding, gradients, attention maps, abilities and relative geometry."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoModel
from transformers.models.bert.modeling_bert import BertIntermediate

from detector.errors import UserError
from e2e_vl.encoders.base import Encoder, NoEncoder, PretrainedNoEncoderConfig
from e2e_vl.encoders.layers import same_image_mask
from e2e_vl.structures import Ability, AttentionBlock
from tests.encoders.small import (
    make_inputs,
    make_lxmert,
    make_visual_bert,
    make_vl_bert,
    name_regions,
    one_text,
    regions_of_images,
    select,
)
from tests.regions import learn_geometry
from tests.weights.starts import same

VARIANTS = {
    "vl_bert": (make_vl_bert, {}),
    "vl_bert zero scale": (make_vl_bert, {"visual_scale_text_init": 0.0, "visual_scale_object_init": 0.0}),
    "vl_bert scalar factor": (make_vl_bert, {"visual_layer_norm": False, "visual_size": 20}),
    "vl_bert pre-LN": (make_vl_bert, {"norm_first": True, "embedding_init_std": 0.5}),
    "vl_bert no image on words": (make_vl_bert, {"image_feature_on_words": False, "uses_whole_image": False}),
    "vl_bert paper": (
        make_vl_bert,
        {"geometry": "corners", "visual_part_on_end": True, "region_word": "img", "projection_init": "normal"}
        | {"whole_image_in_sequence": False, "text_only_embedding": True},
    ),
    "vl_bert pooler": (make_vl_bert, {"with_pooler": True, "text_only_embedding": True}),
    "vl_bert two images": (make_vl_bert, {"max_images": 2}),
    "visual_bert": (make_visual_bert, {}),
    "visual_bert late fusion": (make_visual_bert, {"bypass_transformer": True}),
    "visual_bert box numbers": (make_visual_bert, {"with_box_coordinates": True}),
    "visual_bert paper": (
        make_visual_bert,
        {"region_position": "paper", "project_equal_sizes": False, "train_pooler": True},
    ),
    "visual_bert no projection": (
        make_visual_bert,
        {"project_equal_sizes": False, "hidden_size": 12, "num_attention_heads": 3},
    ),
    "lxmert": (make_lxmert, {}),
    "lxmert paper": (make_lxmert, {"cross_attention": "separate", "with_segments": False, "pooling": "state"}),
    "lxmert two images": (make_lxmert, {"max_images": 2}),
    "lxmert masked features": (make_lxmert, {"masked_region_feature": True}),
}
OF_PAIRS = {
    "vl_bert": {"max_images": 2, "image_feature_on_words": False, "uses_whole_image": False},
    "visual_bert": {},
    "lxmert": {"max_images": 2},
}
LAYERED = ("vl_bert", "vl_bert pre-LN", "visual_bert", "visual_bert late fusion", "lxmert")


def make(variant: str, **changes) -> Encoder:
    maker, own = VARIANTS[variant]
    return maker(**own, **changes)


def inputs_of(encoder: Encoder) -> tuple:
    """Three texts, the last without a region; where words may name regions, some do."""
    texts, regions = make_inputs()
    is_able = encoder.lacks(Ability.NAMED_REGIONS) is None
    return (name_regions(texts, [[-1, 0, 0], [2, -1], [-1]]) if is_able else texts), regions


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_load_give_the_same_model(tmp_path, variant):
    model = make(variant)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and (tmp_path / "model.safetensors").exists()
    assert all(getattr(loaded.config, name) == value for name, value in VARIANTS[variant][1].items())
    assert same(loaded, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_does_not_depend_on_its_batch(variant):
    """Padding changes nothing, and its outputs are zero."""
    model = make(variant)
    texts, regions = inputs_of(model)
    together = model(texts, regions, output_attentions=True)
    assert not together.text[~texts.attention_mask].any() and not together.regions[~regions.attention_mask].any()
    assert all(maps.isfinite().all() for maps in together.attentions)
    for row in range(len(texts)):
        one, own = select(texts, regions, row)
        if texts.region_of_token is not None:
            one.region_of_token = texts.region_of_token[row : row + 1, : one.input_ids.shape[1]]
        alone = model(one, own, output_attentions=True)
        length, count = int(texts.attention_mask[row].sum()), int(regions.attention_mask[row].sum())
        torch.testing.assert_close(together.text[row, :length], alone.text[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.regions[row, :count], alone.regions[0, :count], rtol=1e-4, atol=1e-5)
        if together.summary is not None:
            torch.testing.assert_close(together.summary[row], alone.summary[0], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(together.attentions, alone.attentions, strict=True):
            blocks = ours[row, :, :length, :length], theirs[0, :, :length, :length]
            torch.testing.assert_close(*blocks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_trained_parameter_and_every_real_region_gets_a_gradient(variant):
    """Data-parallel training waits for the gradient of every parameter, in every batch."""
    model = make(variant).train()
    texts, regions = inputs_of(model)
    regions.features.requires_grad_()
    output = model(texts, regions)
    loss = output.text.pow(3).sum() + output.regions.pow(3).sum()
    (loss if output.summary is None else loss + output.summary.pow(3).sum()).backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    gradients = regions.features.grad.abs().sum(dim=-1)
    if variant == "vl_bert zero scale":  # as the official code starts: the visual part is exactly zero at first
        assert not gradients.any() and not model.embeddings.region_projection.weight.grad.any()
        assert model.embeddings.region_visual.norm.weight.grad.any()
    else:
        assert (gradients[regions.attention_mask] > 0).all() and not gradients[~regions.attention_mask].any()


@pytest.mark.parametrize("variant", LAYERED)
def test_a_batch_of_texts_only(variant):
    output = make(variant)(*make_inputs(counts=(0, 0, 0)))
    assert output.regions.shape == (3, 1, 32) and not output.regions.any()
    assert output.text.isfinite().all() and output.text.any()
    with pytest.raises(UserError, match=r"6 wordpieces .* max_position_embeddings = 5"):
        make(variant, max_position_embeddings=5)(*make_inputs())


@pytest.mark.parametrize("variant", ["vl_bert", "visual_bert box numbers"])
def test_bfloat16_autocast_stays_close(variant):
    model = make(variant, relative_geometry=True, initializer_range=0.1)
    inputs = inputs_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(*inputs).regions
    torch.testing.assert_close(half.float(), model(*inputs).regions, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("variant", LAYERED)
@pytest.mark.filterwarnings("error")
def test_recomputed_activations_change_nothing(variant):
    model = make(variant).train()
    texts, regions = make_inputs()
    trained = [one for one in model.parameters() if one.requires_grad]

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(texts, regions).text.square().sum(), trained, allow_unused=True)

    before, calls = gradients(), []
    inner = next(one for one in joint_layers(model, variant)[0].modules() if isinstance(one, BertIntermediate))
    inner.register_forward_hook(lambda *_: calls.append(1))
    model.recompute_activations()
    for one, other in zip(before, gradients(), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2  # forward, and again in the backward pass


@pytest.mark.parametrize(
    ("maker", "changes"),
    [
        (make_vl_bert, {"geometry": "center"}),
        (make_vl_bert, {"uses_whole_image": False}),
        (make_vl_bert, {"region_word": "img", "masked_region_embedding": True}),
        (make_vl_bert, {"visual_part_on_end": True, "image_feature_on_words": False}),
        (make_lxmert, {"x_layers": -1}),
    ],
)
def test_a_bad_config_names_its_field(maker, changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        maker(**changes)


# Attention maps


GRAPHS = {
    "one stack, with an end": (make_vl_bert, {"joint": 2}),
    "one stack": (make_visual_bert, {"joint": 2}),
    "late fusion": (lambda: make_visual_bert(bypass_transformer=True), {"language": 2, "joint": 1}),
    "three stacks": (make_lxmert, {"language": 4, "vision": 3, "cross": 2}),
    "three stacks, two images": (lambda: make_lxmert(max_images=2), {"language": 4, "vision": 3, "cross": 2}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_blocks_of_each_graph_are_those_that_are_not_zero(name):
    make, layers = GRAPHS[name]
    encoder: Encoder = make()
    texts, regions = make_inputs()
    maps = encoder(texts, regions, output_attentions=True).attentions
    graphs = encoder.attention_graphs
    assert {name: len(graph.steps) for name, graph in graphs.items()} == layers
    length, count = texts.attention_mask.shape[1], regions.attention_mask.shape[1]
    words, places = slice(0, length), slice(length, length + count)
    blocks = {
        AttentionBlock.WORDS_TO_WORDS: (words, words),
        AttentionBlock.WORDS_TO_REGIONS: (words, places),
        AttentionBlock.REGIONS_TO_WORDS: (places, words),
        AttentionBlock.REGIONS_TO_REGIONS: (places, places),
    }
    used = {(step, block) for graph in graphs.values() for step in graph.steps for block in graph.blocks}
    assert len(used) == sum(len(graph.steps) * len(graph.blocks) for graph in graphs.values()), "each in one graph only"
    steps = {step for step, _ in used}
    for step in steps:
        for block, (queries, keys) in blocks.items():
            assert maps[step][1, :, queries, keys].any() == ((step, block) in used), (step, block)
    assert "two images" in name or steps == set(range(len(maps)))


@pytest.mark.parametrize("geometry", [False, True])
@pytest.mark.parametrize("name", LAYERED)
def test_attention_maps_sum_to_one_over_the_slots(name, geometry):
    model, (texts, regions) = make(name, relative_geometry=geometry), make_inputs()
    if geometry:
        learn_geometry(model)
    plain, output = model(texts, regions), model(texts, regions, output_attentions=True)
    assert plain.attentions is None
    torch.testing.assert_close(plain.text, output.text, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.regions, output.regions, rtol=1e-4, atol=1e-5)
    end = torch.ones(len(texts), int(name.startswith("vl_bert")), dtype=torch.bool)
    slots = torch.cat([texts.attention_mask, regions.attention_mask, end], dim=1)
    for maps in output.attentions:
        sums = maps.sum(dim=-1)
        if name in ("lxmert", "visual_bert late fusion"):  # of which a map is a part
            assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()
        else:
            torch.testing.assert_close(sums, slots[:, None].expand(-1, 4, -1).float())
        assert not maps.transpose(1, 3)[~slots].any()


# Intermediate states and relative geometry


def joint_layers(encoder: Encoder, name: str) -> list[nn.Module]:
    if name == "lxmert":
        return list(encoder.encoder.x_layers)
    if name == "visual_bert late fusion":
        return [encoder.additional_layer]
    return list(encoder.layers if name.startswith("vl_bert") else encoder.encoder["layer"])


@pytest.mark.parametrize("name", LAYERED)
def test_inner_states_are_those_after_so_many_layers(name):
    encoder, inputs = make(name), make_inputs()
    layers = joint_layers(encoder, name)
    assert encoder.num_joint_layers == len(layers)
    plain = encoder(*inputs)
    assert plain.intermediate == {}
    inner = encoder(*inputs, intermediate_layers=(len(layers) - 1, len(layers))).intermediate
    assert list(inner) == [len(layers) - 1, len(layers)]
    first, last = inner.values()
    torch.testing.assert_close(last.text, plain.text)
    torch.testing.assert_close(last.regions, plain.regions)
    assert (first.text - plain.text).abs().max() > 1e-3 and (first.regions - plain.regions).abs().max() > 1e-3
    texts, regions = inputs
    assert not first.text[~texts.attention_mask].any() and not first.regions[~regions.attention_mask].any()
    for parameter in layers[-1].parameters():  # what comes later does not matter
        nn.init.normal_(parameter)
    again = encoder(*inputs, intermediate_layers=[len(layers) - 1])
    [states] = again.intermediate.values()
    assert torch.equal(states.text, first.text) and torch.equal(states.regions, first.regions)
    assert not torch.allclose(again.text, plain.text, atol=1e-2)


@pytest.mark.parametrize("name", LAYERED)
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
    for row in range(len(texts)):
        alone = paired(*select(texts, regions, row))
        count = int(regions.attention_mask[row].sum())
        torch.testing.assert_close(after.regions[row, :count], alone.regions[0, :count], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_geometry_of_one_image_says_nothing_about_the_other(name):
    """Moving all boxes of the second image together changes no place relative to the others of that image."""
    paired = make(name, relative_geometry=True, **OF_PAIRS[name])
    learn_geometry(paired)
    regions = regions_of_images((0, 1), whole_image=False)
    moved = dataclasses.replace(regions, boxes=regions.boxes + 3.0 * (regions.image_slot == 1)[..., None])
    biases = (paired.relative_geometry(one.boxes, one.image_sizes, same_image_mask(one)) for one in (regions, moved))
    for one, other in zip(*biases, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert paired(one_text(), regions).regions.isfinite().all()


# What a proposer says of regions


@pytest.mark.parametrize("name", LAYERED)
def test_scores_of_proposals_start_as_nothing_and_are_read_when_learned(name):
    plain, scored = make(name), make(name, proposal_scores=True)
    missing, unexpected = scored.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["proposal_embedding.weight"] and not unexpected
    assert not plain.reads_proposals and scored.reads_proposals
    texts, regions = make_inputs()
    numbers = torch.rand(*regions.row.shape, 4, generator=torch.Generator().manual_seed(2))
    proposed = dataclasses.replace(regions, proposals=numbers * regions.attention_mask[..., None])
    before = plain(texts, regions)
    for inputs in (regions, proposed):
        output = scored(texts, inputs)
        assert torch.equal(output.text, before.text) and torch.equal(output.regions, before.regions)
    nn.init.normal_(scored.proposal_embedding.weight)
    if "zero scale" not in name:  # its visual part starts at zero
        assert not torch.allclose(scored(texts, proposed).regions, before.regions, atol=1e-2)
    unknown = scored(texts, regions)
    assert torch.equal(unknown.text, before.text) and torch.equal(unknown.regions, before.regions)
    torch.testing.assert_close(scored(texts, proposed).text[2], before.text[2])  # it has no region


# Abilities


ALWAYS = {
    "vl_bert": {Ability.SUMMARY_OF_QUESTION, Ability.WORD_EMBEDDINGS, Ability.INTERMEDIATE_STATES},
    "visual_bert": set(Ability) - {Ability.MASKED_REGIONS, Ability.MASKED_FEATURES, Ability.IMAGE_PAIRS},
    "lxmert": set(Ability)
    - {Ability.MASKED_REGIONS, Ability.MASKED_FEATURES, Ability.NAMED_REGIONS, Ability.IMAGE_PAIRS},
}
LEAST = {
    "vl_bert": {"image_feature_on_words": False, "uses_whole_image": False},
    "visual_bert": {"region_types": [1, 1]},
    "lxmert": {},
}


def abilities(encoder: Encoder) -> set[Ability]:
    return {ability for ability in Ability if encoder.lacks(ability) is None}


@pytest.mark.parametrize(
    ("name", "setting", "changes", "gained"),
    [
        ("vl_bert", "with_pooler to true", {}, {Ability.SUMMARY_OF_SINGLE, Ability.SUMMARY_OF_PAIR}),
        ("vl_bert", "masked_region_embedding to true", {}, {Ability.MASKED_REGIONS}),
        ("vl_bert", "region_word to img", {}, {Ability.MASKED_REGIONS}),
        ("vl_bert", "masked_region_feature to true", {}, {Ability.MASKED_FEATURES}),
        ("vl_bert", "image_feature_on_words to true", {"uses_whole_image": True}, {Ability.NAMED_REGIONS}),
        ("vl_bert", "max_images to 2", {}, {Ability.IMAGE_PAIRS}),
        ("visual_bert", "region_types to [0, 1]", {}, {Ability.IMAGE_PAIRS}),
        ("lxmert", "masked_region_feature to true", {}, {Ability.MASKED_REGIONS, Ability.MASKED_FEATURES}),
        ("lxmert", "named_regions to true", {}, {Ability.NAMED_REGIONS}),
        ("lxmert", "max_images to 2", {}, {Ability.IMAGE_PAIRS}),
    ],
)
def test_the_setting_that_a_message_names_gives_the_ability(name, setting, changes, gained):
    unable = make(name, **LEAST[name])
    assert abilities(unable) == ALWAYS[name]
    for ability in gained:
        with pytest.raises(UserError, match=re.escape(setting)):
            unable.require(ability, "The task")
    field, _, value = setting.partition(" to ")
    able = make(name, **LEAST[name] | changes | {field: yaml.safe_load(value)})
    assert abilities(able) == ALWAYS[name] | gained


# Summary


@pytest.mark.parametrize("make", [make_vl_bert, partial(make_vl_bert, with_pooler=True), make_visual_bert])
def test_the_summary_is_the_state_at_a_position_or_else_the_pooled_one(make):
    model, (texts, regions) = make(), make_inputs()
    output = model(texts, regions)
    pooled = output.summary
    if model.pooler is None:
        assert pooled is None
    else:
        torch.testing.assert_close(pooled, model.pooler(output.text))
    texts.summary = torch.tensor([3, 2, 0])
    output = model(texts, regions)
    torch.testing.assert_close(output.summary, output.text[torch.arange(3), texts.summary])
    assert pooled is None or not torch.allclose(output.summary, pooled, atol=1e-2)


# No encoder


def test_without_an_encoder_regions_go_through_unchanged_with_their_gradient():
    texts, regions = make_inputs()
    regions.features.requires_grad_()
    encoder = NoEncoder(PretrainedNoEncoderConfig(vocab_size=5, feature_dim=12))
    encoded = encoder(texts, regions)
    assert torch.equal(encoded.regions, regions.features)
    assert torch.equal(encoded.text, torch.zeros(3, 6, 12))
    encoded.regions.sum().backward()
    assert torch.equal(regions.features.grad, torch.ones_like(regions.features))
    assert not abilities(encoder) and list(encoder.parameters()) == []
