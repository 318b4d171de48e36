"""The benchmark measures the same update in both ways, and says so where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import benchmark as tool
from tests.conftest import ROOT

TINY = ROOT / "configs" / "detector" / "tiny.yaml"


@pytest.fixture
def train(tiny_words, tmp_path) -> Callable[..., int]:
    """`train("--sweep", ...)`: the exit status of the benchmark of a tiny run."""
    config = str(ROOT / "configs" / "tiny" / "refcoco.yaml")
    required = ["train", "--config", config, "--json", str(tmp_path / "result.json"), *tiny_words]
    required += ["data.boxes.train=gt", "data.texts_per_image=5", "train.images_per_batch=2"]
    return lambda *words: tool.main([*required, *words])


def test_grouping_is_the_same_update_in_less_time(train, tmp_path):
    assert train("--repetitions", "3", "--boxes", "6", "--image-size", "128", "160") == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert 0 < result["ratio"] < 1
    assert result["ratio"] == result["times"]["grouped"]["median"] / result["times"]["ungrouped"]["median"]
    checks = result["checks"]
    assert checks["loss"] > 0.01 and checks["loss_difference"] < 1e-5 and checks["gradient_difference"] < 1e-4


def test_added_boxes_need_given_boxes(train, capsys):
    assert train("--boxes", "6", "data.boxes.train=online") == 2
    assert capsys.readouterr().err.startswith("error: --boxes needs given boxes")


def test_a_missing_text_is_a_difference(train, monkeypatch):
    compare = tool.compare_gradients
    monkeypatch.setattr(
        tool, "compare_gradients", lambda model, grouped, singles: compare(model, grouped, [*singles[:4], singles[0]])
    )
    assert train("--repetitions", "1", "--warm-up", "0") == 1


def test_a_sweep_measures_every_combination(train, tmp_path):
    frozen = "detector.overrides.MODEL.RESNETS.NORM=FrozenBN"  # recomputation excludes other norms
    assert train("--sweep", "--repetitions", "1", "--warm-up", "0", frozen) == 0
    cases = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["cases"]
    keys = ("texts_per_image", "precision", "activation_checkpointing")
    assert len({tuple(case[key] for key in keys) for case in cases}) == len(cases) == 8
    assert all(case["median"] > 0 and case["peak_gib"] > 0.1 for case in cases)


def test_images_are_counted_per_second(tmp_path):
    output, config = tmp_path / "result.json", str(ROOT / "configs" / "tiny" / "refcoco.yaml")
    assert tool.main(["data", "--config", config, "--json", str(output), "--repetitions", "1", "--warm-up", "0"]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["images_per_second"] > 0 and result["batch_bytes"] % 3 == 0


@pytest.mark.parametrize("other", ["same", "different"])
def test_detectors_are_compared(monkeypatch, tmp_path, other):
    def make_two(config: Path) -> dict[str, torch.nn.Module]:
        first, second = (tool.FasterRCNN(tool.DetectorConfig.from_yaml(config)) for _ in range(2))
        second.load_state_dict(first.state_dict())
        if other == "different":
            torch.nn.init.normal_(second.backbone.stem.conv1.weight)
        return {"builtin": first, "other": second}

    monkeypatch.setattr(tool, "make_detectors", make_two)
    output = tmp_path / "result.json"
    words = ["--image-size", "64", "96", "--boxes", "2", "3", "--repetitions", "1", "--warm-up", "0"]
    status = tool.main(["detector", "--detector-config", str(TINY), "--json", str(output), *words])
    assert status == (other == "different")
    result = json.loads(output.read_text(encoding="utf-8"))
    assert list(result["cases"]) == ["features_2", "features_3", "train"] == list(result["ratios"])


@pytest.mark.parametrize("name", tool.TORCHVISION)
def test_torchvision_has_the_same_features(name):
    torch.manual_seed(0)
    detectors = tool.make_detectors(ROOT / "detector" / "published" / f"{name}.yaml")
    sizes = torch.tensor([[64, 96]])
    batch = tool.ImageBatch(torch.randn(1, 3, 64, 96) * 50, sizes, sizes, ["image"])
    boxes = [torch.tensor([[4.0, 4.0, 60.0, 50.0], [20.0, 10.0, 90.0, 60.0]])]
    ours, theirs = (tool.make_feature_call(one, batch, boxes)() for one in detectors.values())
    assert (ours - theirs).abs().max() < tool.TOLERANCE * theirs.abs().max()
