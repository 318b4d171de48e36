"""VL-BERT's behaviour beyond the recorded numbers: saving, padding, text-only rows, variants, start values."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.structures import TextBatch, TextRegions
from tests.regions import learn_geometry, regions_of_own_images

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "feature_dim": 12,
    "geometry_dim": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "region_dropout_prob": 0.0,
    "visual_scale_text_init": 0.5,
    "visual_scale_object_init": 0.5,
}
VARIANTS = {
    "official": {},
    "official_zero_scale": {"visual_scale_text_init": 0.0, "visual_scale_object_init": 0.0},
    "scalar_factor_and_projection": {"visual_layer_norm": False, "visual_size": 20},
    "pre_ln": {"norm_first": True, "embedding_init_std": 0.5},
    "relative_geometry": {"norm_first": True, "relative_geometry": True, "relative_geometry_size": 16},
    "no_image_on_words": {"image_feature_on_words": False, "uses_whole_image": False},
    "paper": {"region_word": "img", "new_layers": "normal", "whole_image_in_sequence": False},
    "pooler_and_text_only": {"with_pooler": True, "text_only_embedding": True, "geometry": "corners"},
    "two_images": {"max_images": 2},
}


def make_model(**changes) -> VLBertModel:
    torch.manual_seed(0)
    return VLBertModel(VLBertConfig(**{**SMALL, **changes})).eval()


def make_inputs(lengths=(6, 3, 5), counts=(2, 4, 0), seed=1) -> tuple[TextBatch, TextRegions]:
    """Texts of the given lengths with the given numbers of regions, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    texts, length, count = len(lengths), max(lengths), max(*counts, 1)
    attend_text = torch.arange(length) < torch.tensor(lengths)[:, None]
    attention_mask = torch.arange(count) < torch.tensor(counts)[:, None]
    corner = torch.rand(texts, count, 2, generator=generator) * 40
    side = torch.rand(texts, count, 2, generator=generator) * 20 + 2
    ids = torch.randint(1, SMALL["vocab_size"], (texts, length), generator=generator)
    features = torch.randn(texts, count, SMALL["feature_dim"], generator=generator)
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
    """bool [M, L or R]: vectors that differ by more than rounding."""
    return (one - other).abs().sum(dim=-1) > 1e-4


