"""Objectives on regions: which regions contribute to the losses, and their targets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from e2e_vl.structures import DetectedLabels, RegionLabels
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import (
    AttributeLabelsConfig,
    MaskedRegionsConfig,
    ObjectLabelsConfig,
    PretrainingConfig,
    RegionFeaturesConfig,
)
from e2e_vl.tasks.objectives.regions import AttributeLabels, MaskedRegions, ObjectLabels, RegionFeatureRegression
from tests.tasks.objectives.tiny_objectives import CLASSES, SIZES, Inputs, make_inputs


def masked_regions(**settings) -> MaskedRegions:
    torch.manual_seed(0)
    return MaskedRegions(SIZES, MaskedRegionsConfig(**{"classes": CLASSES} | settings))


def with_probs(inputs: Inputs, seed: int = 2) -> list[torch.Tensor]:
    """Class distributions of the candidate boxes, also put into the batch."""
    generator = torch.Generator().manual_seed(seed)
    probs = [torch.rand(len(rows), CLASSES, generator=generator).softmax(dim=1) for rows in inputs.batch.boxes]
    inputs.batch.region_labels = RegionLabels(class_probs=probs)
    return probs


def test_loss_is_a_cross_entropy_with_the_distribution_or_its_best_class():
    inputs, objective = make_inputs(), masked_regions(weight=3.0)
    probs = with_probs(inputs)
    output = inputs.run(objective, Targets())
    # box 0 of either image is labelled; row 0 of a text is the whole image
    logits = objective.classify(inputs.encoded.regions[[0, 1], [1, 1]])
    torch.testing.assert_close(output.logits, logits)
    expected = -(torch.stack([probs[0][0], probs[1][0]]) * logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(output.loss.mean, 3 * expected)
    assert output.loss.count == 2 and output.text.tolist() == [0, 1]
    best = torch.stack([probs[0][0], probs[1][0]]).argmax(dim=1)
    assert output.is_correct.tolist() == (logits.argmax(dim=1) == best).tolist()
    output.loss.mean.backward()
    assert (inputs.encoded.regions.grad.abs().sum(dim=2) > 0).nonzero().tolist() == [[0, 1], [1, 1]]
    output = inputs.run(masked_regions(labels="class"), Targets())  # paper
    torch.testing.assert_close(output.loss.mean, F.cross_entropy(output.logits, best))


def test_distributions_that_do_not_add_up_to_one_are_left_out():
    inputs, objective = make_inputs(), masked_regions()
    with_probs(inputs)[0][0] *= 0.85
    output = inputs.run(objective, Targets())
    assert output.loss.count == 1 and output.text.tolist() == [1] and output.logits.shape == (1, CLASSES)
    inputs.batch.region_labels.class_probs[1][0] *= 1.05  # near enough
    assert inputs.run(objective, Targets()).loss.count == 1


def test_regions_without_labels_do_not_contribute():
    """For example those that a user masks in a run with labels from a file."""
    inputs, objective = make_inputs(), masked_regions()
    output = inputs.run(objective, Targets())
    assert output.loss.count == 0 and output.loss.mean == 0 and output.logits.shape == (0, CLASSES)


def test_another_number_of_classes_is_an_error():
    inputs = make_inputs()
    with_probs(inputs)
    with pytest.raises(UserError, match=r"have 4 columns, but .*masked_regions\.classes is 7"):
        inputs.run(masked_regions(classes=7, labels="class"), Targets())
    detector = SimpleNamespace(num_classes=CLASSES - 1)
    masked_regions(classes=7).check(None, detector, PretrainingConfig(teacher="file"))
    with pytest.raises(UserError, match=r"classes is 7, the detector has 3 classes and the background"):
        masked_regions(classes=7).check(None, detector, PretrainingConfig())


def with_detected(inputs: Inputs) -> None:
    """Image a has two candidate boxes and image b one."""
    inputs.batch.region_labels = RegionLabels(
        detected=DetectedLabels(
            classes=[torch.tensor([2, 0]), torch.tensor([1])],
            scores=[torch.tensor([0.5, 0.25]), torch.tensor([1.0])],
            attributes=[torch.tensor([4, 3]), torch.tensor([0])],
            attribute_scores=[torch.tensor([0.1, 0.2]), torch.tensor([0.4])],
        )
    )


def object_labels(**settings) -> ObjectLabels:
    return ObjectLabels(SIZES, ObjectLabelsConfig(**{"weight": 1.0, "classes": SIZES.num_classes} | settings))


@pytest.mark.parametrize(
    ("objective", "texts", "labels", "weights"),
    [
        (object_labels(weight=1 / 0.15), [0, 0, 1], [2, 0, 1], torch.tensor([0.5, 0.25, 1.0]) / 0.15),
        # the first box of either image is masked; without confidence as in the paper
        (object_labels(regions="masked", confidence=False), [0, 1], [2, 1], torch.ones(2)),
        (
            AttributeLabels(SIZES, AttributeLabelsConfig(weight=1.0, classes=5)),
            *([0, 0, 1], [4, 3, 0], torch.tensor([0.1, 0.2, 0.4])),
        ),
    ],
)
def test_every_region_is_weighted_by_its_score(objective, texts, labels, weights):
    inputs = make_inputs()
    with_detected(inputs)
    output = inputs.run(objective, Targets())
    rows = [1, 2, 1] if len(texts) == 3 else [1, 1]  # row 0 of a text is the whole image
    torch.testing.assert_close(output.logits, objective.output(inputs.encoded.regions[texts, rows]))
    each = F.cross_entropy(output.logits, torch.tensor(labels), reduction="none")
    torch.testing.assert_close(output.loss.mean, (each * weights).mean())
    assert output.text.tolist() == texts
    assert output.is_correct.tolist() == (output.logits.argmax(dim=1) == torch.tensor(labels)).tolist()


def test_missing_labels_are_an_error_unless_a_user_masks_regions():
    inputs = make_inputs()
    with pytest.raises(UserError, match=r"no detected classes; .*object_labels\.weight"):
        inputs.run(object_labels(), Targets())
    inputs.batch.masking.boxes_to_mask = [torch.zeros(0, 4)] * 2
    output = inputs.run(object_labels(), Targets())
    assert len(output.logits) == 0 and output.loss.mean == 0


def region_features(**settings) -> RegionFeatureRegression:
    torch.manual_seed(0)
    return RegionFeatureRegression(SIZES, RegionFeaturesConfig(**{"weight": 1.0} | settings))


def with_features(inputs: Inputs) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    features = [3 * torch.randn(len(rows), SIZES.feature_dim, generator=generator) for rows in inputs.batch.boxes]
    inputs.batch.region_labels = RegionLabels(features=features)
    return features


@pytest.mark.parametrize(
    ("settings", "divisor", "error"),
    [
        ({"weight": 1 / 0.15}, 3 * 0.15, F.smooth_l1_loss),  # official: over all three regions
        ({"loss": "l2", "average": "masked"}, 2, F.mse_loss),  # paper
    ],
)
def test_the_masked_regions_count(settings, divisor, error):
    inputs, objective = make_inputs(), region_features(**settings)
    features = with_features(inputs)
    output = inputs.run(objective, Targets())
    predicted = objective.output(inputs.encoded.regions[[0, 1], [1, 1]])
    torch.testing.assert_close(output.logits, predicted)
    truth = torch.stack([features[0][0], features[1][0]])
    expected = error(predicted, truth, reduction="none").mean(dim=1).sum() / divisor
    torch.testing.assert_close(output.loss.mean, expected)
    assert output.text.tolist() == [0, 1]


def test_the_target_is_a_constant():
    inputs = make_inputs()
    features = with_features(inputs)
    features[0].requires_grad_()
    inputs.run(region_features(), Targets()).loss.mean.backward()
    assert features[0].grad is None
