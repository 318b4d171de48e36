"""Numbers in an encoder's settings with which nothing can be learned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.config import load_config
from e2e_vl.encoders.lxmert import LxmertEncoderConfig
from e2e_vl.encoders.none import NoEncoderConfig
from e2e_vl.encoders.visual_bert import VisualBertEncoderConfig
from e2e_vl.encoders.vl_bert import VLBertConfig
from e2e_vl.engine.build import build_encoder

CONFIGS = (VLBertConfig, VisualBertEncoderConfig, LxmertEncoderConfig)
TINY = Path(__file__).parents[2] / "configs" / "tiny" / "refcoco.yaml"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_dropout_prob", float("nan"), "hidden_dropout_prob is nan; it must be a probability"),
        ("hidden_dropout_prob", 1.0, "hidden_dropout_prob is 1.0; it must be a probability"),
        ("attention_probs_dropout_prob", -0.1, "attention_probs_dropout_prob is -0.1; it must be a probability"),
        ("initializer_range", float("nan"), "initializer_range is nan; it must be a number from 0 to 100"),
        ("initializer_range", float("inf"), "initializer_range is inf; it must be a number from 0 to 100"),
        ("layer_norm_eps", float("inf"), "layer_norm_eps is inf; it must be a number above 0"),
        ("layer_norm_eps", -0.0, "layer_norm_eps is -0.0; it must be a number above 0"),
        ("hidden_act", "geluu", "hidden_act is 'geluu'; it must be an activation .* did you mean 'gelu'"),
        ("hidden_act", "", "hidden_act is ''; it must be an activation"),
    ],
)
def test_numbers_that_learn_nothing_are_refused(config: type, name: str, value: object, message: str):
    with pytest.raises(UserError, match=message):
        config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("region_dropout_prob", 2.0), ("embedding_init_std", -1.0), ("visual_scale_object_init", float("nan"))],
)
def test_numbers_of_vl_bert_alone(name: str, value: float):
    with pytest.raises(UserError, match=f"{name} is {value}; it must be a"):
        VLBertConfig(**{name: value})


@pytest.mark.parametrize(
    ("config", "name", "value", "kind"),
    [
        (VLBertConfig, "uses_whole_image", "x", "a bool"),
        (VLBertConfig, "uses_whole_image", -1, "a bool"),
        (VLBertConfig, "geometry_dim", None, "a int"),
        (VLBertConfig, "visual_scale_text_init", True, "a float"),
        (LxmertEncoderConfig, "image_slots", None, "a int"),
        (VisualBertEncoderConfig, "region_types", 5, "a list of int"),
        (NoEncoderConfig, "uses_whole_image", [1], "a bool"),
    ],
)
def test_values_of_another_kind_are_refused(config: type, name: str, value: object, kind: str):
    with pytest.raises(UserError, match=f"{name} is {re.escape(repr(value))}; it must be {kind}"):
        config(**{name: value})


def test_the_message_says_whose_setting_it_is():
    config = load_config(TINY, ["encoder.config.hidden_dropout_prob=.nan"])
    with pytest.raises(UserError, match=r"encoder.config: hidden_dropout_prob is nan"):
        build_encoder(config, vocab_size=100, feature_dim=8)


@pytest.mark.parametrize("name", ["is_decoder", "classifier_dropout", "use_cache", "output_hidden_states"])
def test_a_setting_that_no_encoder_reads_is_not_taken_in_silence(name: str):
    config = load_config(TINY, [f"encoder.config.{name}=true"])
    with pytest.raises(UserError, match=f"encoder.config has the unknown key '{name}'; it takes"):
        build_encoder(config, vocab_size=100, feature_dim=8)
