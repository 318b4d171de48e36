"""What the comparisons with the official LXMERT code share: the recorded set, and models with its weights.

Configs are read from the set's meta.json and sizes from its arrays, so that another set (`--golden-root`) is tested by
the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.structures import TextBatch, TextRegions
from e2e_vl.weights.lxmert import OfficialLxmert
from tests.parity.vl_bert_common import RELATIVE, Golden, assert_near
from tests.regions import regions_of_own_images

OPTIONAL = ("data", "gqa", "nlvr2", "optim", "train", "vqa")
KEY_BIAS = "key.bias"  # its gradient is zero up to rounding
SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "hidden_act",
    "intermediate_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "l_layers",
    "x_layers",
    "r_layers",
    "layer_norm_eps",
)


@pytest.fixture(scope="session")
def golden(golden_root: Path) -> Golden:
    return Golden(golden_root / "lxmert", OPTIONAL)


def encoder_config(golden: Golden, **fields) -> PretrainedLxmertConfig:
    recorded = golden.meta["configs"]["encoder"]
    assert recorded["visual_pos_dim"] == 4
    same = {name: recorded[name] for name in SAME_FIELDS}
    return PretrainedLxmertConfig(**same, feature_dim=recorded["visual_feat_dim"], **fields)


def official_weights(golden: Golden, name: str) -> dict[str, Tensor]:
    """All weights of a recorded model under official names: the shared trunk and the model's own."""
    trunk, own = golden["trunk"], golden.part(name, "state.")
    if name not in ("encoder", "pretrain"):
        trunk = {f"lxrt_encoder.model.{key}": value for key, value in trunk.items()}
    return {**trunk, **own}


def our_weights(official: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of encoder and head by our names."""
    found = OfficialLxmert().convert(official, "recorded weights")
    return found.encoder, found.task


def gradients_of(part: nn.Module) -> dict[str, Tensor]:
    """Of the parameters that have one."""
    return {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}


def make_encoder(golden: Golden, **fields) -> LxmertEncoder:
    """With the recorded weights, in evaluation mode."""
    encoder = LxmertEncoder(encoder_config(golden, **fields))
    encoder.load_state_dict(our_weights(golden["trunk"])[0], strict=True)
    return encoder.eval()


def texts_of(arrays: Mapping[str, Tensor]) -> TextBatch:
    return TextBatch(arrays["input_ids"], arrays["token_type_ids"], arrays["attention_mask"].bool())


def regions_of(features: Tensor, boxes: Tensor, attention_mask: Tensor | None = None) -> TextRegions:
    """Boxes are recorded as shares of width and height, so the images are one pixel wide and high."""
    attention_mask = (
        torch.ones(features.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    )
    sizes = torch.ones(*attention_mask.shape, 2)
    return regions_of_own_images(
        features, boxes, sizes, attention_mask, torch.zeros_like(attention_mask, dtype=torch.long)
    )


def assert_gradients_near(golden: Golden, part: str, gradients: Mapping[str, Tensor]) -> None:
    """Compare gradients of a float64 run, by official names, with all that is recorded of a model's.

    Arrays in float32, and the norms of all parameters, which come from a float64 run.
    """
    for prefix in ("grad64.", "grad."):
        for name, recorded in golden.part(part, prefix).items():
            if not name.endswith(KEY_BIAS):
                assert_near(gradients[name], recorded, f"{part}: {prefix}{name}")
    norms = golden.meta["grad_norms"][part]
    assert set(norms) | set(golden.part(part, "grad.")) <= set(gradients)
    assert not set(gradients) & set(golden.meta["no_grad_params"][part])
    zero = 1e-3 * max(norms.values())
    for name, norm in norms.items():
        if not name.endswith(KEY_BIAS):
            ours = float(gradients[name].norm())
            assert ours == pytest.approx(norm, rel=RELATIVE, abs=RELATIVE * zero), f"{part}: {name}"
