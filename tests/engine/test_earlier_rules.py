"""Settings of runs whose values joined a rule with a mistake of an official code, read in today's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e_vl.config import REVISION, load_config, save_config
from e2e_vl.run.checkpoint import saved_settings

ROOT = Path(__file__).parents[2]


def saved(folder: Path, name: str, config: dict[str, Any], *, is_marked: bool = False) -> Path:
    """A run's settings as they were saved, without a mark unless `is_marked`."""
    path = folder / "model" / "config.yaml"
    path.parent.mkdir()
    save_config(load_config(ROOT / "configs" / "tiny" / f"{name}.yaml"), path)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["revision"] == REVISION
    if not is_marked:
        del content["revision"]
    content["task"]["config"] |= config
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_cut_of_the_choice_alone(tmp_path):
    settings = saved_settings(saved(tmp_path, "vcr", {"cut": "choice"})).task.config
    assert (settings["cut"], settings["cut_choices_only"]) == ("fronts", True)


def test_what_was_clear_stays(tmp_path):
    given = {"names_by": "mention", "names_restart_in_choices": False, "cut": "longer"}
    config = saved_settings(saved(tmp_path, "vcr", given))
    assert given.items() <= config.task.config.items() and "cut_choices_only" not in config.task.config
    assert config.revision == REVISION


def test_names_that_may_restart(tmp_path):
    run = saved(tmp_path, "vcr", {"names_by": "mention"})
    with pytest.raises(
        ValueError, match=r"config\.yaml: `names_by: mention` of this run may mean two rules, .* to true"
    ):
        saved_settings(run)
    for value in (True, False):
        words = [f"task.config.names_restart_in_choices={str(value).lower()}"]
        assert saved_settings(run, words).task.config["names_restart_in_choices"] is value


def test_pairs_that_may_lose_too_much(tmp_path):
    run = saved(tmp_path, "pretraining", {"cut_pairs": "fronts"})
    with pytest.raises(ValueError, match=r"`cut_pairs: fronts` of this run may mean two rules; set .* fronts_too_much"):
        saved_settings(run)
    settings = saved_settings(run, ["task.config.cut_pairs=fronts_too_much"])
    assert settings.task.config["cut_pairs"] == "fronts_too_much"


def test_texts_that_another_task_words(tmp_path):
    choices = {"task": "vcr", "config": {"cut": "choice", "names_by": "mention"}}
    run = saved(tmp_path, "pretraining", {"choices": choices})
    with pytest.raises(ValueError, match="`names_by: mention` of this run may mean two rules"):
        saved_settings(run)
    found = saved_settings(run, ["task.config.choices.config.names_restart_in_choices=true"]).task.config["choices"]
    own = {"names_by": "mention", "names_restart_in_choices": True, "cut": "fronts", "cut_choices_only": True}
    assert found == {"task": "vcr", "config": own}


@pytest.mark.parametrize(
    ("name", "config"), [("vcr", {"names_by": "mention"}), ("pretraining", {"cut_pairs": "fronts"})]
)
def test_a_marked_run_means_the_rule_alone(tmp_path, name, config):
    settings = saved_settings(saved(tmp_path, name, config, is_marked=True)).task.config
    assert config.items() <= settings.items() and "names_restart_in_choices" not in settings


def test_a_revision_that_is_not_known():
    with pytest.raises(ValueError, match=r"revision is 9; this code reads settings of revision 1\."):
        load_config(ROOT / "configs" / "tiny" / "vcr.yaml", ["revision=9"])
