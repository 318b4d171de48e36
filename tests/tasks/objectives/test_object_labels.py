"""Labels of regions from a detector: which regions count, how much, and that they can be learned without a leak."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.examples import Targets
from e2e_vl.structures import RegionLabels
from e2e_vl.tasks.config import AttributeLabelsConfig, ObjectLabelsConfig
from e2e_vl.tasks.objectives.regions import AttributeLabels, ObjectLabels
from tests.tasks.objectives.tiny_objectives import SIZES, Inputs, make_inputs

CLASSES = SIZES.num_classes


def make_objective(**settings) -> ObjectLabels:
    torch.manual_seed(0)
    return ObjectLabels(SIZES, ObjectLabelsConfig(**{"weight": 1.0, "classes": CLASSES} | settings))


def with_labels(inputs: Inputs) -> None:
    """Image a has two candidate boxes and image b one."""
    inputs.batch.region_labels = RegionLabels(
        detected_classes=[torch.tensor([2, 0]), torch.tensor([1])],
        detected_scores=[torch.tensor([0.5, 0.25]), torch.tensor([1.0])],
        detected_attributes=[torch.tensor([4, 3]), torch.tensor([0])],
        detected_attribute_scores=[torch.tensor([0.1, 0.2]), torch.tensor([0.4])],
    )


def test_every_region_counts_as_much_as_the_detector_was_sure():
    inputs, objective = make_inputs(), make_objective(weight=1 / 0.15)
    with_labels(inputs)
    output = inputs.run(objective, Targets())
    states = inputs.encoded.regions[[0, 0, 1], [1, 2, 1]]  # row 0 of a text is the whole image
    torch.testing.assert_close(output.logits, objective.output(states))
    each = F.cross_entropy(output.logits, torch.tensor([2, 0, 1]), reduction="none")
    expected = (each * torch.tensor([0.5, 0.25, 1.0])).sum() / 3 / 0.15
    torch.testing.assert_close(output.loss.mean, expected)
    assert output.text.tolist() == [0, 0, 1]
    assert output.is_right.tolist() == (output.logits.argmax(dim=1) == torch.tensor([2, 0, 1])).tolist()


def test_the_papers_side():
    inputs, objective = make_inputs(), make_objective(regions="masked", confidence=False)
    with_labels(inputs)
    output = inputs.run(objective, Targets())
    assert output.text.tolist() == [0, 1]  # the first box of either image is to be predicted
    torch.testing.assert_close(output.loss.mean, F.cross_entropy(output.logits, torch.tensor([2, 1])))


def test_attributes():
    inputs = make_inputs()
    with_labels(inputs)
    objective = AttributeLabels(SIZES, AttributeLabelsConfig(weight=1.0, classes=5))
    output = inputs.run(objective, Targets())
    each = F.cross_entropy(output.logits, torch.tensor([4, 3, 0]), reduction="none")
    torch.testing.assert_close(output.loss.mean, (each * torch.tensor([0.1, 0.2, 0.4])).mean())


def test_labels_that_are_missing_or_do_not_fit():
    inputs, objective = make_inputs(), make_objective()
    with pytest.raises(ValueError, match=r"without the classes that a detector found.*object_labels\.weight to 0"):
        inputs.run(objective, Targets())
    with_labels(inputs)
    inputs.batch.region_labels.detected_scores = None
    with pytest.raises(ValueError, match="or without their scores"):
        inputs.run(objective, Targets())
    with_labels(inputs)
    with pytest.raises(ValueError, match="has the label 2 among the classes"):
        inputs.run(make_objective(classes=2), Targets())
    with pytest.raises(ValueError, match=r"object_labels\.regions is 'some'; it must be one of all, masked"):
        ObjectLabelsConfig(regions="some")


def test_nothing_is_learned_where_a_user_hides_regions():
    inputs = make_inputs()
    inputs.batch.boxes_to_mask = [torch.zeros(0, 4)] * 2
    output = inputs.run(make_objective(), Targets())
    assert len(output.logits) == 0 and output.loss.mean == 0


def test_it_is_learned_from_the_states_alone():
    """The labels reach the loss only: other labels change no logit, and the loss falls."""
    inputs, objective = make_inputs(), make_objective(confidence=False)
    with_labels(inputs)
    before = inputs.run(objective, Targets())
    other = dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch))
    other.batch.region_labels = RegionLabels(detected_classes=[torch.tensor([0, 1]), torch.tensor([2])])
    assert torch.equal(other.run(objective, Targets()).logits, before.logits)
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.1)
    for _ in range(60):
        optimiser.zero_grad()
        inputs.run(objective, Targets()).loss.mean.backward()
        optimiser.step()
    after = inputs.run(objective, Targets())
    assert after.is_right.all() and after.loss.mean < 0.1 * before.loss.mean
