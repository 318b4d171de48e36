"""Defaults of the keys that belong to the named parts of a run."""

from __future__ import annotations

import dataclasses

from e2e_vl.config import RunConfig, load_config
from e2e_vl.run.default_settings import part_defaults
from e2e_vl.run.report import changed_settings
from tests.run.test_configs import ROOT


def changed(config: RunConfig) -> dict[str, tuple[str, str]]:
    return {one.name: (one.value, one.default) for one in changed_settings(config, part_defaults(config))}


def test_values_that_equal_the_defaults_are_not_shown():
    words = ["output=x", "detector.overrides={MODEL: {RPN: {BATCH_SIZE_PER_IMAGE: 256}, RESNETS: {DEPTH: 101}}}"]
    words += ["encoder.config={hidden_size: 768, norm_first: true}", "data.config={use_corpus: true}"]
    words += ["data.synthetic.config={scene: {min_objects: 5, max_objects: 6}}"]
    words += ["task.config={objectives: {masked_words: {weight: 1.0, probability: 0.2}, masked_text: 1.0}}"]
    config = load_config(ROOT / "configs" / "tiny" / "pretraining.yaml", words)
    found = changed(config)
    assert found["detector.overrides.MODEL.RESNETS.DEPTH"] == ("101", "50")
    assert found["encoder.config.norm_first"] == ("true", "false")
    assert found["task.config.objectives.masked_words.probability"] == ("0.2", "0.15")
    assert found["data.synthetic.config.scene.max_objects"] == ("6", "10")
    equal = (
        "detector.overrides.MODEL.RPN.BATCH_SIZE_PER_IMAGE",
        "encoder.config.hidden_size",
        "data.config.use_corpus",
    )
    equal += ("task.config.objectives.masked_words.weight", "data.synthetic.config.scene.min_objects")
    assert not set(equal) & set(found)


def test_an_objective_may_be_given_by_its_weight():
    config = load_config(ROOT / "configs" / "tiny" / "pretraining.yaml", ["output=x"])
    for weight, shown in ((1.0, None), (0.5, ("0.5", "1.0"))):
        task = dataclasses.replace(config.task, config={"objectives": {"masked_words": weight}})
        found = changed(dataclasses.replace(config, task=task))
        assert found.get("task.config.objectives.masked_words") == shown
