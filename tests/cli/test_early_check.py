"""Mistyped names of parts and of their settings are found without importing the parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from e2e_vl.cli import early_check
from e2e_vl.config import load_config
from e2e_vl.parts import DATASETS, ENCODERS, OBJECTIVES, TASKS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "demo" / "refcoco.yaml"
PRETRAINING = ROOT / "configs" / "tiny" / "pretraining.yaml"

RUNS = [path for path in sorted((ROOT / "configs").glob("*/*.yaml")) if "\noutput:" in path.read_text(encoding="utf-8")]
CLASSES = [pair[0] for choices in (TASKS, ENCODERS, OBJECTIVES) for pair in choices.values()]
OPTIONS = [reader.options for reader in DATASETS.values() if "options" in vars(reader)]


@pytest.mark.parametrize("config_class", CLASSES + OPTIONS, ids=lambda config_class: config_class.__name__)
def test_the_source_names_the_fields_of_the_class(config_class):
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    assert early_check.field_names(config_class.__module__, config_class.__name__) == names


@pytest.mark.parametrize(
    ("choices", "parts"), [("TASKS", TASKS), ("ENCODERS", ENCODERS), ("OBJECTIVES", OBJECTIVES), ("DATASETS", DATASETS)]
)
def test_the_source_names_the_parts(choices, parts):
    names = {name: (part[0] if isinstance(part, tuple) else part).__name__ for name, part in parts.items()}
    assert early_check._entries(choices) == names


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_shipped_settings_pass(path):
    early_check.check_part_names(load_config(path, ["data.root=data"]))


@pytest.mark.parametrize(
    ("path", "override", "message"),
    [
        (CONFIG, "task.name=refcco", "task.name is 'refcco'; it must be one of refcoco, detection"),
        (CONFIG, "encoder.name=bert", "encoder.name is 'bert'; it must be one of vl_bert, visual_bert, lxmert, none"),
        (CONFIG, "data.name=coco", "data.name is 'coco'; it must be one of refcoco, coco_detection"),
        (CONFIG, "task.config.dropuot=0.1", "did you mean 'task.config.dropout'"),
        (CONFIG, "encoder.config.num_layers=2", "did you mean 'encoder.config.num_hidden_layers'"),
        (PRETRAINING, "data.config.use_corps=true", "did you mean 'data.config.use_corpus'"),
        (PRETRAINING, "task.config.objectives.masked_word=1", "did you mean 'task.config.objectives.masked_words'"),
        (
            PRETRAINING,
            "task.config.objectives.masked_words.probabilty=1",
            "did you mean 'task.config.objectives.masked_words.probability'",
        ),
    ],
)
def test_a_wrong_name_is_an_error(path, override, message):
    with pytest.raises(ValueError, match=message):
        early_check.check_part_names(load_config(path, [override]))
