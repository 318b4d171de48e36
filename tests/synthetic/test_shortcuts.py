"""No rule that leaves out a part of a drawn example does well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.synthetic.config import LanguageConfig, SceneConfig
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.synthetic.shortcuts import FILE

BOUNDS = {  # format -> rule -> most that it may reach, also in each family
    "vcr": {
        "chance": 0.25,
        "first choice": 0.3,
        "longest choice": 0.3,
        "most frequent colour in the image": 0.35,
        "object of the same shape": 0.35,
    },
    "vqa": {
        "chance": 0.25,
        "usual answer to this kind of question": 0.42,
        "most frequent value in the image": 0.49,
        "rarest value in the image": 0.45,
        "any value that can be asked for": 0.49,
    },
    "gqa": {
        "chance": 0.25,
        "usual answer to this kind of question": 0.4,
        "most frequent value in the image": 0.48,
        "rarest value in the image": 0.45,
        "any value that can be asked for": 0.48,
    },
    "nlvr2": {
        "chance": 0.5,
        "left image alone": 0.9,  # one family has few sentences here
        "right image alone": 0.9,
        "what is described alone": 0.75,
        "noun alone": 0.8,
        "adjective alone": 0.8,
    },
    "flickr30k": {
        "chance": 0.4,
        "any that fits the noun": 0.5,
        "any that fits the adjectives": 0.55,
        "any that fits the rarest word": 0.6,
    },
    "refcoco+": {
        "chance": 0.25,
        "largest object": 0.25,
        "any that fits the first phrase": 0.6,
        "largest that fits the first phrase": 0.65,
        "nearest to the landmark": 0.62,
        "farthest from the landmark": 0.62,
        "nothing fits the first phrase": 0.8,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shortcuts") / "data"
    mix = {"attribute": 0.2, "superlative": 0.1, "comparison": 0.2, "relation": 0.5}
    language = LanguageConfig(family_mix=mix, no_target=0.1)
    make_scenes(path, scenes={"val": 160}, seed=3, language=language, formats=[*BOUNDS])
    return path


def test_rules_get_no_further_than_they_must_on_sentences_about_one_side(tmp_path):
    config = SceneConfig(min_side=96, max_side=96, min_objects=3, max_objects=5)
    language = LanguageConfig(sentences_per_pair=16, pair_families=("side",))
    make_scenes(tmp_path / "data", scenes={"val": 100}, config=config, language=language, formats=["nlvr2"])
    accuracies = json.loads((tmp_path / "data" / "nlvr2" / FILE).read_text())["val"]
    assert accuracies["left image alone"] == pytest.approx(0.75, abs=0.02)
    assert accuracies["right image alone"] == pytest.approx(0.75, abs=0.02)
    assert max(accuracies.values()) < 0.78


def test_captions_of_few_objects_need_noun_and_adjectives(tmp_path):
    config = SceneConfig(min_side=96, max_side=96, min_objects=3, max_objects=5)
    make_scenes(tmp_path / "data", scenes={"val": 100}, config=config, formats=["flickr30k"])
    accuracies = json.loads((tmp_path / "data" / "flickr30k" / FILE).read_text())["val"]
    assert max(accuracies.values()) < 0.76


@pytest.mark.parametrize("name", BOUNDS)
def test_no_rule_does_well(folder, name):
    found = json.loads((folder / name / FILE).read_text())["val"]
    assert {rule.rpartition("/")[2] for rule in found} == set(BOUNDS[name])
    assert {rule: value for rule, value in found.items() if value > BOUNDS[name][rule.rpartition("/")[2]]} == {}
