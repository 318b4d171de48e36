"""configs/tiny/gqa.yaml from drawing to predictions, the server's file and a user's question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import e2e_vl
from e2e_vl.config import load_config
from e2e_vl.metrics.gqa import GQAPrediction
from e2e_vl.predictions import read_predictions
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_run_trains_evaluates_and_answers(tmp_path):
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path / 'data'}",
        f"output={tmp_path / 'run'}",
        "data.synthetic.formats=[refcoco+, detections, gqa]",
        "data.synthetic.scenes={train: 4, val: 3}",
        *("train.max_steps=2", "eval.boxes=[gt]", "eval.every_epochs=0", "eval.report_pictures=1"),
    ]
    metrics = train(load_config(ROOT / "configs" / "tiny" / "gqa.yaml", words))
    names = ("accuracy", "validity", "plausibility", "consistency", "distribution")
    assert all(f"val_all/{name}_gt_boxes" in metrics for name in names)
    records = read_predictions(tmp_path / "run" / "predictions_val_all_gt.json", GQAPrediction)
    assert {record.is_balanced for record in records} == {True, False}
    assert all((record.is_valid is not None) == record.is_balanced for record in records)

    model = e2e_vl.load(tmp_path / "run")
    answer = model.ask(records[0].file_name, "What color is the circle?")
    assert answer.answer in model.network.task.answers and 0 < answer.score < 1
    model.network.task.write_submission(tmp_path / "s.json", records)
    assert len(json.loads((tmp_path / "s.json").read_text())) == len(records)