def select(texts: TextBatch, regions: TextRegions, row: int) -> tuple[TextBatch, TextRegions]:
    """One text alone, without any padding."""
    length, count = int(texts.attention_mask[row].sum()), max(int(regions.attention_mask[row].sum()), 1)
    return (
        TextBatch(
            *(
                getattr(texts, name)[row : row + 1, :length]
                for name in ("input_ids", "token_type_ids", "attention_mask")
            )
        ),
        TextRegions(*(getattr(regions, f.name)[row : row + 1, :count] for f in dataclasses.fields(regions))),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_load_give_the_same_model(tmp_path, variant):
    model = make_model(**VARIANTS[variant])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    loaded = VLBertModel.from_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "vl_bert"
    for name, value in VARIANTS[variant].items():
        assert getattr(loaded.config, name) == value
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    torch.testing.assert_close(loaded(*make_inputs()).regions, model(*make_inputs()).regions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_does_not_depend_on_its_batch(variant):
    model = make_model(**VARIANTS[variant])
    if model.relative_geometry is not None:
        learn_geometry(model)
    texts, regions = make_inputs()
    together = model(texts, regions, output_attentions=True)
    assert together.text[~texts.attention_mask].abs().sum() == 0
    assert together.regions[~regions.attention_mask].abs().sum() == 0
    for row in range(len(texts)):
        alone = model(*select(texts, regions, row))
        length, count = int(texts.attention_mask[row].sum()), int(regions.attention_mask[row].sum())
        torch.testing.assert_close(together.text[row, :length], alone.text[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.regions[row, :count], alone.regions[0, :count], rtol=1e-4, atol=1e-5)
        if model.pooler is not None:
            torch.testing.assert_close(together.summary[row], alone.summary[0], rtol=1e-4, atol=1e-5)


def test_attention_maps_cover_the_slots_and_sum_to_one():
    model = make_model(num_hidden_layers=3)
    texts, regions = make_inputs()
    plain, output = model(texts, regions), model(texts, regions, output_attentions=True)
    assert plain.attentions is None
    torch.testing.assert_close(plain.text, output.text, rtol=1e-5, atol=1e-6)
    slots = torch.cat([texts.attention_mask, regions.attention_mask, torch.ones(len(texts), 1).bool()], dim=1)
    assert len(output.attentions) == 3
    for maps in output.attentions:
        assert maps.shape == (3, 4, slots.shape[1], slots.shape[1])
        torch.testing.assert_close(maps.sum(dim=-1), slots[:, None].expand(-1, 4, -1).float())
        assert (maps.transpose(1, 3)[~slots] == 0).all()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "official_zero_scale"])
def test_region_features_get_gradients(variant):
    model = make_model(**VARIANTS[variant]).train()
    texts, regions = make_inputs()
    regions.features.requires_grad_()
    output = model(texts, regions)
    (output.text.square().sum() + output.regions.square().sum()).backward()
    gradients = regions.features.grad.abs().sum(dim=-1)
    assert (gradients[regions.attention_mask] > 0).all()
    assert (gradients[~regions.attention_mask] == 0).all()


def test_zero_visual_scale_passes_no_gradient_at_first():
    model = make_model(**VARIANTS["official_zero_scale"])
    texts, regions = make_inputs()
    regions.features.requires_grad_()
    model(texts, regions).regions.pow(3).sum().backward()
    assert regions.features.grad.abs().max() == 0
    assert model.embeddings.region_projection.weight.grad.abs().max() == 0
    assert model.embeddings.region_visual.norm.weight.grad.abs().max() > 0  # so the next step is different


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_takes_part(variant):
    """Data-parallel training waits for the gradient of every parameter, in every batch."""
    model = make_model(**VARIANTS[variant])
    output = model(*make_inputs())
    loss = output.text.sum() + output.regions.sum() + (0 if output.summary is None else output.summary.sum())
    loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_whole_image_reaches_words_only_through_region_0():
    model = make_model(num_hidden_layers=0)  # no attention: a word sees only what is added to it
    texts, regions = make_inputs(counts=(2, 4, 1))
    before = model(texts, regions).text
    other = dataclasses.replace(regions, features=regions.features.clone())
    other.features[:, 1:] += 1
    assert not changed(model(texts, other).text, before).any()
    other.features[:, 0] += 1
    assert torch.equal(changed(model(texts, other).text, before), texts.attention_mask)


def test_word_that_names_a_region_carries_its_vector():
    model = make_model(num_hidden_layers=0)
    texts, regions = make_inputs(counts=(3, 4, 2))
    named = dataclasses.replace(texts, region_of_token=torch.full_like(texts.input_ids, -1))
    torch.testing.assert_close(model(named, regions).text, model(texts, regions).text)
    named.region_of_token[1, 2] = 2  # of the candidate boxes, which follow the whole image
    before = model(named, regions).text
    other = dataclasses.replace(regions, features=regions.features.clone())
    other.features[1, 3] += 1
    assert changed(model(named, other).text, before).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("has_visual_part", [False, True])
def test_whole_image_reaches_the_end_only_if_asked_for(has_visual_part):
    """[END] is the last position of the embeddings; the paper gives it the whole image's vector."""
    embeddings = make_model(visual_part_on_end=has_visual_part).embeddings
    texts, regions = make_inputs(counts=(2, 4, 1))
    other = dataclasses.replace(regions, features=regions.features.clone())
    other.features[:, 0] += 1
    last = (texts.attention_mask.sum(dim=1) + regions.attention_mask.sum(dim=1))[:, None, None]
    ends = [embeddings(texts, rows)[0].gather(1, last.expand(-1, 1, SMALL["hidden_size"])) for rows in (regions, other)]
    assert changed(*ends)[:, 0].tolist() == [has_visual_part] * 3


def test_naming_regions_without_visual_words_is_an_error():
    model = make_model(**VARIANTS["no_image_on_words"])
    texts, regions = make_inputs()
    with pytest.raises(ValueError, match="image_feature_on_words is off"):
        model(dataclasses.replace(texts, region_of_token=torch.zeros_like(texts.input_ids)), regions)


def test_text_without_regions_carries_the_text_only_vector():
    model = make_model(text_only_embedding=True)
    texts, regions = make_inputs(counts=(2, 4, 0))
    before = model(texts, regions)
    with torch.no_grad():
        model.embeddings.text_only_embedding.weight += 1 + torch.arange(model.config.visual_size)
    after = model(texts, regions)
    assert not changed(before.text[:2], after.text[:2]).any()
    assert changed(before.text[2], after.text[2]).any()


def test_batch_of_texts_only():
    output = make_model()(*make_inputs(counts=(0, 0, 0)))
    assert output.regions.shape == (3, 1, 32)
    assert output.regions.abs().sum() == 0
    assert output.text.isfinite().all()


def test_order_of_regions_does_not_matter():
    """All regions share one position; only row 0, the whole image, is special."""
    model = make_model()
    texts, regions = make_inputs(lengths=(5,), counts=(4,))
    order = torch.tensor([0, 3, 1, 2])
    shuffled = TextRegions(*(getattr(regions, field.name)[:, order] for field in dataclasses.fields(regions)))
    first, second = model(texts, regions), model(texts, shuffled)
    torch.testing.assert_close(first.regions[:, order], second.regions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.text, second.text, rtol=1e-4, atol=1e-5)


def test_relative_geometry_changes_the_result_only_when_learned():
    plain, paired = make_model(norm_first=True), make_model(norm_first=True, relative_geometry=True)
    missing, unexpected = paired.load_state_dict(plain.state_dict(), strict=False)
    assert {name.split(".")[0] for name in missing} == {"relative_geometry"} and not unexpected
    inputs = make_inputs()
    torch.testing.assert_close(paired(*inputs).regions, plain(*inputs).regions, rtol=1e-4, atol=1e-5)
    learn_geometry(paired)
    assert not torch.allclose(paired(*inputs).regions, plain(*inputs).regions, atol=1e-2)


def test_bfloat16_autocast_stays_close():
    model = make_model(relative_geometry=True, relative_geometry_size=16)
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(*inputs).regions
    torch.testing.assert_close(half.float(), model(*inputs).regions, rtol=0.1, atol=0.1)


def test_start_values():
    model = make_model(vocab_size=2000, initializer_range=0.05, embedding_init_std=0.4).requires_grad_(False)
    embeddings = model.embeddings
    assert embeddings.word_embeddings.weight.std() == pytest.approx(0.4, rel=0.05)
    assert model.layers[0].intermediate.dense.weight.std() == pytest.approx(0.05, rel=0.1)
    assert embeddings.text_visual.norm.weight.unique().tolist() == [0.5]
    assert embeddings.norm.weight.unique().tolist() == [1]
    bound = (SMALL["geometry_dim"] + SMALL["feature_dim"]) ** -0.5  # torch's default for a Linear
    assert embeddings.region_projection.weight.abs().max() == pytest.approx(bound, rel=0.05)
    assert make_model(visual_layer_norm=False).embeddings.text_visual.norm.weight == 0.5


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geometry": "center"}, 'geometry is "center"'),
        ({"geometry_dim": 36}, "geometry_dim is 36; it must be a positive multiple of 8"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000; it must be a whole number from 0 to 500"),
        ({"visual_size": 0}, "visual_size is 0; it must be a whole number from 1 to 65536"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ({"type_vocab_size": 2}, "type_vocab_size is 2"),
        ({"max_images": 0}, "max_images is 0; every text needs room for one image"),
        ({"uses_whole_image": False}, "image_feature_on_words needs the whole image"),
        ({"region_word": "word"}, 'region_word is "word"; it must be "learned" or "img"'),
        ({"new_layers": "xavier"}, 'new_layers is "xavier"; it must be "official" or "normal"'),
        ({"region_word": "img", "masked_region_embedding": True}, "set masked_region_embedding to false"),
        (
            {"image_feature_on_words": False, "visual_part_on_end": True},
            "visual_part_on_end needs image_feature_on_words",
        ),
    ],
)
def test_bad_config_is_one_clear_sentence(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        VLBertConfig(**{**SMALL, **changes})


def test_text_longer_than_the_position_table_is_an_error():
    model = make_model(max_position_embeddings=7)
    with pytest.raises(ValueError, match=r"A text of 6 wordpieces .* max_position_embeddings = 7"):
        model(*make_inputs())


@pytest.mark.filterwarnings("error")
def test_recomputed_activations_change_nothing():
    model = make_model().train()
    texts, regions = make_inputs()

    def gradients() -> list[torch.Tensor]:
        loss = model(texts, regions).text.square().sum()
        return torch.autograd.grad(loss, [*model.layers.parameters()])

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.embeddings.region_projection.dropout = 0.0
    for layer in model.layers:
        layer.attention.self.dropout.p = 0.0
    before = gradients()
    calls = []
    model.layers[0].intermediate.register_forward_hook(lambda *_: calls.append(1))
    model.recompute_activations()
    after = gradients()
    assert len(calls) == 2  # forward, and again in the backward pass
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(before, after, strict=True))
