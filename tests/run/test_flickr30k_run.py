"""configs/tiny/flickr30k.yaml from drawing to predictions, and a user's sentence with phrases in brackets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import e2e_vl
from e2e_vl.config import load_config
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_run_trains_evaluates_and_answers(tmp_path):
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path / 'data'}",
        f"output={tmp_path / 'run'}",
        "data.synthetic.formats=[refcoco+, detections, flickr30k]",
        "data.synthetic.scenes={train: 4, val: 3}",
        *("train.max_steps=2", "eval.boxes=[gt,online]", "eval.every_epochs=0", "eval.report_pictures=1"),
    ]
    metrics = train(load_config(ROOT / "configs" / "tiny" / "flickr30k.yaml", words))
    assert metrics["val/ceiling_gt_boxes"] == 1, "the annotated boxes hold the right ones"
    assert (
        0 <= metrics["val/accuracy_gt_boxes"] <= metrics["val/recall_5_gt_boxes"] <= metrics["val/recall_10_gt_boxes"]
    )
    assert any(name.startswith("val/accuracy_by_type_gt_boxes/") for name in metrics)
    records = json.loads((tmp_path / "run" / "predictions_val_gt.json").read_text())
    assert all(len(record["boxes"]) == len(record["phrases"]) == len(record["ranks"]) for record in records)
    assert len({len(record["phrases"]) for record in records}) > 1

    answer = e2e_vl.load(tmp_path / "run").ask(records[0]["file_name"], "[the star] and [a red thing]")
    assert answer.prediction.phrases == ("the star", "a red thing") and len(answer.lines) == 2
    assert len(answer.pointed) == 2 and answer.pointed[0][0].startswith("the star")
    assert min(answer.draw().size) >= 100
