"""Ranges of the sizes in an encoder's settings, which may come with a saved model from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detector.errors import UserError

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


def check_sizes(config: Any) -> None:
    """Check all sizes that a config has.

    Raises:
        UserError: a size is not a whole number, or out of range; or heads do not divide the width.
    """
    for name, (least, most) in _RANGES.items():
        value = getattr(config, name, None)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise UserError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {config.num_attention_heads}."
        )
