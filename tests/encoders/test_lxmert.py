"""LXMERT beyond parity: texts without regions, two images, options of the paper, named regions, initialization."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.encoders.lxmert import SentenceLSTM
from e2e_vl.structures import TextBatch, TextRegions
from tests.encoders.small import changed, make_inputs, one_text, regions_of_images, select
from tests.encoders.small import make_lxmert as make_model
from tests.regions import regions_of_own_images

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

    plain = make_model(with_segments=False, pooling="state")
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


BUTD = {"pooling": "butd", "r_layers": 0, "x_layers": 0}


@pytest.mark.parametrize("words", [{}, {"l_layers": 0, "with_lstm": True}], ids=["bert", "lstm"])
def test_bottom_up_and_top_down_attention_reads_words_and_features(words):
    """All of it gets a gradient; places of regions, padding and other images have no influence."""
    model, (texts, regions) = make_model(**BUTD, **words), make_inputs()
    features = regions.features.clone().requires_grad_()
    summary = model(texts, dataclasses.replace(regions, features=features)).summary
    summary.pow(2).sum().backward()
    unused = {name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()}
    assert {name.split(".")[1] for name in unused if not name.startswith("embeddings.token_type")} == {"visn_fc"}
    assert torch.equal(features.grad.abs().sum(dim=2) > 0, regions.attention_mask)
    assert summary.isfinite().all(), "one has no regions"
    other = features.detach() + 3 * ~regions.attention_mask[..., None]
    torch.testing.assert_close(
        model(texts, dataclasses.replace(regions, features=other, boxes=regions.boxes / 2)).summary, summary
    )
    for row in range(2):
        torch.testing.assert_close(model(*select(texts, regions, row)).summary[0], summary[row])
    pair = make_model(**BUTD, **words, max_images=2)(one_text(), regions_of_images((0, 1), whole_image=False))
    single = make_model(**BUTD, **words)(one_text(), regions_of_images((1,), whole_image=False))
    torch.testing.assert_close(pair.summary[:, 32:], single.summary)


def named_colours(count: int, generator: torch.Generator) -> tuple[TextBatch, TextRegions, torch.Tensor]:
    """Texts "[CLS] thing", each about an image with 4 things in 4 colours, and the colour of the named one."""
    things = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(count)])
    colours = torch.stack([torch.randperm(4, generator=generator) for _ in range(count)])
    named = torch.randint(4, (count, 1), generator=generator)
    ids = torch.cat([torch.full((count, 1), 2), things.gather(1, named) + 3], dim=1)
    texts = TextBatch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    regions = regions_of_own_images(
        features=torch.cat([F.one_hot(things, 8), F.one_hot(colours, 4)], dim=2).float(),
        boxes=torch.tensor([0.0, 0.0, 10.0, 10.0]).expand(count, 4, 4),
        image_sizes=torch.full((count, 4, 2), 20.0),
        attention_mask=torch.ones(count, 4, dtype=torch.bool),
        image_slot=torch.zeros(count, 4, dtype=torch.long),
    )
    return texts, regions, colours.gather(1, named)[:, 0]


@pytest.mark.parametrize("attends", [True, False])
def test_the_attention_finds_what_the_words_name(attends):
    """Held-out accuracy; where all regions count alike, guessing among the four colours of the image is left."""
    generator = torch.Generator().manual_seed(0)
    model, head = make_model(**BUTD, l_layers=1).train(), torch.nn.Linear(32, 4)
    if not attends:
        model.top_down.score.requires_grad_(False).weight.zero_()
    optimizer = torch.optim.Adam([one for one in (*model.parameters(), *head.parameters()) if one.requires_grad], 5e-3)
    for _ in range(250):
        texts, regions, colours = named_colours(64, generator)
        optimizer.zero_grad()
        F.cross_entropy(head(model(texts, regions).summary), colours).backward()
        optimizer.step()
    texts, regions, colours = named_colours(500, generator)
    accuracy = (head(model.eval()(texts, regions).summary).argmax(dim=1) == colours).float().mean()
    assert accuracy > 0.95 if attends else accuracy < 0.4


def test_the_state_of_cls_is_that_of_the_last_piece():
    """Of a text's own last piece, whatever the padding, as in a run over that text alone."""
    torch.manual_seed(0)
    lstm = SentenceLSTM(4, 4, batch_first=True)
    words = torch.randn(3, 5, 4)
    lengths = (5, 3, 1)
    word_mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    states = lstm(words, word_mask)
    for text, length in enumerate(lengths):
        unpadded, _ = torch.nn.LSTM.forward(lstm, words[text : text + 1, :length])
        torch.testing.assert_close(states[text, 0], unpadded[0, -1])
        torch.testing.assert_close(states[text, 1:length], unpadded[0, 1:])


def test_boxes_are_divided_by_width_and_height():
    """x by the width, y by the height of an image that is not square; image sizes are (height, width)."""
    model = make_model()
    texts, regions = make_inputs(lengths=(4,), counts=(1,))
    regions = dataclasses.replace(
        regions, boxes=torch.tensor([[[8.0, 12.0, 40.0, 45.0]]]), image_sizes=torch.tensor([[[60.0, 80.0]]])
    )
    read_boxes = []
    model.encoder.visn_fc.register_forward_pre_hook(lambda module, arguments: read_boxes.append(arguments[1]))
    model(texts, regions)
    expected = torch.tensor([0.1, 0.2, 0.5, 0.75])
    torch.testing.assert_close(read_boxes[0].reshape(4), expected)
