"""Sentence-image relationship: a class per text that has an image."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.samples import CorrectChoice
from e2e_vl.structures import Ability
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import RelationshipConfig
from e2e_vl.tasks.objectives.texts import MatchTargets, Relationship
from tests.tasks.objectives.tiny_objectives import SIZES, make_inputs


def make_objective(weight: float = 1.0) -> Relationship:
    torch.manual_seed(0)
    return Relationship(SIZES, RelationshipConfig(weight=weight))


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_loss_is_a_cross_entropy_over_the_texts_with_an_image(weight):
    inputs, objective = make_inputs(), make_objective(weight)
    output = inputs.run(objective, MatchTargets(torch.tensor([0, 1, -1])))
    logits = objective.head(inputs.encoded.summary)[:2]
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss.mean, weight * F.cross_entropy(logits, torch.tensor([0, 1])))
    assert output.loss.count == 2 and output.text.tolist() == [0, 1]
    assert output.is_right.tolist() == (logits.argmax(dim=1) == torch.tensor([0, 1])).tolist()
    output.loss.mean.backward()
    assert (inputs.encoded.summary.grad.abs().sum(dim=1) > 0).tolist() == [True, True, False]


def test_a_text_of_two_images_counts_once():
    inputs = make_inputs([[0, 1], [1, -1], [-1, -1]])
    output = inputs.run(make_objective(), MatchTargets(torch.tensor([1, 0, -1])))
    assert output.loss.count == 2 and output.text.tolist() == [0, 1]


def test_texts_of_the_data_without_images_are_judged_too():
    inputs = make_inputs([[-1], [-1], [-1]])
    assert inputs.run(make_objective(), MatchTargets(torch.tensor([1, 0, -1]))).loss.count == 2


def test_texts_without_images_alone_are_loss_zero():
    inputs = make_inputs([[-1], [-1], [-1]])
    output = inputs.run(make_objective(), MatchTargets(torch.tensor([-1, -1, -1])))
    assert output.loss.mean == 0 and output.logits.shape == (0, 2)
    output.loss.mean.backward()
    assert not inputs.encoded.summary.grad.any()


def test_the_head_has_the_width_of_the_summary():
    sizes = Sizes(hidden_size=6, vocab_size=9, summary_size=12)
    assert Relationship(sizes, RelationshipConfig(weight=1.0)).head.in_features == 12
    assert make_objective().head.in_features == SIZES.hidden_size


def test_captions_of_other_images_need_other_images():
    make_objective().check(SimpleNamespace(groups=[[0], [1]]), None, None)
    make_objective().check(None, None, None)
    with pytest.raises(ValueError, match="need at least two images"):
        make_objective().check(SimpleNamespace(groups=[[0, 1]]), None, None)


@pytest.mark.parametrize("probability", [0, 1, 1.5])
def test_some_texts_must_match_and_some_not(probability):
    message = rf"relationship\.probability is {probability}; it must be above 0 and below 1"
    with pytest.raises(ValueError, match=message):
        RelationshipConfig(probability=probability)


def test_each_kind_of_text_needs_its_data():
    def check(texts: str, groups: list[list[int]], *truths: CorrectChoice | None) -> None:
        objective = Relationship(SIZES, RelationshipConfig(weight=1.0, texts=texts))
        objective.check(SimpleNamespace(groups=groups, truths=lambda: truths), None, None)

    check("pair", [[0, 1], [2, 3]])
    check("stated", [[0]], None, CorrectChoice(0))
    with pytest.raises(ValueError, match="texts is pair, but an image has one caption only"):
        check("pair", [[0, 1], [2]])
    with pytest.raises(ValueError, match=r"relationship\.texts is stated, but the data do not say"):
        check("stated", [[0], [1]], None)


@pytest.mark.parametrize(
    ("texts", "ability"), [("single", Ability.SUMMARY_OF_SINGLE), ("pair", Ability.SUMMARY_OF_PAIR)]
)
def test_pairs_need_a_summary_of_pairs(texts, ability):
    assert Relationship(SIZES, RelationshipConfig(weight=1.0, texts=texts)).needs == (ability,)
