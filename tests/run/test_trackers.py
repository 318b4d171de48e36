"""What trackers get."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from e2e_vl.io import read_log
from e2e_vl.run import trackers
from e2e_vl.run.trackers import PICTURES, check_trackers, without_constants
from e2e_vl.run.train import train

BOXES = ("gt", "detections", "online")

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorboard", "board"], "train.trackers has 'board'; it must be some of aim, .*tensorboard, wandb"),
        (["wandb"], "train.trackers has 'wandb', which is not installed; install it or leave it out"),
    ],
)
def test_trackers_that_cannot_be_used(monkeypatch, names, message):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ValueError, match=message):
        check_trackers(names)


def test_tensorboard_gets_settings_and_values_that_change(trained_run):
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
    assert not [name for name in scalars if "count" in name or "ceiling_gt" in name or "ceiling_detected" in name]
    evaluations = sum(line["kind"] == "eval" for line in read_log(trained_run.path / "log.jsonl"))
    assert dict(pictures) == {f"val, {boxes} {row}": evaluations for boxes in BOXES for row in range(PICTURES)}
    assert "encoder.config.hidden_size" in texts and "train.lr" in texts  # hyper-parameters


def test_what_cannot_change_is_left_out(tiny_config):
    values = {
        "train/loss": 1.0,
        "train/lr_head": 0.5,
        "val/accuracy_predicted_boxes/relation": None,
        "val/count_gt_boxes": 6.0,
    }
    assert set(without_constants(tiny_config(), values)) == {"train/loss", "train/lr_head"}
    flat = tiny_config("train.schedule=constant", "train.warmup_steps=0")
    assert set(without_constants(flat, values)) == {"train/loss"}
    rising = tiny_config("train.schedule=constant", "train.warmup_steps=1")
    assert set(without_constants(rising, values)) == {"train/loss", "train/lr_head"}
    share = tiny_config("train.schedule=constant", "train.warmup_steps=0", "train.warmup_share=0.1")
    assert set(without_constants(share, values)) == {"train/loss", "train/lr_head"}


def test_a_run_without_trackers(tiny_config):
    config = tiny_config("train.trackers=[]", "train.max_steps=1", "eval.boxes=[]")
    train(config)
    assert not (Path(config.output) / "tensorboard").exists()
