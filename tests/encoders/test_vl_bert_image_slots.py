"""Two images per text: VL-BERT tells them apart, and one image is as if there were no slots."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from detector.structures import Regions
from e2e_vl.encoders.layers import pairs_of_one_image
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.structures import TextBatch, TextRegions, gather_regions
from tests.encoders.test_vl_bert import SMALL, changed, make_inputs, make_model
from tests.regions import learn_geometry

SIZES = torch.tensor([[60, 80], [50, 90]])
COUNTS = (3, 4)  # regions of the two images, the whole image included
SLOTS = "embeddings.image_slot_embeddings.weight"
VARIANTS = {
    "official": {},
    "whole image not in the sequence": {"whole_image_in_sequence": False},
    "relative geometry": {"norm_first": True, "relative_geometry": True, "relative_geometry_size": 16},
    "visual part on [END]": {"visual_part_on_end": True, "text_only_embedding": True},
    "no whole image": {"image_feature_on_words": False, "uses_whole_image": False},
    "pooler": {"with_pooler": True},
}


def make_regions(seed: int = 3) -> Regions:
    """Regions of two images."""
    generator = torch.Generator().manual_seed(seed)
    boxes = []
    for count in COUNTS:
        corner = torch.rand(count, 2, generator=generator) * 30
        boxes.append(torch.cat([corner, corner + 5 + torch.rand(count, 2, generator=generator) * 20], dim=1))
    features = [torch.randn(count, SMALL["feature_dim"], generator=generator) for count in COUNTS]
    return Regions(boxes, features, [torch.zeros(count, 2) for count in COUNTS])


def look(*image_index: tuple[int, ...], whole_image: bool = True, regions: Regions | None = None) -> TextRegions:
    return gather_regions(regions or make_regions(), SIZES, torch.tensor(image_index), whole_image=whole_image)


def make_slots(**changes) -> VLBertModel:
    model = make_model(**{"max_images": 2} | changes)
    if model.relative_geometry is not None:
        learn_geometry(model)
    return model


def one_text(times: int = 1) -> TextBatch:
    """A text of five wordpieces, several times."""
    text, _ = make_inputs(lengths=(5,), counts=(1,))
    return TextBatch(*(rows.expand(times, -1) for rows in (text.input_ids, text.token_type_ids, text.attention_mask)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_swapped_images_give_another_result(variant):
    """Already at the start, where the vectors of the slots are zero: each image has a position of its own."""
    changes = VARIANTS[variant]
    model = make_slots(**changes)
    assert not model.embeddings.image_slot_embeddings.weight.any()
    output = model(one_text(2), look((0, 1), (1, 0), whole_image=changes.get("uses_whole_image", True)))
    assert changed(output.text[0], output.text[1]).all()
    if output.summary is not None:
        assert changed(output.summary[0], output.summary[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_of_two_images_does_not_depend_on_its_batch(variant):
    changes = VARIANTS[variant]
    whole_image = changes.get("uses_whole_image", True)
    model = make_slots(**changes)
    with torch.no_grad():
        model.embeddings.image_slot_embeddings.weight.normal_()
    image_index = ((0, 1), (1, -1), (-1, -1), (1, 0))
    together = model(one_text(4), look(*image_index, whole_image=whole_image))
    for row, images in enumerate(image_index):
        alone = model(one_text(), look(images, whole_image=whole_image))
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
        same = model(one_text(2), look((0, 1), (1, 0)))
        model.embeddings.image_slot_embeddings.weight.normal_()
        other = model(one_text(2), look((0, 1), (1, 0)))
    torch.testing.assert_close(same.text[0], same.text[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(same.regions[0, :3], same.regions[1, 4:], rtol=1e-4, atol=1e-5)
    assert changed(other.text[0], other.text[1]).all()


def test_swapped_images_give_the_vectors_of_the_slots_other_gradients():
    gradients = []
    for images in ((0, 1), (1, 0)):
        model = make_slots()
        model(one_text(), look(images)).text.pow(3).sum().backward()
        gradients.append(model.embeddings.image_slot_embeddings.weight.grad)
    assert all((gradient.abs().sum(dim=1) > 0).all() for gradient in gradients)
    assert not torch.allclose(*gradients, rtol=0.01)
    assert not torch.allclose(gradients[0], gradients[1].flip(0), rtol=0.01)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_image_is_as_if_there_were_no_slots(variant):
    changes = VARIANTS[variant]
    whole_image = changes.get("uses_whole_image", True)
    plain, slots = make_slots(**changes, max_images=1), make_slots(**changes)
    missing, unexpected = slots.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == ([SLOTS], [])
    expected = plain(one_text(3), look((0,), (1,), (-1,), whole_image=whole_image))
    for regions in (
        look((0,), (1,), (-1,), whole_image=whole_image),
        look((0, -1), (1, -1), (-1, -1), whole_image=whole_image),
    ):
        output = slots(one_text(3), regions)
        torch.testing.assert_close(output.text, expected.text, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output.regions, expected.regions, rtol=1e-5, atol=1e-6)
        if expected.summary is not None:
            torch.testing.assert_close(output.summary, expected.summary, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_sequence", [True, False])
def test_words_carry_the_mean_of_the_whole_images(in_sequence):
    embeddings = make_slots(whole_image_in_sequence=in_sequence, text_only_embedding=True).embeddings
    regions = look((0, 1), (1, -1), (-1, -1), (-1, 1))
    vectors = embeddings.region_vectors(regions)
    words = embeddings.word_vectors(one_text(4), vectors, regions)
    assert words.shape == (4, 1, SMALL["hidden_size"])
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
    regions = look((0, 1), (1, -1))
    positions = embeddings.position_ids(one_text(2).attention_mask, regions.image_slot)
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 5, 5, 5, 6, 6, 6, 6, 7],
        [0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 6],
    ]


def test_both_images_get_gradients():
    regions = make_regions()
    for rows in regions.features:
        rows.requires_grad_()
    make_slots()(one_text(), look((0, 1), regions=regions)).text.square().sum().backward()
    assert all((rows.grad.abs().sum(dim=1) > 0).all() for rows in regions.features)


def test_no_bias_joins_regions_of_two_images():
    """Boxes lie in another image: how far they are from each other says nothing."""
    model = make_slots(**VARIANTS["relative geometry"])
    learn_geometry(model)
    regions = look((0, 1))
    bias = torch.stack(model.relative_geometry(regions.boxes, regions.image_sizes, pairs_of_one_image(regions)))
    is_pair = torch.block_diag(*(torch.ones(count, count) for count in COUNTS)).bool()
    assert (bias[..., is_pair] != 0).all() and not bias[..., ~is_pair].any()


def test_slots_are_saved_and_loaded(tmp_path):
    model = make_slots()
    with torch.no_grad():
        model.embeddings.image_slot_embeddings.weight.normal_()
    model.save_pretrained(tmp_path)
    loaded = VLBertModel.from_pretrained(tmp_path)
    assert loaded.config.max_images == 2
    assert torch.equal(loaded.state_dict()[SLOTS], model.state_dict()[SLOTS])


def test_the_position_table_has_room_for_every_image():
    texts, regions = one_text(), look((0, 1))
    make_slots(max_position_embeddings=8)(texts, regions)  # 5 words, two images, [END]
    with pytest.raises(ValueError, match=r"regions' and \[END\]'s positions 8\) does not fit .* = 7"):
        make_slots(max_position_embeddings=7)(texts, regions)
