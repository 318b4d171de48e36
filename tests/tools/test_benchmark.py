"""The benchmark measures what it says, in turn, and its estimate is a roofline."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import benchmark as tool
from detector.errors import UserError
from tests.conftest import ROOT

TINY = ROOT / "configs" / "detector" / "tiny.yaml"
RUN = ROOT / "configs" / "tiny" / "refcoco.yaml"
SMALL = ("data.boxes.train=gt", "data.texts_per_image=3", "train.images_per_batch=2")
NUMBERS = {"median", "min", "max", "values", "peak_gib", "gflop", "tflops", "share", "images_per_second"}


@pytest.fixture
def benchmark(tmp_path, monkeypatch) -> Callable[..., dict]:
    """`benchmark("train", ...)`: what the program writes, on the CPU and without its own best rates."""
    monkeypatch.setattr(tool, "best_rates", lambda *_: {"matrix product": 0.5, "3x3 convolution": 1.0})

    def run(*words: str) -> dict:
        output = tmp_path / "result.json"
        assert tool.main([*words, "--device", "cpu", "--repetitions", "1", "--output", str(output)]) == 0
        return json.loads(output.read_text(encoding="utf-8"))

    return run


def test_training_steps(benchmark, tiny_words, tmp_path):
    options = ("--boxes", "6", "--image-size", "128", "160", "--chart", str(tmp_path / "chart.png"))
    result = benchmark("train", "--config", str(RUN), *options, *tiny_words, *SMALL)
    step = result["cases"]["step"]
    assert list(step) == ["ungrouped", "grouped", "single"] and result["pixels"] == [128, 160]
    assert all(set(row) == NUMBERS for row in step.values())
    grouped, ungrouped, single = (step[name]["gflop"] for name in ("grouped", "ungrouped", "single"))
    assert 2 * single < ungrouped and single < grouped < ungrouped, "the detector runs once for all texts"
    assert step["single"]["share"] == step["single"]["tflops"] / 1.0
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_evaluation_and_data(benchmark, tiny_words):
    cases = benchmark("evaluate", "--config", str(RUN), *tiny_words, "eval.boxes=[gt,online]")["cases"]
    assert list(cases["batch"]) == ["gt", "online"] and cases["batch"]["gt"]["gflop"] > 0
    result = benchmark("data", "--config", str(RUN), *tiny_words, "data.workers=0")
    assert result["cases"]["pass"]["0 workers"]["images_per_second"] > 0 and "uint8 [" in result["batch"]


def test_added_boxes_need_given_boxes(tiny_words, capsys):
    assert tool.main(["train", "--config", str(RUN), "--boxes", "6", *tiny_words, "data.boxes.train=online"]) == 2
    assert capsys.readouterr().err.startswith("error: --boxes needs given boxes")


def test_answers_need_their_question(capsys):
    assert tool.main(["ask", "--run", "RUN"]) == 2 and "--text" in capsys.readouterr().err


def test_detectors_are_compared(benchmark, monkeypatch):
    def make_two(config: Path) -> dict[str, torch.nn.Module]:
        first, second = (tool.FasterRCNN(tool.DetectorConfig.from_yaml(config)) for _ in range(2))
        second.load_state_dict(first.state_dict())
        torch.nn.init.normal_(second.backbone.stem.conv1.weight)
        return {"builtin": first, "other": second}

    monkeypatch.setattr(tool, "make_detectors", make_two)
    words = ("--image-size", "64", "96", "--boxes", "2", "--boxes", "3")
    result = benchmark("detector", "--detector-config", str(TINY), *words)
    assert list(result["cases"]) == ["features of 2 boxes", "features of 3 boxes", "whole inference", "training step"]
    assert result["feature_difference"] > 1e-3


def test_detectron2_is_built_with_the_same_weights(benchmark, monkeypatch):
    """A stub stands for its backend where Detectron2 is not installed."""
    if importlib.util.find_spec("detectron2") is None:
        stub = types.ModuleType("detector.detectron2_backend")
        stub.Detectron2Detector = type("Detectron2Detector", (tool.FasterRCNN,), {})
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    result = benchmark("detector", "--detector-config", str(TINY), "--image-size", "64", "96", "--boxes", "2")
    assert list(result["cases"]) == ["features of 2 boxes", "whole inference", "training step"]
    assert all(list(rows) == ["builtin", "detectron2"] for rows in result["cases"].values())
    assert result["feature_difference"] < 1e-4


def test_torchvision_has_the_same_features():
    torch.manual_seed(0)
    detectors = tool.make_detectors(ROOT / "detector" / "published" / "torchvision_R_50_FPN_v2.yaml")
    sizes = torch.tensor([[64, 96]])
    batch = tool.ImageBatch(torch.randn(1, 3, 64, 96) * 50, sizes, sizes, ["image"])
    boxes = [torch.tensor([[4.0, 4.0, 60.0, 50.0], [20.0, 10.0, 90.0, 60.0]])]
    precision = torch.autocast("cpu", enabled=False)
    ours, theirs = (tool.get_features(precision, one, batch, boxes) for one in detectors.values())
    assert (ours - theirs).abs().max() < 1e-3 * theirs.abs().max()
    with torch.no_grad():
        regions = detectors["torchvision"].eval()(batch)
    assert len(regions.features[0]) == len(regions.boxes[0])


def test_flops_of_known_layers():
    layer, image = torch.nn.Linear(5, 7), torch.randn(1, 2, 8, 8)
    assert tool.count_flops(lambda: layer(torch.randn(3, 5))) == 2 * 3 * 5 * 7
    assert tool.count_flops(lambda: torch.nn.functional.conv2d(image, torch.randn(4, 2, 3, 3))) == 2 * 4 * 2 * 9 * 36
    query = torch.randn(1, 1, 6, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert tool.count_flops(lambda: attend(query, query, query)) == 2 * (2 * 6 * 6 * 4)


def test_variants_take_turns_after_a_first_call():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    rows = tool.take_turns(calls, 2, torch.device("cpu"))
    assert "".join(order) == "abbaab" and all(len(row["values"]) == 2 for row in rows.values())


def test_checkouts_are_measured_in_pairs(benchmark, monkeypatch, tmp_path):
    measured, seconds = [], {tool.ROOT: 1.0, tmp_path: 2.0}

    def measure(words: list[str], checkout: Path) -> dict:
        measured.append(checkout)
        return {"cases": {"answer": {"ask": {**row, "median": seconds[checkout]}}}, "best_tflops": {"": 1.0}}

    row = dict.fromkeys(NUMBERS, 1.0)
    monkeypatch.setattr(tool, "measure_in_process", measure)
    case = benchmark("ask", "--against", str(tmp_path), "--pairs", "3")["cases"]["answer, ask"]
    assert [one == tmp_path for one in measured] == [True, False, False, True, True, False]
    assert case["this"]["ratio"]["values"] == [0.5] * 3 and case["other"]["median"] == 2.0


def test_another_checkout_that_does_not_fit_is_named(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stderr="Traceback\nImportError: no name 'x'\n")
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=rf"`train` with the code in {tmp_path}: ImportError: no name 'x'"):
        tool.measure_in_process(["train"], tmp_path)


def test_memory_is_measured_in_processes(benchmark, monkeypatch, tiny_words):
    called = []

    def measure(words: list[str]) -> dict:
        called.append(words)
        return {"cases": {"step": {words[words.index("--only") + 1]: row}}, "best_tflops": {"": 1.0}}

    row = dict.fromkeys(NUMBERS, 1.0)
    monkeypatch.setattr(tool, "measure_in_process", measure)
    cases = benchmark("memory", "--config", str(RUN), *tiny_words, *SMALL)["cases"]
    assert list(cases) == ["1 texts per image", "3 texts per image"] and all(words[0] == "train" for words in called)
    assert {words[-1] for words in called} == {f"train.activation_checkpointing={one}" for one in ("true", "false")}


# The estimate


def test_a_roofline_takes_the_longer_of_arithmetic_and_memory():
    # 2e12 FLOPs at 1 TFLOP/s are 2 s, 1e9 bytes at 0.5 GB/s are 2 s
    roofline = tool.Roofline()
    roofline.operations = [(2e12, 1e9), (0.0, 1e9)]
    assert roofline.seconds(tflops=1.0, gbytes=1.0) == 2 + 1 and roofline.seconds(tflops=4.0, gbytes=0.5) == 2 + 2


def test_operations_are_counted_with_their_bytes():
    with torch.device("meta"), tool.Roofline() as roofline:
        left, right = torch.empty(3, 5), torch.empty(5, 7)
        left.T.T @ right
    assert roofline.operations[-1] == (2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7))
    assert len(roofline.operations) == 3, "views are free"


def test_the_estimated_pass_is_the_real_one(benchmark, tiny_words):
    frozen = "detector.overrides.MODEL.RESNETS.NORM=FrozenBN"
    words = (*tiny_words, *SMALL, frozen, "detector.loss_weight=0", "phrases.weight=0")
    config = tool.load_config(RUN, words)
    sizes = ("--boxes", "6", "--image-size", "128", "160")
    real = benchmark("train", "--config", str(RUN), *sizes, *words)["cases"]["step"]["single"]["gflop"]
    roofline, number, _ = tool.count_pass(config, boxes=6, words=8, gpus=1)
    assert number == 2 and sum(flops for flops, _ in roofline.operations) / 1e9 == pytest.approx(real, rel=0.1)


def test_hours_grow_with_examples_and_epochs(capsys):
    config = ["--config", str(ROOT / "configs" / "vqa" / "vl_bert_base.yaml")]
    hours = []
    for words in (["--examples", "10000000"], ["--examples", "20000000", "--epochs", "3"]):
        assert tool.main(["estimate", *config, *words]) == 0
        cells = capsys.readouterr().out.splitlines()[-1].split("|")
        hours.append(float(cells[5].split("/")[0]))
    assert cells[1].strip() == "vqa/vl_bert_base" and hours[1] == pytest.approx(6 * hours[0], rel=0.1)


def test_no_teacher_is_counted_where_no_region_is_predicted(capsys):
    """R2C's network, which needs classes, is not asked for labels."""
    config = ["--config", str(ROOT / "configs" / "pretraining" / "visual_bert_coco_vcr.yaml")]
    assert tool.main(["estimate", *config, "--examples", "100"]) == 0
    assert "pretraining/visual_bert_coco_vcr" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["box_refinement.weight=0.3", "encoder.config.proposal_scores=true"])
def test_runs_that_cannot_train_on_annotated_boxes_are_estimated(setting, capsys):
    config = ["--config", str(ROOT / "configs" / "refcoco" / "vl_bert_base_fpn.yaml")]
    assert tool.main(["estimate", *config, "--examples", "100", setting]) == 0
    assert "refcoco/vl_bert_base_fpn" in capsys.readouterr().out
