"""Trains on ten real photos in the official formats until every training expression is grounded.

The photos are not part of the repository. E2E_VL_REAL_MINI names their folder; default: ../shared/real_mini.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.config_files import load_config
from e2e_vl.metrics.refcoco import box_iou
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT = REPOSITORY.parent / "shared" / "real_mini"
SPLITS = ("train", "val", "testA", "testB")


@pytest.fixture(scope="module")
def root() -> Path:
    root = Path(os.environ.get("E2E_VL_REAL_MINI", DEFAULT)).resolve()
    if not (root / "images" / "train2014").is_dir():
        pytest.skip(f"the ten real photos are not at {root}; set E2E_VL_REAL_MINI to their folder")
    return root


@pytest.mark.timeout(900)  # about a minute on two idle cores
def test_every_training_expression_is_grounded_and_all_splits_are_evaluated(root, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    run = tmp_path / "run"
    config = load_config("configs/real_mini/refcoco.yaml", [f"data.root={root}", f"output={run}"])
    assert config.data.boxes.train == "detections+gt"
    assert config.eval.boxes == ["detections"]
    train(config)

    refs = json.loads((root / "refcoco+" / "refs.json").read_text(encoding="utf-8"))
    sentences = {
        split: sorted(sentence["sent_id"] for ref in refs if ref["split"] == split for sentence in ref["sentences"])
        for split in SPLITS
    }
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["train/accuracy_detected_boxes"] == 1.0
    for split in SPLITS:
        records = json.loads((run / f"predictions_{split}_detections.json").read_text(encoding="utf-8"))
        assert sorted(record["sent_id"] for record in records) == sentences[split]
        assert metrics[f"{split}/count_detected_boxes"] == len(sentences[split])
        assert metrics[f"{split}/ceiling_detected_boxes"] == 1.0  # a detection is near every referred object
        hits = [box_iou(np.array([r["box"]]), np.array(r["gt_box"]), "mattnet").max() >= 0.5 for r in records]
        assert metrics[f"{split}/accuracy_detected_boxes"] == pytest.approx(np.mean(hits))
    assert (run / "report.html").is_file()

    gt_metrics, path = evaluate_run(run, split="testA", boxes="gt", iou="vlbert")
    assert gt_metrics["testA/ceiling_gt_boxes"] == 1.0
    assert len(json.loads(path.read_text(encoding="utf-8"))) == len(sentences["testA"])
