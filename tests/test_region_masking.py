"""Masked regions: labels come before, choices depend on seeds, and pixels and features are gone."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detector.images import make_image_batch
from detector.structures import ImageBatch, PrecomputedFeatures, Regions
from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig, VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.region_masking import (
    label_regions,
    mask_regions,
    replace_features,
    sample_masked_regions,
    sample_replacements,
    truncate_batch,
    truncate_texts,
    truncated_lengths,
)
from e2e_vl.structures import Batch, DetectedLabels, MaskingBatch, RegionLabels, RegionMasks, TextBatch
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.pretraining import PretrainingTargets
from tests.tasks.tiny_pretraining import (
    BOXES,
    CLASSES,
    PAPER,
    SEP,
    VOCABULARY,
    assert_same,
    is_same,
    make_batch,
    make_detector,
    make_model,
    make_pairs,
    put_together,
)


def about_one_image(**changes: Any) -> Batch:
    return dataclasses.replace(make_batch(), image_index=torch.tensor([[0], [0], [0], [-1]]), **changes)


def with_other_pixels(batch: Batch, masked: list[Tensor]) -> Batch:
    """Noise in these boxes, in the last row and column too."""
    pixels = batch.images.pixels.clone()
    torch.manual_seed(1)
    for own, rows in zip(pixels, masked, strict=True):
        for x1, y1, x2, y2 in rows.int().tolist():
            own[:, y1 : y2 + 1, x1 : x2 + 1] += 100 * torch.randn(3, y2 + 1 - y1, x2 + 1 - x1)
    return dataclasses.replace(batch, images=dataclasses.replace(batch.images, pixels=pixels))


# The choice


@pytest.mark.parametrize(("mask", "replace"), [(0.9, 0.0), (1.0, 0.0), (0.8, 0.1)])
def test_shares_of_regions_that_are_chosen_masked_and_replaced(mask, replace):
    """VL-BERT's official code, the papers, LXMERT's official code."""
    chosen, masked, replaced = sample_masked_regions(100_000, np.random.default_rng(1), 0.15, mask, replace)
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert masked[chosen].mean() == pytest.approx(mask, abs=0.01)
    assert replaced[chosen].mean() == pytest.approx(replace, abs=0.01)
    assert not masked[~chosen].any() and not (masked & replaced).any() and not (replaced & ~chosen).any()


def test_no_region_is_forced():
    nothing = [sample_masked_regions(3, np.random.default_rng(seed))[0].any() for seed in range(200)]
    assert np.mean(nothing) == pytest.approx(1 - 0.85**3, abs=0.1)


def test_choice_depends_on_the_seed_of_the_first_text():
    model, chosen = make_model(region_probability=0.5).eval(), []
    for seeds in ([11, 12, 13, 14], [11, 5, 13, 6], [5, 12, 6, 14]):  # the second changes those of later texts
        batch = dataclasses.replace(make_batch(), masking=MaskingBatch(torch.tensor(seeds)))
        chosen.append(torch.cat(model.prepare_regions(batch).masking.masked_regions.is_labelled))
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])


def test_what_was_masked_before_stays_as_it_is():
    """Batches are recorded that way; nothing is labelled, drawn or cut again."""
    model = make_model(max_length=5).eval()
    batch = model.prepare_regions(make_batch())
    assert model.prepare_regions(batch) is batch and model(batch).batch is batch


# Pixels


def test_masked_pixels_are_those_of_a_black_image():
    """Zeros before the mean is subtracted, in the last row and column of the box too."""
    photo = torch.randint(1, 255, (12, 16, 3)).byte().numpy()
    painted = photo.copy()
    painted[3:9, 5:12] = 0
    images, expected = (make_image_batch([one], [(12, 16)], ["a"]) for one in (photo, painted))
    before = images.pixels.clone()
    batch = about_one_image(images=images, boxes=[torch.tensor([[5.0, 3, 11, 8]])])
    masked = mask_regions(batch, PretrainingConfig(region_probability=1.0, mask_probability=1.0, masked_pixels="black"))
    assert torch.equal(masked.images.pixels, expected.pixels) and masked.masking.pixel_masks is None
    assert torch.equal(images.pixels, before)


def test_the_teacher_sees_what_is_painted_black():
    every = {"region_probability": 1.0, "mask_probability": 1.0}
    models = [make_model(masked_pixels=colour, teacher="current", **every).eval() for colour in ("mean", "black")]
    prepared = [model.prepare_regions(make_batch()) for model in models]
    assert [batch.masking.pixel_masks is None for batch in prepared] == [False, True]
    assert_same(*(torch.cat(batch.region_labels.class_probs) for batch in prepared))


# Labels


@pytest.mark.parametrize("boxes", [True, False])
def test_background_comes_first_if_asked_for(boxes):
    """Then class k of the detector is column k + 1, as in files of bottom-up attention."""
    last, first = (make_model(background=place, region_probability=1.0).eval() for place in ("last", "first"))
    ours, theirs = last.prepare_regions(make_batch(boxes=boxes)), first.prepare_regions(make_batch(boxes=boxes))
    one, other = (torch.cat(batch.region_labels.class_probs) for batch in (ours, theirs))
    assert len(one) > 0 and not is_same(one, other)
    assert_same(one.roll(1, dims=1), other)
    assert all(map(torch.equal, ours.region_labels.detected.classes, theirs.region_labels.detected.classes))


def test_region_labels_are_the_teachers_view_of_the_whole_image():
    model = make_model(norm="BN", teacher="current", region_probability=1.0).train()
    batch = make_batch()
    before = {name: buffer.clone() for name, buffer in model.detector.named_buffers()}
    prepared = model.prepare_regions(batch)
    assert model.detector.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.detector.named_buffers())
    model.detector.eval()
    regions, labels = model.detector(batch.images, batch.boxes), prepared.region_labels
    probabilities, features = torch.cat(labels.class_probs), torch.cat(labels.features)
    torch.testing.assert_close(probabilities, torch.cat(regions.class_logits).softmax(dim=1))
    torch.testing.assert_close(features, torch.cat(regions.features))
    assert not probabilities.requires_grad and not features.requires_grad
    best = probabilities[:, :-1].max(dim=1)  # without the background
    assert torch.equal(torch.cat(labels.detected.classes), best.indices)
    assert torch.equal(torch.cat(labels.detected.scores), best.values)
    assert (
        batch.masking.masked_regions is None and batch.region_labels == RegionLabels()
    )  # the caller's batch is untouched


@pytest.mark.parametrize("teacher", ["current", "file"])
def test_annotated_classes_stay_beside_what_a_teacher_says(teacher):
    model = make_model(teacher=teacher).eval()
    classes = [torch.arange(len(rows)) for rows in BOXES]
    given = RegionLabels(classes=classes, class_probs=[torch.rand(len(rows), CLASSES) for rows in BOXES])
    labels = model.prepare_regions(dataclasses.replace(make_batch(), region_labels=given)).region_labels
    assert labels.classes is classes
    assert (labels.class_probs is given.class_probs) == (teacher == "file")
    boxes_to_mask = [torch.tensor([[6.0, 6.0, 40.0, 40.0]]), torch.zeros(0, 4)]
    masked = model.prepare_regions(
        dataclasses.replace(make_batch(), region_labels=given, masking=MaskingBatch(boxes_to_mask=boxes_to_mask))
    )
    assert masked.region_labels.classes is None  # the boxes are others now


def test_predicted_boxes_come_from_the_frozen_teacher():
    model = make_model(norm="BN", max_detected_regions=4, region_probability=0.5).train()
    assert not any(module.training for module in model.teacher.modules())
    output = model(make_batch(boxes=False))
    batch = output.batch
    counts = [len(rows) for rows in batch.boxes]
    assert counts == [len(rows) for rows in batch.region_labels.class_probs] and 0 < counts[0] <= 4
    assert counts == [len(rows) for rows in batch.region_labels.features]
    sum(loss.mean for loss in output.task.losses.values()).backward()
    assert model.detector.backbone.res2[0].conv1.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.teacher.parameters())
    nn.init.zeros_(model.detector.backbone.stem.conv1.weight)
    assert model.teacher.backbone.stem.conv1.weight.abs().sum() > 0  # a copy


def test_predicted_boxes_are_labelled_in_the_order_of_the_file():
    """A file's distributions belong to its boxes; the detector's replace them in evaluation with predicted boxes."""
    model = make_model(teacher="file", region_probability=1.0).eval()
    labels = RegionLabels(class_probs=[torch.ones(1, CLASSES) / CLASSES] * 2)
    prepared = model.prepare_regions(dataclasses.replace(make_batch(boxes=False), region_labels=labels))
    logits = torch.cat(model.detector(prepared.images, prepared.boxes).class_logits)
    assert len(logits) > 0  # the background comes first
    assert_same(torch.cat(prepared.region_labels.class_probs), logits.softmax(dim=1).roll(1, dims=1))


# Saved features


def test_whole_image_feature_leaves_out_masked_regions():
    features = torch.tensor([[100.0, 100.0], [3.0, 4.0], [1.0, 2.0]])  # the masked one comes first
    size, box = torch.tensor([[60, 90]]), torch.tensor([[5.0, 3, 11, 8]])
    saved = PrecomputedFeatures([features], torch.zeros(1, 2))
    images = ImageBatch(torch.zeros(1, 3, 0, 0), size, size, ["image"], saved)
    boxes = [torch.cat([box, box + 20, box + 40])]
    batch = about_one_image(images=images, boxes=boxes, masking=MaskingBatch(boxes_to_mask=[box]))
    changed = mask_regions(batch, PretrainingConfig(mask_pixels=False))
    assert changed.masking.masked_regions.is_masked[0].tolist() == [True, False, False]
    torch.testing.assert_close(changed.images.precomputed.image_features, torch.tensor([[2.0, 3.0]]), rtol=1e-4, atol=0)
    assert not saved.image_features.any()  # the caller's batch is untouched


def test_labels_of_a_file_must_be_there_and_precomputed_features_cannot_mask_pixels():
    """Otherwise masked regions would keep their features: the model could peek."""
    model, batch = make_model(teacher="file"), make_batch()
    with pytest.raises(ValueError, match="without class distributions"):
        model(batch)
    features = [torch.zeros(len(rows), model.detector.feature_dim) for rows in BOXES]
    batch.images = dataclasses.replace(batch.images, precomputed=PrecomputedFeatures(features))
    batch.region_labels = RegionLabels(class_probs=[torch.rand(len(rows), CLASSES) for rows in BOXES])
    with pytest.raises(ValueError, match=r"mask_pixels to false and encoder\.config\.masked_region_feature to true"):
        model.prepare_regions(batch)


# Boxes that a user masks


@pytest.mark.parametrize("teacher", ["frozen", "current", "file"])
def test_a_users_boxes_are_masked_and_no_others(teacher):
    model = make_model(region_probability=1.0, teacher=teacher, max_detected_regions=4).eval()
    masked = [[6.0, 6.0, 40.0, 40.0], [60.0, 5.0, 90.0, 25.0]]
    own = [torch.tensor(masked), torch.zeros(0, 4)]
    batches = [
        dataclasses.replace(make_batch(boxes=boxes), masking=MaskingBatch(boxes_to_mask=own)) for boxes in (True, False)
    ]
    given, proposed = map(model.prepare_regions, batches)
    assert given.boxes[0].tolist() == [*masked, *BOXES[0][1:]]  # the first candidate is the first masked one
    assert given.masking.masked_regions.is_masked[0].tolist() == [True, True, False, False]
    assert torch.equal(given.masking.masked_regions.is_labelled[0], given.masking.masked_regions.is_masked[0])
    assert given.boxes[1].tolist() == BOXES[1] and not given.masking.masked_regions.is_masked[1].any()
    assert given.masking.pixel_masks[0].tolist() == [[6, 6, 41, 41], [60, 5, 91, 26]]
    if teacher == "file":
        assert given.region_labels == RegionLabels()  # the file's labels belong to other boxes
    else:
        assert [len(rows) for rows in given.region_labels.class_probs] == [4, 2]
    assert proposed.boxes[0][:2].tolist() == masked and 2 <= len(proposed.boxes[0]) <= 6
    assert [int(rows.sum()) for rows in proposed.masking.masked_regions.is_masked] == [2, 0]


# Truncation


def by_dropping_one_by_one(text: int, regions: int, limit: int) -> tuple[int, int]:
    """The rule in its own words."""
    while text + regions > limit and text > 0 and regions > 0:
        if regions > text:
            regions -= 1
        else:
            text -= 1
    return max(text, 2), max(regions, 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 8, 19, 64])
def test_truncation_drops_from_the_longer_one(limit):
    for text in range(2, 90, 3):
        for regions in range(1, 90, 2):
            assert truncated_lengths(text, regions, limit) == by_dropping_one_by_one(text, regions, limit)


def test_truncation_keeps_the_last_wordpiece_and_the_first_regions():
    batch = make_batch()
    batch.targets.parts["masked_words"].labels[0, 5] = 30
    cut = truncate_batch(batch, 6, whole_image=True)
    assert cut.texts.attention_mask.sum(dim=1).tolist() == [3, 3, 3, 6]  # the corpus text stays
    assert cut.texts.input_ids[0, :3].tolist() == [*batch.texts.input_ids[0, :2].tolist(), SEP]
    labels = {name: cut.targets.parts[name].labels.tolist() for name in ("masked_words", "masked_text")}
    assert labels["masked_words"][0] == [-1, 9, -1, -1, -1, -1]
    assert labels["masked_text"][3] == batch.targets.parts["masked_text"].labels[3, :6].tolist()
    assert cut.targets.parts["relationship"] == batch.targets.parts["relationship"]
    assert cut.masking.region_limit.tolist() == [[2], [2], [2], [0]]
    assert cut.boxes is batch.boxes and batch.texts.attention_mask.shape[1] == 7


def test_places_in_a_text_follow_its_wordpieces():
    batch = make_batch()
    batch.texts.summary = torch.tensor([6, 0, 2, 5])  # the first text's last wordpiece
    batch.texts.region_of_token = torch.arange(28).reshape(4, 7)
    texts, index = truncate_texts(batch.texts, torch.tensor([3, 4, 3, 2]))
    assert index.tolist() == [[0, 1, 6, 3], [0, 1, 2, 3], [0, 2, 4, 3], [0, 5, 2, 3]]
    assert texts.attention_mask.sum(dim=1).tolist() == [3, 4, 3, 2]
    assert texts.summary.tolist() == [2, 0, 1, 1]
    assert texts.region_of_token.tolist() == [[0, 1, 6, -1], [7, 8, 9, 10], [14, 16, 18, -1], [21, 26, -1, -1]]


# Two images


def pairs_of(counts: tuple[int, int], length: int) -> Batch:
    """One text about two images, with these numbers of wordpieces and of candidate boxes."""
    position = torch.arange(length)[None]
    texts = TextBatch(position, position * 0, position >= 0)
    boxes = [torch.zeros(count, 4) for count in counts]
    changes = {"texts": texts, "boxes": boxes, "image_index": torch.tensor([[0, 1]]), "targets": None}
    return dataclasses.replace(make_pairs(), **changes, masking=MaskingBatch(torch.tensor([11])))


def shares_one_by_one(first: int, second: int, total: int) -> tuple[int, int]:
    """The rule in its own words: the fuller image loses a region, of two equally full ones the second."""
    while first + second > total:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


@pytest.mark.parametrize("whole_image", [True, False])
@pytest.mark.parametrize("limit", [6, 9, 12])
def test_the_fuller_image_loses_first(whole_image, limit):
    for first in range(0, 9, 2):
        for second in range(1, 9, 3):
            for length in (2, 4, 8):
                batch = pairs_of((first, second), length)
                cut = truncate_batch(batch, limit, whole_image=whole_image)
                counts = first + whole_image, second + whole_image
                text, regions = by_dropping_one_by_one(length, sum(counts), limit)
                kept = shares_one_by_one(*counts, regions)
                assert cut.texts.attention_mask.sum() == text
                assert cut.masking.region_limit.tolist() == [[count - whole_image for count in kept]]


@pytest.mark.parametrize("in_sequence", [True, False])
def test_the_model_reads_what_truncation_leaves(in_sequence):
    encoder = {"max_images": 2, "whole_image_in_sequence": in_sequence}
    model = make_model(encoder=encoder, max_length=7, region_probability=1.0).eval()
    with torch.no_grad():
        output = model(make_pairs())
    regions, limit = output.text_regions, output.batch.masking.region_limit
    positions = output.batch.texts.attention_mask.sum(dim=1) + regions.attention_mask.sum(dim=1)
    assert positions[:3].tolist() == [7] * 3, "all places are taken"
    for slot in range(2):
        own = regions.attention_mask & (regions.image_slot == slot) & ~regions.is_whole_image
        available = torch.tensor([[3, 2], [2, 3], [2, 0], [0, 0]])[:, slot]
        assert own.sum(dim=1).tolist() == limit[:, slot].minimum(available).tolist()
    assert regions.is_whole_image.sum(dim=1).tolist() == ([2, 2, 1, 0] if in_sequence else [0] * 4)
    assert output.losses["masked_regions"].count == (regions.row >= 0).sum()


# Other regions' features


COUNTS = (3, 0, 2)


def test_donors_are_drawn_image_by_image():
    replaced = np.ones(30_000, dtype=bool)
    replacement_index = sample_replacements(replaced, COUNTS, np.random.default_rng(0))
    shares = np.bincount(replacement_index + 1, minlength=6) / len(replacement_index)
    np.testing.assert_allclose(shares, [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6], atol=0.01)  # -1: an empty image
    assert (sample_replacements(~replaced, COUNTS, np.random.default_rng(0)) == -1).all()


@pytest.mark.parametrize("whole_image", [False, True])
def test_replaced_regions_have_the_features_of_their_donors(whole_image):
    features, boxes = ([torch.rand(count + whole_image, 4) for count in COUNTS] for _ in range(2))
    regions = Regions(boxes, features, [torch.zeros(len(rows), 0) for rows in boxes])
    replacement_index = [torch.tensor([-1, 4, 0]), torch.zeros(0, dtype=torch.long), torch.tensor([2, -1])]
    nothing = [torch.zeros(count, dtype=torch.bool) for count in COUNTS]
    masks = RegionMasks(nothing, nothing, replacement_index)
    found = replace_features(regions, masks, whole_image=whole_image).features
    first = int(whole_image)
    assert all(torch.equal(rows[:first], own[:first]) for rows, own in zip(found, features, strict=True))
    (one, _, three), (_, five) = features[0][first:], features[2][first:]
    assert torch.equal(found[0][first:], torch.stack([one, five, one]))
    assert torch.equal(found[2][first:], torch.stack([three, five]))
    for absent in (RegionMasks(nothing, nothing), None):
        assert replace_features(regions, absent, whole_image=whole_image) is regions


def test_saved_features_are_the_target():
    rule = PretrainingConfig(mask_pixels=False, teacher="file")
    features = [torch.rand(len(rows), 4) for rows in BOXES]
    images = dataclasses.replace(make_batch().images, precomputed=PrecomputedFeatures(features))
    labels = RegionLabels(detected=DetectedLabels(classes=[torch.arange(len(rows)) for rows in BOXES]))
    batch = label_regions(about_one_image(images=images, region_labels=labels), None, None, rule)
    assert batch.region_labels.features is features


# Masked pixels, with every encoder


SIGHTS = {  # objectives about regions; with each encoder besides words and the relation of text and image
    "vl_bert": ("masked_regions",),
    "lxmert": ("object_labels", "attribute_labels", "region_features"),
    "visual_bert": ("object_labels", "attribute_labels", "region_features"),
}


def peeking_model(name: str, mask_probability: float, encoder: dict[str, Any], **options: Any) -> VisionLanguageModel:
    """With the same random weights for every chance of a region to be masked."""
    options |= {"region_probability": 0.6, "mask_probability": mask_probability}
    if name == "vl_bert":
        return make_model(encoder=encoder | {"max_images": 2}, objectives={"relationship": 1.0}, **options).eval()
    torch.manual_seed(0)
    detector = make_detector(attributes=6)
    common = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    common |= {"feature_dim": detector.feature_dim, "initializer_range": 0.3, "max_position_embeddings": 16}
    if name == "lxmert":
        made = LxmertEncoder(PretrainedLxmertConfig(**common, l_layers=1, r_layers=1, x_layers=1, max_images=2))
    else:
        made = VisualBertEncoder(PretrainedVisualBertConfig(**common, num_hidden_layers=2, region_types=[0, 1]))
    classes = {"object_labels": CLASSES - 1, "attribute_labels": 6}
    objectives = {name: {"weight": 1.0, "classes": count} for name, count in classes.items()}
    objectives |= {"masked_words": 1.0, "relationship": 1.0, "region_features": 1.0}
    objectives |= {"masked_text": 0.0, "masked_regions": 0.0}
    return put_together(detector, made, objectives, max_length=None, **options).eval()


@pytest.mark.parametrize(
    ("name", "make", "encoder", "options"),
    [
        ("vl_bert", make_batch, {}, {"masked_pixels": "mean"}),
        ("vl_bert", make_pairs, {}, {"masked_pixels": "mean", "teacher": "current"}),
        ("vl_bert", make_pairs, PAPER, {"masked_pixels": "black"}),
        ("lxmert", make_pairs, {}, {"masked_pixels": "black"}),
        ("visual_bert", make_batch, {}, {"masked_pixels": "mean"}),
    ],
)
def test_masked_pixels_change_no_logit(name, make, encoder, options):
    """The model that could peek is caught: other pixels in the masked boxes give other labels, but the same logits."""
    model, open_model = (peeking_model(name, probability, encoder, **options) for probability in (1.0, 0.0))
    batch = make()
    parts = {key: part for key, part in batch.targets.parts.items() if key in model.task.objectives}
    parts |= {key: Targets() for key in SIGHTS[name]}
    batch = dataclasses.replace(batch, targets=PretrainingTargets(parts))
    prepared = model.prepare_regions(batch)
    masked = [rows[mask] for rows, mask in zip(prepared.boxes, prepared.masking.masked_regions.is_masked, strict=True)]
    assert sum(map(len, masked)) in range(1, sum(map(len, prepared.boxes)))
    other = with_other_pixels(batch, masked)
    with torch.no_grad():
        first, second = model(batch), model(other)
        seen = [open_model(one) for one in (batch, other)]
    for key in ("regions", "text", "summary"):
        assert_same(getattr(first.encoded, key), getattr(second.encoded, key))
    for key in parts:
        assert_same(first.task.parts[key], second.task.parts[key])
        assert key == "masked_text" or not is_same(*(output.task.parts[key] for output in seen)), key
    assert not any(rows.any() for rows in seen[0].batch.masking.masked_regions.is_masked)
    labelled = [torch.cat(output.batch.masking.masked_regions.is_labelled) for output in (first, seen[0])]
    assert torch.equal(*labelled)  # the same regions are predicted, and now they are seen
    for key in ("class_probs", "features", "detected.scores"):  # what is to be learned is another one
        learned = [operator.attrgetter(key)(output.batch.region_labels) for output in (first, second)]
        assert not is_same(*map(torch.cat, learned)), key
    for key in SIGHTS[name]:
        assert not is_same(*(output.losses[key].mean for output in (first, second))), key
