"""No rule that leaves out a part of a drawn example does well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.synthetic.config import LanguageConfig
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
    "vqa": {"chance": 0.25, "usual answer to this kind of question": 0.42, "most frequent value in the image": 0.56},
    "gqa": {"chance": 0.3, "usual answer to this kind of question": 0.45, "most frequent value in the image": 0.6},
    "nlvr2": {"chance": 0.5, "left image alone": 0.75},
    "flickr30k": {"chance": 0.4, "any that fits the noun": 0.58, "any that fits the adjectives": 0.75},
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


@pytest.mark.parametrize("name", BOUNDS)
def test_no_rule_does_well(folder, name):
    found = json.loads((folder / name / FILE).read_text())["val"]
    assert {rule.rpartition("/")[2] for rule in found} == set(BOUNDS[name])
    assert {rule: value for rule, value in found.items() if value > BOUNDS[name][rule.rpartition("/")[2]]} == {}
