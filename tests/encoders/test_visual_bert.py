"""VisualBERT's behaviour beyond the recorded numbers: saving, padding, fusion, variants, transformers' own model."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, VisualBertConfig, VisualBertModel

import e2e_vl
from e2e_vl.encoders.visual_bert import VisualBertEncoder, VisualBertEncoderConfig, box_numbers
from e2e_vl.structures import Ability, TextBatch
from e2e_vl.text import CLS, MASK, SEP, Template
from tests.encoders.test_vl_bert import changed, make_inputs, select
from tests.encoders.test_vl_bert_image_slots import look, one_text

assert e2e_vl.__version__  # its import makes the encoders known to `AutoModel`

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "feature_dim": 12,
    "initializer_range": 0.3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VARIANTS = {
    "official": {},
    "late_fusion": {"bypass_transformer": True},
    "box_numbers": {"with_box_numbers": True},
    "paper": {"region_position": "paper", "project_equal_sizes": False, "train_pooler": True},
    "paper_without_projection": {"project_equal_sizes": False, "hidden_size": 12, "num_attention_heads": 3},
    "types_of_transformers": {"region_types": [1]},
    "own_start": {"special_visual_initialize": False},
}
POSITIONS, VISUAL_POSITIONS = "position_embeddings", "visual_position_embeddings"


def make_encoder(seed: int = 0, **changes) -> VisualBertEncoder:
    torch.manual_seed(seed)
    return VisualBertEncoder(VisualBertEncoderConfig(**{**SMALL, **changes})).eval()


def name_regions(texts: TextBatch, rows: list[list[int]]) -> TextBatch:
    """The first words of each text name these regions, -1 = none; the other words name none."""
    named = torch.full_like(texts.input_ids, -1)
    for text, wanted in enumerate(rows):
        named[text, : len(wanted)] = torch.tensor(wanted)
    return dataclasses.replace(texts, region_of_token=named)


# As every encoder


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_load_give_the_same_model(tmp_path, variant):
    model = make_encoder(**VARIANTS[variant])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, VisualBertEncoder)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "visual_bert_encoder"
    for name, value in VARIANTS[variant].items():
        assert getattr(loaded.config, name) == value
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert {one.requires_grad for one in loaded.pooler.parameters()} == {loaded.config.train_pooler}
    torch.testing.assert_close(loaded(*make_inputs()).regions, model(*make_inputs()).regions, rtol=1e-5, atol=1e-6)


def test_transformers_keeps_its_own_visual_bert():
    assert isinstance(AutoConfig.for_model("visual_bert"), VisualBertConfig)
    assert isinstance(AutoConfig.for_model("visual_bert_encoder"), VisualBertEncoderConfig)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_does_not_depend_on_its_batch(variant):
    model = make_encoder(**VARIANTS[variant])
    texts, regions = make_inputs()
    texts = name_regions(texts, [[-1, 1, 0], [2, -1], [-1]])
    together = model(texts, regions, output_attentions=True)
    assert together.text[~texts.attention_mask].abs().sum() == 0
    assert together.regions[~regions.attention_mask].abs().sum() == 0
    for row in range(len(texts)):
        one, own = select(texts, regions, row)
        one.region_of_token = texts.region_of_token[row : row + 1, : one.input_ids.shape[1]]
        alone = model(one, own, output_attentions=True)
        length, count = int(texts.attention_mask[row].sum()), int(regions.attention_mask[row].sum())
        torch.testing.assert_close(together.text[row, :length], alone.text[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.regions[row, :count], alone.regions[0, :count], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.summary[row], alone.summary[0], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(together.attentions, alone.attentions, strict=True):
            blocks = (ours[row, :, :length, :length], theirs[0, :, :length, :length])
            torch.testing.assert_close(*blocks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_trained_parameter_takes_part(variant):
    model = make_encoder(**VARIANTS[variant]).train()
    texts, regions = make_inputs()
    regions.features.requires_grad_()
    output = model(name_regions(texts, [[-1, 1, 0], [2], []]), regions)
    (output.text.pow(3).sum() + output.regions.pow(3).sum() + output.summary.pow(3).sum()).backward()
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    is_paper = model.config.region_position == "paper"
    assert unused == ([f"embeddings.{VISUAL_POSITIONS}.weight"] if is_paper else [])
    gradients = regions.features.grad.abs().sum(dim=-1)
    assert (gradients[regions.attention_mask] > 0).all()
    assert (gradients[~regions.attention_mask] == 0).all()


def test_attention_maps_cover_the_slots_and_sum_to_one():
    model = make_encoder(num_hidden_layers=3)
    texts, regions = make_inputs()
    plain, output = model(texts, regions), model(texts, regions, output_attentions=True)
    assert plain.attentions is None
    torch.testing.assert_close(plain.text, output.text, rtol=1e-5, atol=1e-6)
    slots = torch.cat([texts.attention_mask, regions.attention_mask], dim=1)
    assert len(output.attentions) == 3
    for maps in output.attentions:
        assert maps.shape == (3, 4, slots.shape[1], slots.shape[1])
        torch.testing.assert_close(maps.sum(dim=-1), slots[:, None].expand(-1, 4, -1).float())
        assert (maps.transpose(1, 3)[~slots] == 0).all()


def test_batch_of_texts_only():
    for late in (False, True):
        output = make_encoder(bypass_transformer=late)(*make_inputs(counts=(0, 0, 0)))
        assert output.regions.shape == (3, 1, 32) and not output.regions.any()
        assert output.text.isfinite().all() and output.text.abs().sum() > 0


def test_bfloat16_autocast_stays_close():
    model = make_encoder(initializer_range=0.1, with_box_numbers=True)
    texts, regions = make_inputs()
    texts = name_regions(texts, [[-1, 1, 0], [2], []])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(texts, regions).regions
    torch.testing.assert_close(half.float(), model(texts, regions).regions, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("error")
def test_recomputed_activations_change_nothing(late):
    model = make_encoder(bypass_transformer=late).train()
    texts, regions = make_inputs()
    trained = [one for one in model.parameters() if one.requires_grad]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(texts, regions).text.square().sum(), trained, allow_unused=True)

    before, calls = gradients(), []
    model.encoder["layer"][0].intermediate.register_forward_hook(lambda *_: calls.append(1))
    model.recompute_activations()
    after = gradients()
    assert len(calls) == 2  # forward, and again in the backward pass
    for one, other in zip(before, after, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-5, atol=1e-6)


# Summary and abilities


def test_the_answer_of_a_question_is_read_before_the_last_wordpiece():
    assert VisualBertEncoder.layout.question == Template((CLS, 0, MASK, SEP), (0, 0, 0, 0), summary=2)
    assert VisualBertEncoder.layout.single == Template((CLS, 0, SEP), (0, 0, 0))
    model, (texts, regions) = make_encoder(), make_inputs()
    pooled = model(texts, regions).summary
    torch.testing.assert_close(pooled, model.pooler(model(texts, regions).text))
    texts.summary = texts.attention_mask.sum(dim=1) - 2
    output = model(texts, regions)
    torch.testing.assert_close(output.summary, output.text[torch.arange(3), texts.summary])
    assert not torch.allclose(output.summary, pooled, atol=1e-2)


def test_abilities():
    able = make_encoder()
    no_way = {Ability.MASKED_REGIONS, Ability.MASKED_FEATURES}  # the official code never hides regions
    assert {ability for ability in Ability if able.lacks(ability) is not None} == no_way
    able.require(Ability.IMAGE_PAIRS, "The task x")
    message = "set encoder.config.region_types to [0, 1]."
    for types in ([0], [1, 1]):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_encoder(region_types=types).require(Ability.IMAGE_PAIRS, "The task x")
    assert (able.max_images, able.images_setting) == (2, "region_types")


def test_swapped_images_give_another_result():
    texts = one_text(2)
    for late in (False, True):
        model = make_encoder(bypass_transformer=late)
        output = model(texts, look((0, 1), (1, 0), whole_image=False))
        assert changed(output.text[0], output.text[1]).all()
        assert changed(output.summary[0], output.summary[1])


def test_one_image_has_the_first_type_and_the_second_image_the_second():
    model = make_encoder(num_hidden_layers=0)
    regions = look((0, 1), (0, -1), whole_image=False)
    before = model(one_text(2), regions).regions
    with torch.no_grad():
        model.embeddings.visual_token_type_embeddings.weight[1] += torch.arange(32.0)
    moved = changed(model(one_text(2), regions).regions, before)
    assert torch.equal(moved, regions.image_slot == 1)


def test_the_whole_image_is_one_of_the_regions_if_asked_for():
    model = make_encoder(uses_whole_image=True)
    assert model.uses_whole_image and model.whole_image_is_region
    assert not make_encoder().uses_whole_image
    output = model(one_text(), look((0,), whole_image=True))
    assert output.regions.abs().sum(dim=-1).bool().all()


# Embeddings


def test_words_that_name_a_region_move_it_and_nothing_else():
    """`region_of_token` counts candidate boxes; the whole image stands before them."""
    texts, regions = one_text(2), look((0, 1), (0, -1), whole_image=True)
    named = name_regions(texts, [[-1, 0, 1, 1], [-1]])
    for position in ("official", "paper"):
        model = make_encoder(num_hidden_layers=0, region_position=position)
        moved = changed(model(named, regions).regions, model(texts, regions).regions)
        expected = (regions.image_slot == 0) & ((regions.row == 0) | (regions.row == 1))
        expected[1] = False
        assert torch.equal(moved, expected)


@pytest.mark.parametrize(("position", "factor"), [("official", 0.5), ("paper", 1.0)])
def test_a_named_region_has_the_mean_or_the_sum_of_its_words_positions(position, factor):
    embeddings = make_encoder(region_position=position).embeddings
    texts, regions = make_inputs(lengths=(6,), counts=(3,))
    texts = name_regions(texts, [[-1, 2, -1, 2, 0]])
    vectors = embeddings.region_positions(embeddings.alignment(texts, regions))[0]
    words, shared = embeddings.position_embeddings.weight, embeddings.visual_position_embeddings.weight[0]
    shared = shared if position == "official" else torch.zeros_like(shared)
    torch.testing.assert_close(vectors[0], words[4] + shared)
    torch.testing.assert_close(vectors[1], shared)
    torch.testing.assert_close(vectors[2], (words[1] + words[3]) * factor + shared)
    torch.testing.assert_close(embeddings.region_positions(None), shared)


def test_box_numbers():
    boxes = torch.tensor([[[10.0, 5.0, 30.0, 20.0], [0.0, 0.0, 80.0, 50.0]]])
    sizes = torch.tensor([[[50.0, 80.0]] * 2])
    expected = [[[0.125, 0.1, 0.375, 0.4, 0.25, 0.3], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]]]
    torch.testing.assert_close(box_numbers(boxes, sizes), torch.tensor(expected))
    model, (texts, regions) = make_encoder(with_box_numbers=True), make_inputs()
    assert model.embeddings.visual_projection.in_features == SMALL["feature_dim"] + 6
    other = dataclasses.replace(regions, boxes=regions.boxes * 0.5)
    assert torch.equal(changed(model(texts, other).regions, model(texts, regions).regions), regions.attention_mask)
    plain = make_encoder()
    assert torch.equal(plain(texts, other).regions, plain(texts, regions).regions)


def test_equal_sizes_are_projected_unless_the_paper_is_followed():
    sizes = {"hidden_size": 12, "num_attention_heads": 3}
    assert "embeddings.visual_projection.weight" in make_encoder(**sizes).state_dict()
    assert "embeddings.visual_projection.weight" in make_encoder(project_equal_sizes=False).state_dict()
    assert "embeddings.visual_projection.weight" not in make_encoder(**sizes, project_equal_sizes=False).state_dict()


@pytest.mark.parametrize("copied", [True, False])
def test_visual_tables_start_as_copies_of_the_texts(copied):
    embeddings = make_encoder(special_visual_initialize=copied).embeddings
    for name in ("token_type", "position"):
        text, visual = (getattr(embeddings, f"{start}{name}_embeddings").weight for start in ("", "visual_"))
        assert torch.equal(text, visual) == copied
        assert text.data_ptr() != visual.data_ptr()
    assert embeddings.position_embeddings.weight.detach().std() == pytest.approx(0.3, rel=0.1)
    assert embeddings.visual_projection.weight.detach().std() == pytest.approx(0.3, rel=0.2)
    assert embeddings.visual_projection.bias.abs().sum() == 0


# Late fusion


def test_words_meet_regions_in_the_additional_layer_alone():
    model = make_encoder(bypass_transformer=True)
    texts, regions = make_inputs()
    output = model(texts, regions, output_attentions=True)
    length, reads = texts.attention_mask.shape[1], regions.attention_mask.any(dim=1)
    *first, last = output.attentions
    assert len(first) == SMALL["num_hidden_layers"]
    for maps in first:
        assert not maps[:, :, length:].any() and not maps[:, :, :, length:].any()
        torch.testing.assert_close(maps[:, :, :length].sum(-1), texts.attention_mask[:, None].expand(-1, 4, -1).float())
    slots = torch.cat([texts.attention_mask, regions.attention_mask], dim=1) & reads[:, None]
    torch.testing.assert_close(last.sum(-1), slots[:, None].expand(-1, 4, -1).float())
    assert not reads.all() and reads.any()


def test_a_text_without_regions_skips_the_additional_layer():
    model, plain = make_encoder(bypass_transformer=True), make_encoder()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all(name.startswith("additional_layer.") for name in unexpected)
    texts, regions = make_inputs(counts=(2, 4, 0))
    late, early = model(texts, regions), plain(texts, regions)
    torch.testing.assert_close(late.text[2], early.text[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(late.summary[2], early.summary[2], rtol=1e-4, atol=1e-5)
    assert changed(late.text[:2], early.text[:2])[texts.attention_mask[:2]].all()


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region_position": "mean"}, 'region_position is "mean"; it must be "official" or "paper"'),
        ({"hidden_size": -4}, "hidden_size is -4; it must be a whole number from 1 to 65536"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ({"region_types": []}, "region_types is []; give a row"),
        ({"region_types": [0, 2]}, "region_types is [0, 2]; give a row of the visual segment table, 0 to 1, for each"),
    ],
)
def test_bad_config_is_one_clear_sentence(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        VisualBertEncoderConfig(**{**SMALL, **changes})


def test_text_longer_than_the_position_table_is_an_error():
    model = make_encoder(max_position_embeddings=5)
    with pytest.raises(ValueError, match=r"A text of 6 wordpieces .* max_position_embeddings = 5"):
        model(*make_inputs())


# transformers


def lists_of(alignment: Tensor) -> Tensor:
    """0 or 1 per region and word -> the positions of each region's words, -1 elsewhere."""
    return torch.where(alignment > 0, torch.arange(alignment.shape[2]), -1)


