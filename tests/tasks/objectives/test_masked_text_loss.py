"""Masked words of a text-only corpus: the loss of masked words, for labels of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from e2e_vl.tasks.config import MaskedTextConfig, MaskedWordsConfig
from e2e_vl.tasks.objectives.words import MaskedText, MaskedWords
from tests.tasks.objectives.test_masked_words_loss import labels_of
from tests.tasks.objectives.tiny_objectives import SIZES, make_inputs


def test_loss_is_that_of_masked_words():
    inputs, labels = make_inputs(), labels_of((2, 0, 4), (2, 2, 1))
    own = inputs.run(MaskedText(SIZES, MaskedTextConfig(weight=2.0)), labels)
    other = inputs.run(MaskedWords(SIZES, MaskedWordsConfig(weight=1.0)), labels)
    torch.testing.assert_close(own.loss.mean, 2 * other.loss.mean)
    torch.testing.assert_close(own.logits, other.logits)
    assert own.loss.count == 2 and own.text.tolist() == [2, 2]


def test_no_text_of_the_corpus_is_loss_zero():
    output = make_inputs().run(MaskedText(SIZES, MaskedTextConfig(weight=1.0)), labels_of())
    assert output.loss.mean == 0 and output.loss.count == 0


def test_it_says_nothing_to_a_user_whose_text_has_an_image():
    objective = MaskedText(SIZES, MaskedTextConfig(weight=1.0))
    assert objective.answer(None, torch.zeros(0, 3), None, None) == {} and objective.lines({}) == []


def test_the_corpus_must_be_there():
    objective = MaskedText(SIZES, MaskedTextConfig(weight=1.0))
    objective.check(None, None, None)  # before the data are known
    objective.check(SimpleNamespace(corpus=["a"]), None, None)
    with pytest.raises(ValueError, match=r"set data.files.corpus and data.config.use_corpus=true, or .*masked_text=0"):
        objective.check(SimpleNamespace(corpus=None), None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_words": 0}, "min_words is 0; it must be at least 1"),
        ({"max_length": 0}, "max_length is 0; it must be at least 1"),
        ({"max_length": 2, "special_tokens": True}, "max_length is 2; it must be at least 3"),
        ({"probability": -1}, "probability is -1; it must be from 0 to 1"),
        ({"weight": -1}, "weight is -1; it must not be negative"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=rf"^task\.config\.objectives\.masked_text\.{message}"):
        MaskedTextConfig(**settings)
    MaskedTextConfig(max_length=2)
