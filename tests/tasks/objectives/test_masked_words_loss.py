"""Masked words: loss, what was found, and the shared word head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.tasks.config import MaskedWordsConfig
from e2e_vl.tasks.objectives.words import MaskedWords, WordLabels
from tests.tasks.objectives.tiny_objectives import HIDDEN, LENGTH, SIZES, VOCABULARY, make_inputs


def labels_of(*labels: tuple[int, int, int]) -> WordLabels:
    """(text, position, wordpiece)"""
    values = torch.full((3, LENGTH), -1)
    for text, position, piece in labels:
        values[text, position] = piece
    return WordLabels(values)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_loss_is_a_cross_entropy_over_the_vocabulary(weight):
    inputs = make_inputs()
    output = inputs.run(
        MaskedWords(SIZES, MaskedWordsConfig(weight=weight)), labels_of((0, 1, 3), (2, 3, 8), (0, 2, 0))
    )
    states = inputs.encoded.text[[0, 0, 2], [1, 2, 3]]
    logits = inputs.word_head(states, inputs.encoded.word_embeddings)
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss.mean, weight * F.cross_entropy(logits, torch.tensor([3, 0, 8])))
    assert output.loss.count == 3 and output.logits.shape == (3, VOCABULARY)
    assert output.text.tolist() == [0, 0, 2]
    assert output.is_right.tolist() == (logits.argmax(dim=1) == torch.tensor([3, 0, 8])).tolist()


def test_only_masked_wordpieces_get_gradients_and_the_word_table_does():
    inputs = make_inputs()
    inputs.run(MaskedWords(SIZES, MaskedWordsConfig()), labels_of((0, 1, 3), (2, 3, 8))).loss.mean.backward()
    assert (inputs.encoded.text.grad.abs().sum(dim=2) > 0).nonzero().tolist() == [[0, 1], [2, 3]]
    assert (inputs.encoded.word_embeddings.grad.abs().sum(dim=1) > 0).all()
    assert inputs.encoded.regions.grad is None and inputs.encoded.summary.grad is None


def test_no_masked_word_is_loss_zero():
    inputs = make_inputs()
    output = inputs.run(MaskedWords(SIZES, MaskedWordsConfig()), labels_of())
    assert (output.loss.total.item(), output.loss.count.item(), output.loss.mean.item()) == (0, 0, 0)
    assert output.logits.shape == (0, VOCABULARY) and len(output.text) == len(output.is_right) == 0
    output.loss.mean.backward()
    assert not inputs.encoded.text.grad.any()


def test_losses_are_never_computed_in_half_precision():
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = inputs.run(MaskedWords(SIZES, MaskedWordsConfig()), labels_of((0, 1, 3)))
    assert output.logits.dtype == output.loss.total.dtype == torch.float32


def test_the_head_has_no_layer_of_its_own_for_words():
    head = make_inputs().word_head
    assert {name: tuple(value.shape) for name, value in head.named_parameters()} == {
        "bias": (VOCABULARY,),
        "transform.dense.weight": (HIDDEN, HIDDEN),
        "transform.dense.bias": (HIDDEN,),
        "transform.norm.weight": (HIDDEN,),
        "transform.norm.bias": (HIDDEN,),
    }
    assert not list(MaskedWords(SIZES, MaskedWordsConfig()).parameters())
    assert MaskedWords.reads_words and not MaskedWords.predicts_regions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": -0.5}, "weight is -0.5; it must not be negative"),
        ({"probability": 15}, "probability is 15; it must be from 0 to 1"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=rf"^task\.config\.objectives\.masked_words\.{message}"):
        MaskedWordsConfig(**settings)
