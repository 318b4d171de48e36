"""Ranges of the numbers in an encoder's settings, which may come with a saved model from anywhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from transformers.activations import ACT2FN

from detector.errors import UserError
from e2e_vl.converter import check_kind, nearest

_WIDTH = (1, 1 << 16)
_LAYERS = 500
# setting -> least and most; the width of a region vector may also be None
_RANGES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "feature_dim", "visual_size"), _WIDTH),
    **dict.fromkeys(("geometry_dim", "relative_geometry_size", "type_vocab_size"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "l_layers", "r_layers", "x_layers"), (0, _LAYERS)),
    "num_attention_heads": (1, 1 << 10),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 20),
    "image_slots": (0, 1 << 10),
}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "region_dropout_prob", "classifier_dropout")
_SPREADS = ("initializer_range", "embedding_init_std")  # standard deviations
_STARTS = ("visual_scale_text_init", "visual_scale_object_init")
_LARGEST = 100.0  # of a spread or a start; both are far below 1 in all official code


@functools.cache
def _own_kinds(config_class: type) -> dict[str, Any]:
    """Fields of this project's part of a config class and their types; transformers checks those of its own part."""
    kinds: dict[str, Any] = {}
    for one in config_class.__mro__:
        if one.__module__.startswith("e2e_vl."):
            kinds = inspect.get_annotations(one, eval_str=True) | kinds
    return kinds


def check_kinds(config: Any) -> None:
    """Check that the values of a config are of the kinds that its class names. Raises UserError if not."""
    for name, kind in _own_kinds(type(config)).items():
        check_kind(name, getattr(config, name), kind)


def check_sizes(config: Any) -> None:
    """Check the kinds of all values of a config, its sizes and other numbers, and the name of the activation.

    Raises:
        UserError: a value of another kind; a size out of range; heads that do not divide the width; a probability, a
            standard deviation, a start or an epsilon with which nothing can be learned; an unknown activation.
    """
    check_kinds(config)
    for name, (least, most) in _RANGES.items():
        value = getattr(config, name, None)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise UserError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {config.num_attention_heads}."
        )
    for name in _DROPOUTS:
        value = getattr(config, name, None)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"{name} is {value}; it must be a probability, from 0 to below 1.")
    for name, least in (*dict.fromkeys(_SPREADS, 0.0).items(), *dict.fromkeys(_STARTS, -_LARGEST).items()):
        value = getattr(config, name, None)
        if value is not None and not least <= value <= _LARGEST:
            raise UserError(f"{name} is {value}; it must be a number from {least:g} to {_LARGEST:g}.")
    epsilon = getattr(config, "layer_norm_eps", None)
    if epsilon is not None and not 0 < epsilon < 1:
        raise UserError(f"layer_norm_eps is {epsilon}; it must be a number above 0 and below 1, such as 1e-12.")
    activation = getattr(config, "hidden_act", None)
    if activation is not None and activation not in ACT2FN:
        near = nearest(activation[:100], ACT2FN)
        hint = f"; did you mean '{near}'?" if near else ", such as gelu or relu."
        raise UserError(f"hidden_act is {activation[:100]!r}; it must be an activation that transformers knows{hint}")
