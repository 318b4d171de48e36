"""The settings that a run writes, and how two of them are compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from e2e_vl.config import RunConfig, differences, load_config, save_config, saved_version

ROOT = Path(__file__).parents[1]


def test_saved_settings_come_back_equal(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config = load_config(
        "configs/tiny/refcoco.yaml", ["train.max_steps=3", "data.texts_per_image=null", "train.betas=[0.8, 0.9]"]
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_differences_name_the_setting():
    one = RunConfig(output="a")
    assert differences(one, RunConfig(output="a")) == []
    other = dataclasses.replace(
        one,
        train=dataclasses.replace(one.train, lr=1.0),
        detector=dataclasses.replace(one.detector, overrides={"MODEL": {"MASK_ON": True}}),
    )
    assert differences(one, other) == [
        "detector.overrides.MODEL: None -> {'MASK_ON': True}",
        "train.lr: 2.56e-05 -> 1.0",
    ]


def test_settings_that_an_earlier_version_saved_still_load(monkeypatch, tmp_path):
    """The file was written by `save_config` before settings had a version."""
    monkeypatch.chdir(ROOT)  # the paths in it are left as they are
    path = ROOT / "tests" / "golden" / "config" / "version_1.yaml"
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config(path)
    new = {"version", "data.skip_broken", "data.mirror_precomputed", "data.mean_image_feature", "data.check_images"}
    new |= {"revision", "train.trackers", "train.decay_bn_scales", "train.max_wait_minutes", "phrases"}
    assert {line.split(":")[0] for line in differences(written, dataclasses.asdict(config))} == new
    assert saved_version(path) == 1
    save_config(config, tmp_path / "saved.yaml")
    assert saved_version(tmp_path / "saved.yaml") == 2
    assert load_config(tmp_path / "saved.yaml") == config


def test_the_version_of_what_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"nowhere.yaml does not exist"):
        saved_version("nowhere.yaml")
