"""Regions that get another region's feature, and regions whose feature is hidden on saved features."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from detector.config import DetectorConfig
from detector.precomputed import PrecomputedDetector
from detector.structures import ImageBatch, PrecomputedFeatures, Regions
from e2e_vl.encoders.lxmert import LxmertEncoder, LxmertEncoderConfig
from e2e_vl.examples import Targets
from e2e_vl.model import VisionLanguageModel
from e2e_vl.region_masking import (
    RegionMasking,
    label_regions,
    mask_regions,
    replace_features,
    sample_masked_regions,
    sample_replacements,
)
from e2e_vl.run.build import build_objectives
from e2e_vl.structures import Ability, Batch, RegionLabels, RegionMasks, TextBatch
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask
from tests.encoders.small import LXMERT as SMALL
from tests.tasks.tiny_pretraining import make_batch, make_model

COUNTS, WIDTH = (3, 0, 2), SMALL["feature_dim"]
OFFICIAL = RegionMasking(mask_probability=0.8, replace_probability=0.1, pixels=False, teacher="file")
OBJECTIVES = {
    **dict.fromkeys(("masked_words", "masked_text", "masked_regions"), 0.0),
    "object_labels": {"weight": 1.0, "classes": 4},
    "region_features": 1.0,
}


def test_shares_of_the_official_code():
    chosen, hidden, swapped = sample_masked_regions(100_000, np.random.default_rng(0), 0.15, 0.8, 0.1)
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert hidden[chosen].mean() == pytest.approx(0.8, abs=0.01)
    assert swapped[chosen].mean() == pytest.approx(0.1, abs=0.01)
    assert not (hidden & swapped).any() and not (swapped & ~chosen).any()
    chosen, hidden, swapped = sample_masked_regions(1000, np.random.default_rng(0))
    assert not swapped.any()


def test_donors_are_drawn_image_by_image():
    swapped = np.ones(30_000, dtype=bool)
    replacement_index = sample_replacements(swapped, COUNTS, np.random.default_rng(0))
    shares = np.bincount(replacement_index + 1, minlength=6) / len(replacement_index)
    np.testing.assert_allclose(shares, [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6], atol=0.01)  # -1: an empty image
    assert (sample_replacements(~swapped, COUNTS, np.random.default_rng(0)) == -1).all()


@pytest.mark.parametrize("whole_image", [False, True])
def test_swapped_regions_have_the_features_of_their_donors(whole_image):
    features = [torch.rand(count + whole_image, 4) for count in COUNTS]
    boxes = [torch.rand(count + whole_image, 4) for count in COUNTS]
    regions = Regions(boxes, features, [torch.zeros(len(rows), 0) for rows in boxes])
    replacement_index = [torch.tensor([-1, 4, 0]), torch.zeros(0, dtype=torch.long), torch.tensor([2, -1])]
    nothing = [torch.zeros(count, dtype=torch.bool) for count in COUNTS]
    found = replace_features(
        regions, RegionMasks(nothing, nothing, replacement_index), whole_image=whole_image
    ).features
    first = int(whole_image)
    for rows, own in zip(found, features, strict=True):
        assert torch.equal(rows[:first], own[:first])
    assert torch.equal(found[0][first:], torch.stack([features[0][first], features[2][first + 1], features[0][first]]))
    assert torch.equal(found[2][first:], torch.stack([features[0][first + 2], features[2][first + 1]]))
    assert replace_features(regions, RegionMasks(nothing, nothing), whole_image=whole_image) is regions
    assert replace_features(regions, None, whole_image=whole_image) is regions


def saved_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    boxes = [torch.tensor([[0.0, 0, 10, 10], [5, 5, 30, 20], [2, 3, 20, 30]])[:count] for count in (3, 2)]
    features = [torch.randn(len(rows), WIDTH, generator=generator) for rows in boxes]
    sizes = torch.tensor([[40, 40], [32, 40]])
    ids = torch.randint(5, 40, (2, 4), generator=generator)
    return Batch(
        images=ImageBatch(torch.zeros(2, 3, 0, 0), sizes, sizes, ["a", "b"], PrecomputedFeatures(features)),
        boxes=boxes,
        texts=TextBatch(ids, torch.zeros_like(ids), torch.ones_like(ids).bool()),
        image_index=torch.tensor([[0], [1]]),
        targets=PretrainingTargets({name: Targets() for name in ("object_labels", "region_features")}),
        region_labels=RegionLabels(
            detected_classes=[torch.tensor([1, 2, 3]), torch.tensor([0, 1])],
            detected_scores=[torch.rand(len(rows), generator=generator) for rows in boxes],
        ),
        seeds=torch.tensor([3, 4]),
    )


def saved_model(**settings) -> VisionLanguageModel:
    torch.manual_seed(0)
    config = LxmertEncoderConfig(**SMALL, masked_region_feature=True)
    sizes = Sizes(config.hidden_size, config.vocab_size, WIDTH)
    own = {
        "teacher": "file",
        "mask_pixels": False,
        "max_length": None,
        "mask_probability": 0.8,
        "replace_probability": 0.1,
    }
    task = PretrainingTask(
        config.hidden_size,
        PretrainingConfig(**own | settings),
        build_objectives(OBJECTIVES, sizes),
    )
    assert Ability.MASKED_FEATURES in task.needs
    detector = PrecomputedDetector(DetectorConfig())
    detector.feature_dim = WIDTH
    return VisionLanguageModel(detector, LxmertEncoder(config), task).eval()


def test_hidden_features_do_not_leak_into_what_predicts_them():
    """Another feature of a hidden region changes the target, and nothing that the model computes."""
    model = saved_model(region_probability=0.6, mask_probability=1.0, replace_probability=0.0)
    batch = saved_batch()
    first = model(batch)
    hidden = [rows.clone() for rows in first.batch.masked_regions.is_masked]
    assert any(rows.any() for rows in hidden) and not all(rows.all() for rows in hidden)
    features = [
        rows + 3 * is_masked[:, None] for rows, is_masked in zip(batch.images.precomputed.features, hidden, strict=True)
    ]
    images = dataclasses.replace(batch.images, precomputed=PrecomputedFeatures(features))
    second = model(dataclasses.replace(batch, images=images))
    for name in OBJECTIVES.keys() & first.task.parts.keys():
        assert torch.equal(first.task.parts[name], second.task.parts[name])
    assert first.losses["region_features"].mean != second.losses["region_features"].mean
    assert first.losses["object_labels"].mean == second.losses["object_labels"].mean


def test_saved_features_are_the_target_whatever_the_model_sees():
    model, batch = saved_model(region_probability=1.0, mask_probability=0.0, replace_probability=1.0), saved_batch()
    output = model(batch)
    assert all((rows >= 0).all() for rows in output.batch.masked_regions.replacement_index)
    given = torch.cat(batch.images.precomputed.features)
    for rows, replacement_index in zip(
        output.regions.features, output.batch.masked_regions.replacement_index, strict=True
    ):
        assert torch.equal(rows, given[replacement_index])
    assert output.batch.region_labels.features is batch.images.precomputed.features
    assert set(output.losses) == {"object_labels", "region_features"}


def test_the_draws_of_an_image_follow_from_the_seed_of_its_first_text():
    model, batch = saved_model(region_probability=0.7), saved_batch()
    one, other = model.mask_regions(batch).masked_regions, model.mask_regions(batch).masked_regions
    changed = model.mask_regions(dataclasses.replace(batch, seeds=torch.tensor([3, 99]))).masked_regions
    for name in ("is_labelled", "is_masked", "replacement_index"):
        assert all(map(torch.equal, getattr(one, name), getattr(other, name)))
        assert torch.equal(getattr(one, name)[0], getattr(changed, name)[0])


def test_donors_are_only_drawn_where_they_are_asked_for():
    assert (
        mask_regions(
            saved_batch(), None, dataclasses.replace(OFFICIAL, replace_probability=0.0)
        ).masked_regions.replacement_index
        is None
    )
    assert mask_regions(saved_batch(), None, OFFICIAL).masked_regions.replacement_index is not None


def test_file_labels_may_be_classes_or_distributions():
    labelled = label_regions(saved_batch(), None, None, OFFICIAL)
    assert labelled.region_labels.detected_classes is not None and labelled.region_labels.class_probs is None
    with pytest.raises(ValueError, match="without class distributions of their boxes"):
        label_regions(dataclasses.replace(saved_batch(), region_labels=RegionLabels()), None, None, OFFICIAL)


def test_a_teacher_says_what_it_found():
    model = make_model()
    labels = model.mask_regions(make_batch()).region_labels
    for probabilities, classes, scores in zip(
        labels.class_probs, labels.detected_classes, labels.detected_scores, strict=True
    ):
        best = probabilities[:, :-1].max(dim=1)  # without the background
        assert torch.equal(classes, best.indices) and torch.equal(scores, best.values)
    first = make_model(background="first").mask_regions(make_batch()).region_labels
    assert all(map(torch.equal, first.detected_classes, labels.detected_classes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replace_probability": 1.5}, r"replace_probability is 1\.5; it must be from 0 to 1"),
        ({"mask_probability": 0.9, "replace_probability": 0.2}, "together must not be above 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainingConfig(**settings)
