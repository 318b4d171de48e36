"""VisualBERT beyond parity: summary, embeddings, late fusion, and transformers' VisualBERT."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoConfig, VisualBertConfig, VisualBertModel

from e2e_vl.encoders.layers import region_word_alignment
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig, VisualBertEncoder, relative_box_coordinates
from e2e_vl.text import CLS, MASK, SEP, Template
from tests.encoders.small import VISUAL_BERT, changed, make_inputs, name_regions, one_text, regions_of_images
from tests.encoders.small import make_visual_bert as make_encoder

POSITIONS, VISUAL_POSITIONS = "position_embeddings", "visual_position_embeddings"


def test_transformers_keeps_its_own_visual_bert():
    assert isinstance(AutoConfig.for_model("visual_bert"), VisualBertConfig)
    assert isinstance(AutoConfig.for_model("visual_bert_encoder"), PretrainedVisualBertConfig)


# Summary and images


def test_the_answer_of_a_question_is_read_before_the_last_wordpiece():
    assert VisualBertEncoder.layout.question == Template((CLS, 0, MASK, SEP), (0, 0, 0, 0), summary=2)
    assert VisualBertEncoder.layout.single == Template((CLS, 0, SEP), (0, 0, 0))


def test_swapped_images_give_another_result():
    texts = one_text(2)
    for late in (False, True):
        model = make_encoder(bypass_transformer=late)
        output = model(texts, regions_of_images((0, 1), (1, 0), whole_image=False))
        assert changed(output.text[0], output.text[1]).all()
        assert changed(output.summary[0], output.summary[1])


def test_one_image_has_the_first_type_and_the_second_image_the_second():
    model = make_encoder(num_hidden_layers=0)
    regions = regions_of_images((0, 1), (0, -1), whole_image=False)
    before = model(one_text(2), regions).regions
    with torch.no_grad():
        model.embeddings.visual_token_type_embeddings.weight[1] += torch.arange(32.0)
    moved = changed(model(one_text(2), regions).regions, before)
    assert torch.equal(moved, regions.image_slot == 1)


# Embeddings


@pytest.mark.parametrize(("position", "factor"), [("official", 0.5), ("paper", 1.0)])
def test_a_named_region_has_the_mean_or_the_sum_of_its_words_positions(position, factor):
    embeddings = make_encoder(region_position=position).embeddings
    texts, regions = make_inputs(lengths=(6,), counts=(3,))
    texts = name_regions(texts, [[-1, 2, -1, 2, 0]])
    vectors = embeddings.region_positions(region_word_alignment(texts, regions, torch.float32))[0]
    words, shared = embeddings.position_embeddings.weight, embeddings.visual_position_embeddings.weight[0]
    shared = shared if position == "official" else torch.zeros_like(shared)
    torch.testing.assert_close(vectors[0], words[4] + shared)
    torch.testing.assert_close(vectors[1], shared)
    torch.testing.assert_close(vectors[2], (words[1] + words[3]) * factor + shared)
    torch.testing.assert_close(embeddings.region_positions(None), shared)


def test_box_coordinates():
    boxes = torch.tensor([[[10.0, 5.0, 30.0, 20.0], [0.0, 0.0, 80.0, 50.0]]])
    sizes = torch.tensor([[[50.0, 80.0]] * 2])
    expected = [[[0.125, 0.1, 0.375, 0.4, 0.25, 0.3], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]]]
    torch.testing.assert_close(relative_box_coordinates(boxes, sizes), torch.tensor(expected))
    model, (texts, regions) = make_encoder(with_box_coordinates=True), make_inputs()
    assert model.embeddings.visual_projection.in_features == VISUAL_BERT["feature_dim"] + 6
    other = dataclasses.replace(regions, boxes=regions.boxes * 0.5)
    assert torch.equal(changed(model(texts, other).regions, model(texts, regions).regions), regions.attention_mask)
    plain = make_encoder()
    assert torch.equal(plain(texts, other).regions, plain(texts, regions).regions)


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


def test_a_text_without_regions_skips_the_additional_layer():
    model, plain = make_encoder(bypass_transformer=True), make_encoder()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all(name.startswith("additional_layer.") for name in unexpected)
    texts, regions = make_inputs(counts=(2, 4, 0))
    late, early = model(texts, regions), plain(texts, regions)
    torch.testing.assert_close(late.text[2], early.text[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(late.summary[2], early.summary[2], rtol=1e-4, atol=1e-5)
    assert changed(late.text[:2], early.text[:2])[texts.attention_mask[:2]].all()


# transformers


@pytest.mark.parametrize("named", [False, True])
def test_transformers_computes_the_same_where_it_is_right(named):
    """With the region types given, no padding row, and early fusion."""
    model = make_encoder(special_visual_initialize=False, train_pooler=True)
    settings = {name: value for name, value in VISUAL_BERT.items() if name != "feature_dim"}
    settings |= {"visual_embedding_dim": VISUAL_BERT["feature_dim"], "pad_token_id": None}
    theirs = VisualBertModel(VisualBertConfig(**settings, attn_implementation="eager")).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    texts, regions = make_inputs()
    regions.image_slot = torch.arange(4).expand(3, -1) % 2 * regions.attention_mask
    arguments = {}
    if named:
        texts = name_regions(texts, [[-1, 0, 0, 0], [0, 2], []])
        alignment = region_word_alignment(texts, regions, torch.float32)
        # the positions of each region's words, -1 elsewhere
        arguments["image_text_alignment"] = torch.where(alignment > 0, torch.arange(alignment.shape[2]), -1)
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
