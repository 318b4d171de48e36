"""What is hidden stays hidden: labels come before, choices depend on seeds, and pixels and features are gone."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import torch
from torch import nn

from detector.config import InputConfig
from detector.images import make_image_batch
from detector.structures import ImageBatch, PrecomputedFeatures
from e2e_vl.region_masking import (
    RegionMasking,
    describe_regions,
    label_regions,
    mask_regions,
    sample_masked_regions,
)
from e2e_vl.structures import Batch, RegionLabels, RegionMasks
from tests.tasks.tiny_pretraining import BOXES, CLASSES, PAPER, assert_same, is_same, make_batch, make_model, make_pairs

EVERY = {"region_probability": 1.0, "mask_probability": 1.0}


def with_user_boxes(hidden: list[list[float]], boxes: bool = True) -> Batch:
    """The batch in which a user hides boxes of the first image."""
    hide = [torch.tensor(hidden, dtype=torch.float32).reshape(-1, 4), torch.zeros(0, 4)]
    return dataclasses.replace(make_batch(boxes=boxes), boxes_to_mask=hide)


# The choice


def test_one_region_in_seven_is_chosen_and_nine_tenths_of_them_are_hidden():
    chosen, hidden, _ = sample_masked_regions(100_000, np.random.default_rng(1))
    assert chosen.dtype == hidden.dtype == bool
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert hidden[chosen].mean() == pytest.approx(0.9, abs=0.01)
    assert not hidden[~chosen].any()


def test_no_region_is_forced_and_the_paper_hides_every_chosen_one():
    nothing = [sample_masked_regions(3, np.random.default_rng(seed))[0].any() for seed in range(200)]
    assert np.mean(nothing) == pytest.approx(1 - 0.85**3, abs=0.1)
    chosen, hidden, _ = sample_masked_regions(1000, np.random.default_rng(0), mask=1.0)
    np.testing.assert_array_equal(chosen, hidden)
    assert chosen.any()
    for count, probability in ((0, 0.15), (50, 0.0)):
        assert not sample_masked_regions(count, np.random.default_rng(0), probability)[0].any()


def chosen_with(batch: Batch, model=None) -> list[torch.Tensor]:
    model = make_model(region_probability=0.5).eval() if model is None else model
    return model.mask_regions(batch).masked_regions.is_labelled


def same_choice(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_choice_depends_on_the_seed_of_the_first_text():
    batches = [make_batch(), make_batch(), make_batch()]
    batches[1].seeds = torch.tensor([11, 5, 13, 6])  # of texts that are not the first about an image
    batches[2].seeds = torch.tensor([5, 12, 6, 14])
    chosen = [chosen_with(batch) for batch in batches]
    assert same_choice(chosen[0], chosen[1])
    assert not same_choice(chosen[0], chosen[2])


def test_the_first_text_about_either_image_of_a_pair_counts():
    """Here text 0 looks at both images."""
    batches = [make_pairs(), make_pairs(), make_batch()]
    batches[1].seeds = torch.tensor([11, 0, 0, 0])
    batches[2].seeds = torch.tensor([11, 0, 11, 0])
    chosen = [chosen_with(batch, make_model(encoder={"max_images": 2}, region_probability=0.5)) for batch in batches]
    assert same_choice(chosen[0], chosen[1]) and same_choice(chosen[0], chosen[2])


def test_without_seeds_torchs_own_randomness_chooses():
    model = make_model(region_probability=0.5).eval()
    chosen = []
    for seed in (1, 1, 2, 3, 4):
        torch.manual_seed(seed)
        chosen.append(chosen_with(dataclasses.replace(make_batch(), seeds=None), model))
    assert same_choice(chosen[0], chosen[1])
    assert not all(same_choice(chosen[0], other) for other in chosen[2:])


def test_visible_region_is_predicted_but_not_hidden():
    model = make_model(region_probability=1.0, mask_probability=0.0).eval()
    batch = model.mask_regions(make_batch())
    assert all(rows.all() for rows in batch.masked_regions.is_labelled)
    assert not any(rows.any() for rows in batch.masked_regions.is_masked)
    assert all(len(rows) == 0 for rows in batch.pixel_masks)
    output = model(make_batch())
    assert output.losses["masked_regions"].count == 3 + 3 + 2


def test_what_was_hidden_before_stays_as_it_is():
    """Batches are recorded that way; nothing is labelled, drawn or cut again."""
    model = make_model(max_length=5, **EVERY).eval()
    batch = model.mask_regions(make_batch())
    assert model.mask_regions(batch) is batch
    assert model(batch).batch is batch


# Pixels


@pytest.mark.parametrize(
    ("teacher", "colour", "encoder"), [("frozen", "mean", {}), ("current", "mean", {}), ("frozen", "black", PAPER)]
)
@pytest.mark.parametrize("make", [make_batch, make_pairs])
def test_hidden_pixels_change_no_logit(teacher, colour, encoder, make):
    """The model that could peek is caught: other pixels in the hidden boxes give other labels, but the same logits."""
    options = {"region_probability": 0.6, "mask_probability": 1.0, "objectives": {"relationship": 1.0}}
    model = make_model(teacher=teacher, masked_pixels=colour, encoder=encoder | {"max_images": 2}, **options).eval()
    batch = make()
    prepared = model.mask_regions(batch)
    hidden = [rows[mask] for rows, mask in zip(prepared.boxes, prepared.masked_regions.is_masked, strict=True)]
    assert sum(len(rows) for rows in hidden) in range(1, 5)
    other = make()
    for pixels, rows in zip(other.images.pixels, hidden, strict=True):
        for x1, y1, x2, y2 in rows.int().tolist():
            pixels[:, y1 : y2 + 1, x1 : x2 + 1] += 100 * torch.randn(3, y2 + 1 - y1, x2 + 1 - x1)
    nothing = [torch.zeros(0, 4)] * 2
    with torch.no_grad():
        first, second = model(batch), model(other)
        seen = [model(dataclasses.replace(one, boxes_to_mask=nothing)) for one in (batch, other)]
    for name in ("masked_words", "relationship"):
        assert_same(first.task.parts[name], second.task.parts[name])
        assert not is_same(*(output.task.parts[name] for output in seen))
    assert_same(*(model.task.masked_regions.classify(output.encoded.regions) for output in (first, second)))
    assert_same(first.task.parts["masked_text"], second.task.parts["masked_text"])
    assert_same(first.encoded.summary, second.encoded.summary)
    labels = [torch.cat(output.batch.region_labels.class_probs) for output in (first, second)]
    assert not is_same(*labels)

    shown = dataclasses.replace(other, images=dataclasses.replace(other.images, pixels=other.images.pixels.clone()))
    shown.images.pixels[:, :, 8:13, 58:63] += 100  # outside of the hidden boxes
    with torch.no_grad():
        assert not is_same(model(shown).task.parts["masked_words"], first.task.parts["masked_words"])


def test_hidden_pixels_are_those_of_a_black_image():
    """Zeros before the mean is subtracted, in the last row and column of the box too."""
    photo, mean, std = torch.randint(1, 255, (12, 16, 3)).byte().numpy(), (10.0, 20.0, 30.0), (1.0, 2.0, 4.0)
    painted = photo.copy()
    painted[3:9, 5:12] = 0
    images, expected = (make_image_batch([one], [(12, 16)], ["a"], mean, std) for one in (photo, painted))
    colours = types.SimpleNamespace(config=types.SimpleNamespace(input=InputConfig(pixel_mean=mean, pixel_std=std)))
    before = images.pixels.clone()
    batch = dataclasses.replace(
        make_batch(),
        images=images,
        boxes=[torch.tensor([[5.0, 3, 11, 8]])],
        image_index=torch.tensor([[0], [0], [0], [-1]]),
    )
    hidden = mask_regions(batch, colours, RegionMasking(probability=1.0, mask_probability=1.0, colour="black"))
    assert torch.equal(hidden.images.pixels, expected.pixels) and hidden.pixel_masks is None
    assert torch.equal(images.pixels, before)


def test_the_teacher_sees_what_is_painted_black():
    mean, black = (make_model(masked_pixels=colour, teacher="current", **EVERY).eval() for colour in ("mean", "black"))
    batch = make_batch()
    before = batch.images.pixels.clone()
    prepared = black.mask_regions(batch)
    assert prepared.pixel_masks is None and torch.equal(batch.images.pixels, before)
    colour = -torch.tensor(black.detector.config.input.pixel_mean)
    assert torch.equal(prepared.images.pixels[0, :, 40, 40], colour)  # the last corner of the first box
    assert torch.equal(prepared.images.pixels[0, :, 0, 95], before[0, :, 0, 95])
    for one, other in zip(
        prepared.region_labels.class_probs, mean.mask_regions(make_batch()).region_labels.class_probs, strict=True
    ):
        assert_same(one, other)
    with torch.no_grad():
        assert not is_same(*(model(make_batch()).task.parts["masked_words"] for model in (mean, black)))


# Labels


@pytest.mark.parametrize("boxes", [True, False])
def test_background_comes_first_if_asked_for(boxes):
    """Then class k of the detector is column k + 1, as in files of bottom-up attention."""
    last, first = (make_model(background=place, region_probability=1.0).eval() for place in ("last", "first"))
    ours, theirs = last.mask_regions(make_batch(boxes=boxes)), first.mask_regions(make_batch(boxes=boxes))
    assert sum(map(len, theirs.boxes)) > 0
    logits = first.detector(theirs.images, theirs.boxes).class_logits
    for one, other, scores in zip(
        ours.region_labels.class_probs, theirs.region_labels.class_probs, logits, strict=True
    ):
        assert_same(one.roll(1, dims=1), other)
        assert not is_same(one, other)
        torch.testing.assert_close(other[:, 0], scores.softmax(dim=1)[:, CLASSES - 1])


def test_region_labels_are_the_teachers_view_of_the_whole_image():
    model = make_model(norm="BN", teacher="current", region_probability=1.0).train()
    batch = make_batch()
    before = {name: buffer.clone() for name, buffer in model.detector.named_buffers()}
    prepared = model.mask_regions(batch)
    assert model.detector.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.detector.named_buffers())
    model.detector.eval()
    regions = model.detector(batch.images, batch.boxes)
    labels = prepared.region_labels
    for probs, features, logits, wanted in zip(
        labels.class_probs, labels.features, regions.class_logits, regions.features, strict=True
    ):
        torch.testing.assert_close(probs, logits.softmax(dim=1))
        torch.testing.assert_close(features, wanted)
        assert not probs.requires_grad and not features.requires_grad
    assert batch.masked_regions is None and batch.region_labels == RegionLabels()  # the caller's batch is untouched


@pytest.mark.parametrize("teacher", ["current", "file"])
def test_annotated_classes_stay_beside_what_a_teacher_says(teacher):
    model = make_model(teacher=teacher).eval()
    classes = [torch.arange(len(rows)) for rows in BOXES]
    known = RegionLabels(classes=classes, class_probs=[torch.rand(len(rows), CLASSES) for rows in BOXES])
    labels = model.mask_regions(dataclasses.replace(make_batch(), region_labels=known)).region_labels
    assert labels.classes is classes
    assert (labels.class_probs is known.class_probs) == (teacher == "file")
    hide = [torch.tensor([[6.0, 6.0, 40.0, 40.0]]), torch.zeros(0, 4)]
    hidden = model.mask_regions(dataclasses.replace(make_batch(), region_labels=known, boxes_to_mask=hide))
    assert hidden.region_labels.classes is None  # the boxes are others now


def test_own_boxes_come_from_the_teacher():
    model = make_model(max_detected_regions=4, region_probability=0.5).train()
    batch = model.mask_regions(make_batch(boxes=False))
    assert [len(rows) for rows in batch.boxes] == [len(rows) for rows in batch.region_labels.class_probs]
    assert [len(rows) for rows in batch.boxes] == [len(rows) for rows in batch.region_labels.features]
    assert 0 < len(batch.boxes[0]) <= 4
    losses = model(make_batch(boxes=False)).task.losses
    sum(loss.mean for loss in losses.values()).backward()
    assert model.detector.backbone.res2[0].conv1.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.teacher.parameters())


def test_own_boxes_are_found_although_nothing_is_hidden():
    """The cut needs to know how many there are."""
    model = make_model(objectives={"masked_regions": 0.0}, max_detected_regions=4, max_length=6).eval()
    assert model.teacher is None
    batch = model.mask_regions(make_batch(boxes=False))
    assert 0 < len(batch.boxes[0]) <= 4 and batch.masked_regions is None and batch.pixel_masks is None
    with torch.no_grad():
        output = model(make_batch(boxes=False))
    assert (output.batch.texts.attention_mask.sum(dim=1) + output.text_regions.attention_mask.sum(dim=1))[:3].max() <= 6


def test_frozen_teacher_stays_as_it_was():
    model = make_model(norm="BN").train()
    assert not any(module.training for module in model.teacher.modules())
    nn.init.zeros_(model.detector.backbone.stem.conv1.weight)
    assert model.teacher.backbone.stem.conv1.weight.abs().sum() > 0


def test_own_boxes_are_labelled_in_the_order_of_the_file():
    """A file's distributions belong to its boxes; the detector's replace them in evaluation with predicted boxes."""
    model = make_model(teacher="file", region_probability=1.0).eval()
    labels = RegionLabels(class_probs=[torch.ones(1, CLASSES) / CLASSES] * 2)
    batch = dataclasses.replace(make_batch(boxes=False), region_labels=labels)
    prepared = model.mask_regions(batch)
    rule = dataclasses.replace(model.task.region_masking, background_first=True)
    _, expected = describe_regions(model.detector, batch.images, prepared.boxes, rule)
    for rows, wanted in zip(prepared.region_labels.class_probs, expected.class_probs, strict=True):
        torch.testing.assert_close(rows, wanted)
        assert not torch.allclose(rows, wanted.roll(-1, dims=1))


def test_labels_of_a_file_stay_as_they_are():
    model = make_model(teacher="file").eval()
    labels = RegionLabels(class_probs=[torch.rand(len(rows), CLASSES) for rows in BOXES])
    prepared = model.mask_regions(dataclasses.replace(make_batch(), region_labels=labels))
    assert prepared.region_labels is labels


def test_file_labels_must_be_there():
    model = make_model(teacher="file")
    with pytest.raises(ValueError, match="without class distributions"):
        model(make_batch())


# Saved features


def test_whole_image_feature_leaves_out_hidden_regions():
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]])
    images = ImageBatch(
        torch.zeros(1, 3, 0, 0),
        torch.tensor([[60, 90]]),
        torch.tensor([[60, 90]]),
        ["image"],
        PrecomputedFeatures([features], torch.zeros(1, 2)),
    )
    box = torch.tensor([[5.0, 3, 11, 8]])
    batch = dataclasses.replace(
        make_batch(),
        images=images,
        boxes=[torch.cat([box, box + 20, box + 40])],
        boxes_to_mask=[box],
        image_index=torch.tensor([[0], [0], [0], [-1]]),
    )
    batch.images.precomputed.features[0] = features.flip(0)  # the hidden one stands first
    changed = mask_regions(batch, None, RegionMasking(pixels=False))
    assert changed.masked_regions.is_masked[0].tolist() == [True, False, False]
    torch.testing.assert_close(changed.images.precomputed.image_features, torch.tensor([[2.0, 3.0]]), rtol=1e-4, atol=0)
    assert not images.precomputed.image_features.any()  # the caller's batch is untouched


def test_precomputed_features_cannot_hide_pixels():
    """Otherwise hidden regions would keep their features: the model could peek."""
    model = make_model(teacher="file")
    batch = make_batch()
    features = [torch.zeros(len(rows), model.detector.feature_dim) for rows in BOXES]
    batch.images = dataclasses.replace(batch.images, precomputed=PrecomputedFeatures(features))
    batch.region_labels = RegionLabels(class_probs=[torch.rand(len(rows), CLASSES) for rows in BOXES])
    with pytest.raises(ValueError, match=r"mask_pixels to false and encoder\.config\.masked_region_feature to true"):
        model.mask_regions(batch)


# Boxes that a user hides


@pytest.mark.parametrize("teacher", ["frozen", "current", "file"])
def test_a_users_boxes_are_hidden_and_no_others(teacher):
    model = make_model(region_probability=1.0, teacher=teacher).eval()
    hidden = [[6.0, 6.0, 40.0, 40.0], [60.0, 5.0, 90.0, 25.0]]
    batch = model.mask_regions(with_user_boxes(hidden))
    assert batch.boxes[0].tolist() == [*hidden, *BOXES[0][1:]]  # the first candidate is the first hidden one
    assert batch.masked_regions.is_masked[0].tolist() == [True, True, False, False]
    assert torch.equal(batch.masked_regions.is_labelled[0], batch.masked_regions.is_masked[0])
    assert batch.boxes[1].tolist() == BOXES[1] and not batch.masked_regions.is_masked[1].any()
    assert batch.pixel_masks[0].tolist() == [[6, 6, 41, 41], [60, 5, 91, 26]]
    if teacher == "file":
        assert batch.region_labels == RegionLabels()  # the file's labels belong to other boxes
    else:
        assert [len(rows) for rows in batch.region_labels.class_probs] == [4, 2]


@pytest.mark.parametrize("teacher", ["frozen", "file"])
def test_a_users_boxes_come_before_the_detectors_own(teacher):
    model = make_model(teacher=teacher, max_detected_regions=4).eval()
    hidden = [[6.0, 6.0, 40.0, 40.0]]
    batch = model.mask_regions(with_user_boxes(hidden, boxes=False))
    assert batch.boxes[0][0].tolist() == hidden[0] and 1 <= len(batch.boxes[0]) <= 5
    assert [int(rows.sum()) for rows in batch.masked_regions.is_masked] == [1, 0]


def test_a_user_who_hides_nothing_sees_everything():
    model = make_model(**EVERY).eval()
    batch = model.mask_regions(with_user_boxes([]))
    assert [rows.tolist() for rows in batch.boxes] == BOXES
    assert not any(rows.any() for rows in [*batch.masked_regions.is_masked, *batch.masked_regions.is_labelled])
    assert all(rows.any() for rows in model.mask_regions(make_batch()).masked_regions.is_masked)


def test_a_users_boxes_are_painted_black_where_training_paints_them_black():
    model = make_model(masked_pixels="black").eval()
    batch = with_user_boxes([[6.0, 6.0, 40.0, 40.0]])
    before = batch.images.pixels.clone()
    prepared = model.mask_regions(batch)
    assert prepared.pixel_masks is None and torch.equal(batch.images.pixels, before)
    colour = -torch.tensor(model.detector.config.input.pixel_mean)[:, None, None]
    assert (prepared.images.pixels[0, :, 6:41, 6:41] == colour).all()
    assert torch.equal(prepared.images.pixels[0, :, 41:], before[0, :, 41:])
    assert torch.equal(prepared.images.pixels[1], before[1])


def test_labelling_alone_hides_nothing():
    model = make_model().eval()
    batch = label_regions(make_batch(), model.detector, model.teacher, model.task.region_masking)
    assert batch.masked_regions is None and batch.pixel_masks is None and batch.region_limit is None
    assert isinstance(model.mask_regions(make_batch()).masked_regions, RegionMasks)
