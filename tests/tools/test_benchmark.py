"""The benchmark measures the same update in both ways, and says so where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import benchmark as tool

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "detector" / "tiny.yaml"
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    files = {"images": "images/train2014", "instances": "refcoco+/instances.json", "refs": "refcoco+/refs(unc).p"}
    settings = {
        "output": str(folder / "run"),
        "detector": {"config": str(TINY)},
        "task": {"name": "refcoco"},
        "encoder": {"name": "vl_bert", "config": {**ENCODER, "geometry_dim": 64}},
        "data": {
            "name": "refcoco",
            "root": str(folder / "data"),
            "files": files,
            "resize": {"short_edge": [128], "long_edge": 160},
            "texts_per_image": 5,
            "synthetic": {"scenes": {"train": 1}},
        },
        "train": {"images_per_batch": 2},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def test_grouping_is_the_same_update_in_less_time(config_file, tmp_path):
    output = tmp_path / "new" / "result.json"
    words = ["--repetitions", "3", "--boxes", "6", "--image-size", "128", "160", "train.clip_norm=2.0"]
    assert tool.main(["train", "--config", str(config_file), "--json", str(output), *words]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert 0 < result["ratio"] < 1
    assert result["ratio"] == result["times"]["grouped"]["median"] / result["times"]["ungrouped"]["median"]
    assert result["checks"]["loss"] > 0.01
    assert result["checks"]["loss_difference"] < 1e-5
    assert result["checks"]["gradient_difference"] < 1e-4


def test_a_missing_text_is_a_difference(config_file, monkeypatch):
    compare = tool.compare_gradients
    monkeypatch.setattr(
        tool, "compare_gradients", lambda model, grouped, singles: compare(model, grouped, [*singles[:4], singles[0]])
    )
    assert tool.main(["train", "--config", str(config_file), "--repetitions", "1", "--warm-up", "0"]) == 1


def test_a_sweep_measures_every_combination(config_file, tmp_path):
    output = tmp_path / "result.json"
    words = ["--sweep", "--repetitions", "1", "--warm-up", "0", "--json", str(output)]
    words.append("detector.overrides={MODEL: {RESNETS: {NORM: FrozenBN}}}")  # recomputation excludes other norms
    assert tool.main(["train", "--config", str(config_file), *words]) == 0
    cases = json.loads(output.read_text(encoding="utf-8"))["cases"]
    keys = ("texts_per_image", "precision", "activation_checkpointing")
    assert len({tuple(case[key] for key in keys) for case in cases}) == len(cases) == 8
    assert all(case["median"] > 0 and case["peak_gib"] > 0.1 for case in cases)


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
    config = ROOT / "detector" / "published" / f"{name}.yaml"
    torch.manual_seed(0)
    detectors = tool.make_detectors(config)
    sizes = torch.tensor([[64, 96]])
    batch = tool.ImageBatch(torch.randn(1, 3, 64, 96) * 50, sizes, sizes, ["image"])
    boxes = [torch.tensor([[4.0, 4.0, 60.0, 50.0], [20.0, 10.0, 90.0, 60.0]])]
    ours, theirs = (tool.make_feature_call(one, batch, boxes)() for one in detectors.values())
    assert (ours - theirs).abs().max() < tool.TOLERANCE * theirs.abs().max()