@pytest.mark.parametrize("named", [False, True])
def test_transformers_computes_the_same_where_it_is_right(named):
    """With the region types given, no padding row, and early fusion."""
    model = make_encoder(special_visual_initialize=False, train_pooler=True)
    shared = {name: SMALL[name] for name in SMALL if name != "feature_dim"}
    config = VisualBertConfig(
        **shared, visual_embedding_dim=SMALL["feature_dim"], pad_token_id=None, attn_implementation="eager"
    )
    theirs = VisualBertModel(config).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    texts, regions = make_inputs()
    regions.image_slot = torch.arange(4).expand(3, -1) % 2 * regions.attention_mask
    arguments = {}
    if named:
        texts = name_regions(texts, [[-1, 0, 0, 0], [0, 2], []])
        arguments = {"image_text_alignment": lists_of(model.embeddings.alignment(texts, regions))}
    output = model(texts, regions, output_attentions=True)
    expected = theirs(
        input_ids=texts.input_ids,
        attention_mask=texts.attention_mask.long(),
        token_type_ids=texts.token_type_ids,
        visual_embeds=regions.features,
        visual_attention_mask=regions.attention_mask.long(),
        visual_token_type_ids=regions.image_slot,
        output_attentions=True,
        **arguments,
    )
    slots = torch.cat([texts.attention_mask, regions.attention_mask], dim=1)
    states = torch.cat([output.text, output.regions], dim=1)
    torch.testing.assert_close(states[slots], expected.last_hidden_state[slots], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.summary, expected.pooler_output, rtol=1e-4, atol=1e-5)
    for ours, maps in zip(output.attentions, expected.attentions, strict=True):
        queries = slots[:, None].expand(-1, 4, -1)
        torch.testing.assert_close(ours[queries], maps[queries], rtol=1e-4, atol=1e-5)
    (output.summary.sum() + states[slots].pow(2).sum()).backward()
    (expected.pooler_output.sum() + expected.last_hidden_state[slots].pow(2).sum()).backward()
    gradients = {name: one.grad for name, one in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)
