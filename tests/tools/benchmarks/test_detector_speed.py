from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import benchmark as tool
import detector_speed
from detector.zoo import PUBLISHED
from torchvision_rival import RIVALS

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs" / "detector" / "tiny.yaml"


def test_every_case_is_measured(tmp_path, capsys):
    output = tmp_path / "new" / "result.json"
    options = ["--image-size", "96", "128", "--rois", "3,5", "--repetitions", "2", "--json", str(output)]
    assert tool.main(["detector", "--detector-config", str(TINY), *options]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert list(result["cases"]) == ["features_3", "features_5", "train"]
    has_detectron2 = importlib.util.find_spec("detectron2") is not None
    assert result["backends"] == ["builtin", "detectron2"][: 1 + has_detectron2]
    for case in result["cases"].values():
        assert list(case["times"]) == result["backends"]
        for times in case["times"].values():
            assert len(times["all"]) == 2
            assert 0 < times["min"] <= times["median"] <= times["max"]
        if has_detectron2:
            medians = {name: times["median"] for name, times in case["times"].items()}
            assert case["ratio"] == medians["detectron2"] / medians["builtin"]
    assert ("is not installed" in capsys.readouterr().out) != has_detectron2


def test_only_the_builtin_detector_where_detectron2_is_missing(tmp_path, capsys, monkeypatch):
    def missing():
        raise ValueError("not installed")

    monkeypatch.setitem(detector_speed.DETECTORS, "detectron2", missing)
    options = ["--image-size", "64", "96", "--rois", "2", "--repetitions", "1", "--warm-up", "0", "--no-train"]
    assert tool.main(["detector", "--detector-config", str(TINY), *options]) == 0
    assert "only the built-in detector was measured" in capsys.readouterr().out


def test_different_features_are_reported(capsys, monkeypatch):
    make = detector_speed.make_detectors

    def make_two(config: Path) -> dict:
        first, second = make(config)["builtin"], make(config)["builtin"]
        torch.nn.init.normal_(second.backbone.stem.conv1.weight)
        return {"builtin": first, "detectron2": second}

    monkeypatch.setattr(detector_speed, "make_detectors", make_two)
    options = ["--image-size", "64", "96", "--rois", "2", "--repetitions", "1", "--warm-up", "0", "--no-train"]
    assert tool.main(["detector", "--detector-config", str(TINY), *options]) == 1
    assert "features differ" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "cases"), [(RIVALS[0], []), (RIVALS[1], ["--no-train"])])
def test_torchvision_is_measured_for_its_own_settings(capsys, name, cases):
    options = ["--image-size", "64", "96", "--rois", "8", "--repetitions", "1", "--warm-up", "0", *cases]
    assert tool.main(["detector", "--detector-config", str(PUBLISHED / f"{name}.yaml"), *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("torchvision ") == printed.count("ratio ") == 2 - len(cases)


def test_bad_numbers_are_one_sentence(capsys):
    assert tool.main(["detector", "--detector-config", str(TINY), "--rois", "0"]) == 2
    assert capsys.readouterr().err == "error: Repetitions, images and boxes must be positive numbers.\n"
