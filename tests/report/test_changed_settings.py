from __future__ import annotations

from e2e_vl.config import DataSettings, ResizeSettings, RunConfig, TaskSettings, TrainSettings
from e2e_vl.run.report import ChangedSetting, changed_settings


def settings(*parts: dict, **changes) -> dict[str, tuple[str, str]]:
    found = changed_settings(RunConfig(**changes), *parts)
    assert all(isinstance(one, ChangedSetting) for one in found)
    return {one.name: (one.value, one.default) for one in found}


def test_only_what_differs_is_shown():
    assert settings(output="runs/a") == {"output": ("runs/a", "")}
    changes = {"seed": 3, "train": TrainSettings(lr=0.001, clip_norm=None)}
    assert settings(output="x", **changes) == {
        "output": ("x", ""),
        "seed": ("3", "12345"),
        "train.lr": ("0.001", "2.56e-05"),
        "train.clip_norm": ("null", "1.0"),
    }


def test_nested_and_free_settings_are_shown_one_by_one():
    data = DataSettings(files={"images": "images/{split}"}, resize=ResizeSettings([256]))
    found = settings(output="x", data=data)
    assert found["data.files.images"] == ("images/{split}", "")
    assert found["data.resize.short_edge"] == ("[256]", "[600]")
    assert "data.resize.long_edge" not in found
    assert settings(output="x", data=DataSettings(resize=None))["data.resize"][0] == "null"


def test_settings_of_the_parts_are_compared_with_their_defaults():
    task = TaskSettings(name="t", config={"loss": "softmax", "names": ["a"], "must": 1})
    defaults = {"task": {"config": {"loss": "binary", "names": ("a",)}}}
    found = settings(defaults, output="x", task=task)
    assert found == {
        "output": ("x", ""),
        "task.name": ("t", ""),
        "task.config.loss": ("softmax", "binary"),
        "task.config.must": ("1", ""),
    }
    assert settings(output="x", task=task)["task.config.names"] == ('["a"]', "")
