"""Regression of the features of masked regions: which count, their target, and that it is not visible."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.examples import Targets
from e2e_vl.structures import RegionLabels, RegionMasks
from e2e_vl.tasks.config import RegionFeaturesConfig
from e2e_vl.tasks.objectives.regions import RegressedFeatures
from tests.tasks.objectives.tiny_objectives import SIZES, Inputs, make_inputs


def make_objective(**settings) -> RegressedFeatures:
    torch.manual_seed(0)
    return RegressedFeatures(SIZES, RegionFeaturesConfig(**{"weight": 1.0} | settings))


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
    inputs, objective = make_inputs(), make_objective(**settings)
    features = with_features(inputs)
    output = inputs.run(objective, Targets())
    predicted = objective.output(inputs.encoded.regions[[0, 1], [1, 1]])
    torch.testing.assert_close(output.logits, predicted)
    truth = torch.stack([features[0][0], features[1][0]])
    expected = error(predicted, truth, reduction="none").mean(dim=1).sum() / divisor
    torch.testing.assert_close(output.loss.mean, expected)
    assert output.text.tolist() == [0, 1]


def test_no_masked_region_gives_a_loss_of_zero():
    inputs = make_inputs()
    with_features(inputs)
    none = [rows & False for rows in inputs.batch.masked_regions.is_labelled]
    inputs.batch.masked_regions = RegionMasks(none, none)
    for average in ("all", "masked"):
        assert inputs.run(make_objective(average=average), Targets()).loss.mean == 0


def test_the_target_is_a_constant_and_reaches_the_loss_only():
    inputs, objective = make_inputs(), make_objective()
    features = with_features(inputs)
    features[0].requires_grad_()
    first = inputs.run(objective, Targets())
    first.loss.mean.backward()
    assert features[0].grad is None
    inputs.batch.region_labels.features = [rows.detach() + 1 for rows in features]
    assert torch.equal(inputs.run(objective, Targets()).logits, first.logits)


def test_it_is_learned():
    inputs, objective = make_inputs(), make_objective()
    with_features(inputs)
    before = inputs.run(objective, Targets())
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.1)
    for _ in range(150):
        optimiser.zero_grad()
        inputs.run(objective, Targets()).loss.mean.backward()
        optimiser.step()
    after = inputs.run(objective, Targets())
    assert after.is_right.all() and after.loss.mean < 0.1 * before.loss.mean


def test_wrong_settings_and_missing_targets():
    with pytest.raises(ValueError, match=r"region_features\.loss is 'l1'; it must be one of smooth_l1, l2"):
        RegionFeaturesConfig(loss="l1")
    with pytest.raises(ValueError, match="no feature of the unmasked regions"):
        make_inputs().run(make_objective(), Targets())
