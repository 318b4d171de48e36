"""Kinds and ranges of the fields of an encoder's settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassError

from detector.errors import UserError
from e2e_vl.config import load_config
from e2e_vl.encoders.field_limits import own_fields
from e2e_vl.encoders.lxmert import LxmertEncoderConfig
from e2e_vl.encoders.visual_bert import VisualBertEncoderConfig
from e2e_vl.encoders.vl_bert import VLBertConfig
from e2e_vl.run.build import build_encoder

TINY = Path(__file__).parents[2] / "configs" / "tiny" / "refcoco.yaml"
CONFIGS = (VLBertConfig, VisualBertEncoderConfig, LxmertEncoderConfig)
NO_NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e308, 10**400, -1, "x", "0.1", [], {}, True, None)
SHARES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps")
SWITCHES = {VLBertConfig: "uses_whole_image", VisualBertEncoderConfig: "with_box_numbers"} | {
    LxmertEncoderConfig: "with_segments"
}


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_and_whole_numbers_for_others_are_taken(config):
    config(hidden_dropout_prob=0, attention_probs_dropout_prob=0.9, initializer_range=0.08, layer_norm_eps=1e-12)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_number_that_float32_makes_nan_of_is_refused(config, name, value):
    with pytest.raises(
        (UserError, StrictDataclassError), match=name
    ):  # transformers checks the kinds of BERT's own fields
        config(**{name: value})


@pytest.mark.parametrize("value", [None, "false", "x", 0, 1, 1.0, [], {}])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_switch_is_true_or_false(config, value):
    for name in (SWITCHES[config], "relative_geometry"):
        with pytest.raises(UserError, match=re.escape(f"{name} is {value!r}; it must be a bool.")):
            config(**{name: value})


@pytest.mark.parametrize("name", ["region_dropout_prob", "visual_scale_text_init", "visual_scale_object_init"])
def test_numbers_of_vl_bert(name):
    for value in NO_NUMBERS[:5]:
        with pytest.raises(UserError, match=f"{name} is .*; it must be a number from"):
            VLBertConfig(**{name: value})


def test_lists_and_names_are_of_their_kind():
    for value in ([0, "x"], "01", 3, None, [[0]]):
        with pytest.raises(UserError, match="region_types"):
            VisualBertEncoderConfig(region_types=value)
    with pytest.raises(UserError, match="hidden_act is 5; it must be a str"):
        LxmertEncoderConfig(hidden_act=5)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_transformers_keeps_for_itself_is_no_setting(config):
    own = own_fields(config)
    assert {"hidden_size", "layer_norm_eps", "feature_dim", "relative_geometry"} <= set(own)
    assert not {"id2label", "dtype", "architectures", "output_hidden_states"} & set(own)


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_is_learned_from_zeros(config, name):
    with pytest.raises(UserError, match=f"{name} is 1.0; it must be a number from 0 to 0.999"):
        config(**{name: 1.0})


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "hint"), [("geluu", "; did you mean 'gelu'?"), ("", ", such as gelu or relu.")])
def test_an_activation_is_one_that_transformers_knows(config, name, hint):
    with pytest.raises(UserError, match=re.escape(f"hidden_act is {name!r}; it must be an activation that")) as error:
        config(hidden_act=name)
    assert str(error.value).endswith(hint)


def test_the_message_says_whose_setting_it_is():
    config = load_config(TINY, ["encoder.config.hidden_dropout_prob=.nan"])
    with pytest.raises(UserError, match=r"encoder\.config: hidden_dropout_prob is nan"):
        build_encoder(config, vocab_size=100, feature_dim=8)


@pytest.mark.parametrize("name", ["is_decoder", "classifier_dropout", "use_cache", "output_hidden_states"])
def test_a_setting_that_no_encoder_reads_is_not_taken_in_silence(name: str):
    config = load_config(TINY, [f"encoder.config.{name}=true"])
    with pytest.raises(UserError, match=f"encoder.config has the unknown key '{name}'; it takes"):
        build_encoder(config, vocab_size=100, feature_dim=8)
