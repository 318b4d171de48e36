"""Weights that are cast together have the bits of autocast, and so have their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from e2e_vl.run.casting import cast_layer_weights
from tests.encoders.small import make_inputs, make_lxmert, make_visual_bert, make_vl_bert


def step(make, *, together: bool, recompute: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output for words, and the gradient of each parameter; the regions have no loss."""
    encoder = make().train()
    if recompute:
        encoder.recompute_activations()
    with torch.autocast("cpu", torch.bfloat16):
        weights = cast_layer_weights(encoder) if together else {}
        text = functional_call(encoder, weights, make_inputs(), tie_weights=False).text
    text.square().sum().backward()
    return text, {name: parameter.grad for name, parameter in encoder.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [make_vl_bert, make_visual_bert, make_lxmert])  # LXMERT's last layers have no gradient
def test_weights_and_gradients_have_the_bits_of_autocast(make, recompute: bool):
    text, gradients = step(make, together=False, recompute=recompute)
    text_together, gradients_together = step(make, together=True, recompute=recompute)
    assert torch.equal(text, text_together)
    for name, gradient in gradients.items():
        if gradient is None:
            assert gradients_together[name] is None, name
        else:
            assert torch.equal(gradient, gradients_together[name]), name


def test_every_linear_map_of_the_layers_is_cast_and_only_under_autocast():
    encoder = make_vl_bert()
    assert cast_layer_weights(encoder) == {}
    with torch.autocast("cpu", torch.bfloat16):
        weights = cast_layer_weights(encoder)
    maps = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
    maps += ["intermediate.dense", "output.dense"]
    names = {f"layers.{layer}.{name}.{part}" for layer in (0, 1) for name in maps for part in ("weight", "bias")}
    assert weights.keys() == names
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
