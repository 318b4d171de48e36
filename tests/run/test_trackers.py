"""What trackers get, and the table that a run prints at its end."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from e2e_vl.config_files import load_config
from e2e_vl.io import read_log
from e2e_vl.run import launch
from e2e_vl.run.metric_names import metrics_from_json
from e2e_vl.run.trackers import PICTURES, describe_schedule_part, format_results, suggest_bf16, tracker_options
from tests.conftest import ROOT

BOXES = ("gt", "detections", "online")

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_tensorboard_gets_settings_values_and_pictures(trained_run):
    folder = trained_run.path / "tensorboard"
    files = sorted(path for path in folder.rglob("events.*"))
    scalars: dict[str, list] = {}
    texts, pictures = "", []
    for path in files:
        events = EventAccumulator(str(path))
        events.Reload()
        scalars |= {name: events.Scalars(name) for name in events.Tags()["scalars"]}
        pictures += [(name, len(events.Images(name))) for name in events.Tags()["images"]]
        texts += path.read_bytes().decode("latin-1")
    assert [event.step for event in scalars["train/loss"]] == list(range(1, 9))
    assert {"train/lr_encoder", "val/accuracy_gt_boxes", "val/ceiling_predicted_boxes"} <= set(scalars)
    evaluations = sum(line["kind"] == "eval" for line in read_log(trained_run.path / "log.jsonl"))
    assert dict(pictures) == {f"val, {boxes} {row}": evaluations for boxes in BOXES for row in range(PICTURES)}
    assert "encoder.config.hidden_size" in texts and "train.lr" in texts  # hyper-parameters


@pytest.mark.parametrize(
    ("tracker", "started"),
    [
        ("wandb", {"project": "grounding", "name": "first", "tags": ["lr", "demo"]}),
        ("trackio", {"project": "grounding", "name": "first"}),
    ],
)
def test_a_tracker_is_started_with_project_name_and_tags(tracker, started, tmp_path, monkeypatch):
    config = load_config(
        ROOT / "configs/tiny/refcoco.yaml",
        [f"output={tmp_path / 'run'}", "train.tracking={project: grounding, name: first, tags: [lr, demo]}"],
    )
    calls: list[dict] = []
    PartialState()  # accelerate's logger needs it
    monkeypatch.setitem(sys.modules, tracker, SimpleNamespace(init=lambda **words: calls.append(words)))
    options = tracker_options(config)
    LOGGER_TYPE_TO_CLASS[tracker](config.train.tracking.project, **options[tracker]).start()
    assert calls == [started]
    assert options["mlflow"] == {"run_name": "first", "tags": {"lr": "true", "demo": "true"}}
    unnamed = load_config(ROOT / "configs/tiny/refcoco.yaml", [f"output={tmp_path / 'run'}"])
    assert tracker_options(unnamed)[tracker]["name"] == "run"


def test_the_table_has_a_row_per_family_and_a_column_per_source_of_boxes():
    metrics = {
        "val/accuracy_gt_boxes": 0.5,
        "val/count_gt_boxes": 6.0,
        "val/accuracy_gt_boxes/yes/no": 0.25,
        "val/accuracy_predicted_boxes": 1.0,
        "val/accuracy_predicted_boxes/other": None,
        "test/AP_precomputed_boxes": 0.125,
    }
    assert format_results(metrics_from_json(metrics)) == [
        "                     gt boxes  predicted boxes  precomputed boxes",
        "val/accuracy            0.500            1.000                  -",
        "val/accuracy/yes/no     0.250                -                  -",
        "val/accuracy/other          -                -                  -",
        "val/count                   6                -                  -",
        "test/AP                     -                -              0.125",
    ]
    assert format_results({}) == []


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ((0.0, 1.0), None),
        ((0.0, 0.5), "0 to 0.5 of a longer one"),
        ((0.5, 1.0), "moments of the optimiser begin at zero"),
    ],
)
def test_the_summary_names_the_part_of_a_schedule(part, sentence):
    lines = describe_schedule_part(*part)
    assert len(lines) == (sentence is not None) and all(sentence in text for _, text in lines)


@pytest.mark.parametrize(
    ("flags", "device", "precision", "is_suggested"),
    [
        ("avx512f avx512_bf16", "cpu", "no", True),
        ("asimd bf16", "cpu", "no", True),
        ("avx2", "cpu", "no", False),
        (None, "cpu", "no", False),
        ("avx512f avx512_bf16", "cpu", "bf16", False),
        ("avx512f avx512_bf16", "cuda", "no", False),
    ],
)
def test_the_summary_suggests_bf16_where_the_cpu_has_its_instructions(
    flags, device, precision, is_suggested, monkeypatch, tmp_path
):
    monkeypatch.setattr(launch, "CPU_INFO", tmp_path / "cpuinfo")
    if flags is not None:
        launch.CPU_INFO.write_text(f"flags\t: {flags}\n")
    lines = suggest_bf16(torch.device(device), precision)
    assert bool(lines) == is_suggested
    assert all("train.mixed_precision=bf16" in text for _, text in lines)
