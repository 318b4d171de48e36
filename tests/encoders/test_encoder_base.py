"""What every encoder says of itself, and where a summary is read."""

from __future__ import annotations

import re

import pytest
import torch

from e2e_vl.encoders.base import Encoder, NoEncoder, NoEncoderConfig, read_summary
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.structures import Ability
from e2e_vl.text import CLS, SEP, Template
from tests.encoders.test_vl_bert import make_inputs, make_model

# setting that the remedy names -> abilities that an encoder without it lacks
REMEDIES = {
    "with_pooler": {Ability.SUMMARY_OF_SINGLE, Ability.SUMMARY_OF_PAIR},
    "masked_region_embedding": {Ability.MASKED_REGIONS},
    "masked_region_feature": {Ability.MASKED_FEATURES},
    "image_feature_on_words": {Ability.NAMED_REGIONS},
    "max_images": {Ability.IMAGE_PAIRS},
}
ALWAYS = {Ability.SUMMARY_OF_QUESTION, Ability.WORD_EMBEDDINGS, Ability.INTERMEDIATE_STATES}
ABLE = {
    "with_pooler": True,
    "masked_region_embedding": True,
    "masked_region_feature": True,
    "image_feature_on_words": True,
    "max_images": 2,
}
UNABLE = {"image_feature_on_words": False, "uses_whole_image": False}


def abilities(encoder: Encoder) -> set[Ability]:
    return {ability for ability in Ability if encoder.lacks(ability) is None}


# Abilities


def test_every_ability_ends_a_sentence():
    for ability in Ability:
        needed = f"The task needs an encoder with {ability.value}"
        sentence = f"{needed}; this one reads no words and has no layers, so choose"
        with pytest.raises(ValueError, match=re.escape(sentence)):
            NoEncoder(NoEncoderConfig()).require(ability, "The task")


def test_vl_bert_has_what_its_settings_give_it():
    assert abilities(make_model(**UNABLE)) == ALWAYS
    assert abilities(make_model(**ABLE)) == set(Ability)
    assert VLBertModel.abilities == ALWAYS  # an ability that it does not know it does not claim
    assert set().union(ALWAYS, *REMEDIES.values()) == set(Ability)


@pytest.mark.parametrize("setting", REMEDIES)
def test_every_remedy_of_vl_bert_helps(setting):
    """The message names the setting and its value; with that the encoder has the ability, and nothing else."""
    unable = make_model(**UNABLE)
    for ability in REMEDIES[setting]:
        with pytest.raises(
            ValueError, match=rf"^The task x needs an encoder with {ability.value}; set .*\.$"
        ) as caught:
            unable.require(ability, "The task x")
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
        [(name, value)] = re.findall(r"encoder\.config\.(\w+) to (\w+)", str(caught.value))
        assert (name, value) == (setting, {True: "true"}.get(ABLE[setting], str(ABLE[setting])))
    changes = UNABLE | ({"uses_whole_image": True} if setting == "image_feature_on_words" else {})
    able = make_model(**changes | {setting: ABLE[setting]})
    assert abilities(able) == ALWAYS | REMEDIES[setting]
    for ability in REMEDIES[setting]:
        able.require(ability, "The task x")


def test_the_papers_word_of_regions_hides_them_too():
    make_model(region_word="img").require(Ability.MASKED_REGIONS, "The task x")


# Layout and summary


def test_an_encoder_lays_texts_out_as_bert_unless_it_says_otherwise():
    assert NoEncoder.layout.single == NoEncoder.layout.question == Template((CLS, 0, SEP), (0, 0, 0))
    assert NoEncoder.layout.pair == Template((CLS, 0, SEP, 1, SEP), (0, 0, 0, 1, 1))
    assert NoEncoder.layout.question.summary is None  # the pooled vector


def test_the_summary_is_read_at_its_place_or_pooled():
    text, pooled = torch.randn(2, 3, 4), torch.randn(2, 4)
    assert torch.equal(read_summary(text, pooled, torch.tensor([2, 0])), torch.stack([text[0, 2], text[1, 0]]))
    assert read_summary(text, None, torch.tensor([2, 0])) is not None
    assert read_summary(text, pooled, None) is pooled
    assert read_summary(text, None, None) is None


@pytest.mark.parametrize("with_pooler", [False, True])
def test_vl_bert_reads_a_place_before_its_pooler(with_pooler):
    model = make_model(with_pooler=with_pooler)
    texts, regions = make_inputs()
    pooled = model(texts, regions).summary
    assert (pooled is not None) == with_pooler
    texts.summary = torch.tensor([3, 2, 0])
    output = model(texts, regions)
    torch.testing.assert_close(output.summary, output.text[torch.arange(3), texts.summary])
    if with_pooler:
        assert not torch.allclose(output.summary, pooled, atol=1e-2)
