"""Kinds and ranges of the fields of an encoder's settings, which may come with a saved model from anywhere."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from detector.errors import UserError
from e2e_vl.converter import check_kind, nearest

_WIDTH = (1, 1 << 16)
_LAYERS = 500
# whole numbers: setting -> least and most; a field may also be None where its type says so
_SIZES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "feature_dim", "visual_size"), _WIDTH),
    **dict.fromkeys(("geometry_dim", "relative_geometry_size", "type_vocab_size"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "l_layers", "r_layers", "x_layers"), (0, _LAYERS)),
    "num_attention_heads": (1, 1 << 10),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 20),
    "max_images": (0, 1 << 10),
}
# numbers of any kind; beyond these, float32 makes infinite or NaN of them
_NUMBERS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "region_dropout_prob"), (0, 0.999)),
    **dict.fromkeys(("initializer_range", "embedding_init_std"), (0, 1000)),
    **dict.fromkeys(("visual_scale_text_init", "visual_scale_object_init"), (-1000, 1000)),
    "layer_norm_eps": (1e-30, 1),
}


# fields of transformers' own BERT configs that no encoder here reads
_UNREAD = (
    *("add_cross_attention", "bos_token_id", "classifier_dropout", "eos_token_id", "is_decoder", "pad_token_id"),
    *("position_embedding_type", "tie_word_embeddings", "use_cache"),
)


def own_fields(config_class: type) -> list[str]:
    """The fields of a config class but those that no encoder reads, such as transformers' `id2label`."""
    general = {*(field.name for field in dataclasses.fields(PreTrainedConfig)), *_UNREAD}
    return [field.name for field in dataclasses.fields(config_class) if field.name not in general]


def check_fields(config: Any) -> None:
    """Check the kinds of all fields that a config has of its own, and the ranges of its numbers.

    Raises:
        UserError: a field is not of its declared kind, such as a text in the place of true or false; a number is out of
            range; the activation is unknown; or heads do not divide the width.
    """
    kinds = _kinds(type(config))
    for name in own_fields(type(config)):
        value, (least, most) = getattr(config, name), _SIZES.get(name, _NUMBERS.get(name, (None, None)))
        if least is None or value is None:
            check_kind(name, value, kinds[name])
        elif not _is_number(value, whole=name in _SIZES) or not least <= value <= most:
            number = "whole number" if name in _SIZES else "number"
            raise UserError(f"{name} is {value!r}; it must be a {number} from {least} to {most}.")
    activation = getattr(config, "hidden_act", None)
    if activation is not None and activation not in ACT2FN:
        near = nearest(activation[:100], ACT2FN)
        hint = f"; did you mean '{near}'?" if near else ", such as gelu or relu."
        raise UserError(f"hidden_act is {activation[:100]!r}; it must be an activation that transformers knows{hint}")
    heads = getattr(config, "num_attention_heads", 1)
    if heads > 1 and config.hidden_size % heads:
        raise UserError(f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}.")


def _kinds(config_class: type) -> dict[str, Any]:
    """Declared kind of each field of this project; only transformers can resolve the annotations of its own fields."""
    found: dict[str, Any] = {}
    for one in reversed(config_class.__mro__):
        if issubclass(one, PreTrainedConfig) and one is not PreTrainedConfig:
            found |= inspect.get_annotations(one, eval_str=True)
    return found


def _is_number(value: Any, *, whole: bool) -> bool:
    return type(value) is int or (type(value) is float and not whole)
