"""Masked regions: which count, what their truth is, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.examples import Targets
from e2e_vl.region_masking import RegionMasking
from e2e_vl.structures import RegionLabels, RegionMasks
from e2e_vl.tasks.config import MaskedRegionsConfig
from e2e_vl.tasks.objectives.regions import MaskedRegions
from tests.tasks.objectives.tiny_objectives import CLASSES, SIZES, Inputs, make_inputs


def make_objective(**settings) -> MaskedRegions:
    torch.manual_seed(0)
    return MaskedRegions(SIZES, MaskedRegionsConfig(**{"classes": CLASSES} | settings))


def with_labels(inputs: Inputs, seed: int = 2) -> list[torch.Tensor]:
    """Class distributions of the candidate boxes, also put into the batch."""
    generator = torch.Generator().manual_seed(seed)
    probs = [torch.rand(len(rows), CLASSES, generator=generator).softmax(dim=1) for rows in inputs.batch.boxes]
    inputs.batch.region_labels = RegionLabels(class_probs=probs)
    return probs


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_loss_is_a_cross_entropy_with_the_whole_distribution(weight):
    inputs, objective = make_inputs(), make_objective(weight=weight)
    probs = with_labels(inputs)
    output = inputs.run(objective, Targets())
    # box 0 of either image is labelled; row 0 of a text is the whole image
    logits = objective.classify(inputs.encoded.regions[[0, 1], [1, 1]])
    torch.testing.assert_close(output.logits, logits)
    expected = -(torch.stack([probs[0][0], probs[1][0]]) * logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(output.loss.mean, weight * expected)
    assert output.loss.count == 2 and output.text.tolist() == [0, 1]
    best = torch.stack([probs[0][0], probs[1][0]]).argmax(dim=1)
    assert output.is_right.tolist() == (logits.argmax(dim=1) == best).tolist()


def test_the_paper_learns_the_best_class():
    inputs, objective = make_inputs(), make_objective(labels="class")
    probs = with_labels(inputs)
    output = inputs.run(objective, Targets())
    best = torch.stack([probs[0][0], probs[1][0]]).argmax(dim=1)
    torch.testing.assert_close(output.loss.mean, F.cross_entropy(output.logits, best))


def test_a_region_counts_for_every_text_that_reads_it_in_either_slot():
    inputs, objective = make_inputs([[0, 1], [1, 0], [1, -1]]), make_objective()
    probs = with_labels(inputs)
    output = inputs.run(objective, Targets())
    # text 0: whole, a0, a1, whole, b0; text 1: whole, b0, whole, a0, a1; text 2: whole, b0
    assert output.text.tolist() == [0, 0, 1, 1, 2]
    logits = objective.classify(inputs.encoded.regions[[0, 0, 1, 1, 2], [1, 4, 1, 3, 1]])
    truth = torch.stack([probs[image][0] for image in (0, 1, 1, 0, 1)])
    torch.testing.assert_close(output.loss.mean, -(truth * logits.log_softmax(dim=1)).sum(dim=1).mean())


def test_only_labelled_regions_get_gradients():
    inputs, objective = make_inputs(), make_objective()
    with_labels(inputs)
    inputs.run(objective, Targets()).loss.mean.backward()
    assert (inputs.encoded.regions.grad.abs().sum(dim=2) > 0).nonzero().tolist() == [[0, 1], [1, 1]]


def test_distributions_that_do_not_add_up_to_one_are_left_out():
    inputs, objective = make_inputs(), make_objective()
    with_labels(inputs)[0][0] *= 0.85
    output = inputs.run(objective, Targets())
    assert output.loss.count == 1 and output.text.tolist() == [1] and output.logits.shape == (1, CLASSES)
    inputs.batch.region_labels.class_probs[1][0] *= 1.05  # near enough
    assert inputs.run(objective, Targets()).loss.count == 1


def test_what_nobody_labelled_does_not_contribute():
    """Regions that a user hides in a run that learned from a file."""
    inputs, objective = make_inputs(), make_objective()
    output = inputs.run(objective, Targets())
    assert output.loss.count == 0 and output.loss.mean == 0 and output.logits.shape == (0, CLASSES)


def test_no_labelled_region_is_loss_zero_with_gradients():
    inputs, objective = make_inputs(), make_objective()
    with_labels(inputs)
    none = [torch.zeros(len(rows), dtype=torch.bool) for rows in inputs.batch.boxes]
    inputs.batch.masked_regions = RegionMasks(none, none)
    output = inputs.run(objective, Targets())
    assert output.loss.mean == 0
    output.loss.mean.backward()
    assert all(not parameter.grad.any() for parameter in objective.parameters())
    assert not inputs.encoded.regions.grad.any()


def test_losses_are_never_computed_in_half_precision():
    inputs, objective = make_inputs(), make_objective()
    with_labels(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = inputs.run(objective, Targets())
    assert output.logits.dtype == output.loss.total.dtype == torch.float32


def test_distributions_of_another_width_are_an_error():
    inputs = make_inputs()
    with_labels(inputs)
    with pytest.raises(ValueError, match=r"have 4 columns, but .*masked_regions\.classes is 7"):
        inputs.run(make_objective(classes=7), Targets())


def test_a_detector_that_labels_must_have_the_classes():
    detector = SimpleNamespace(num_classes=CLASSES - 1)
    make_objective().check(None, detector, RegionMasking())
    make_objective(classes=7).check(None, detector, RegionMasking(teacher="file"))
    with pytest.raises(ValueError, match="classes is 7, but the detector has 3 classes and the background"):
        make_objective(classes=7).check(None, detector, RegionMasking())


def test_it_is_what_regions_are_hidden_for():
    assert MaskedRegions.predicts_regions and not MaskedRegions.reads_words
    assert MaskedRegionsConfig().classes == 1601  # Visual Genome's
