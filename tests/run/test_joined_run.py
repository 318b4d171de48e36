"""Pre-training on captions and questions together, from drawn scenes to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.config import load_config
from e2e_vl.io import read_log
from e2e_vl.run.train import train
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
SPLITS = {"train": "train", "val": "val"}
SHARED = {"images": "images/train2014", "instances": "detection/instances_{split}.json"}

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_captions_and_questions_in_one_run(tmp_path):
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path / 'data'}",
        f"output={tmp_path / 'run'}",
        "data.synthetic.scenes={train: 6, val: 3}",
        "data.synthetic.formats=[captions, vqa, detection]",
        *("train.max_steps=2", "train.warmup_steps=0", "eval.report_pictures=0"),
    ]
    config = load_config(ROOT / "configs" / "tiny" / "pretraining.yaml", words)
    parts = {
        "said": {
            "name": "captions",
            "splits": SPLITS,
            "images": "scenes",
            "files": {"captions": "captions/captions_{split}.json"},
        },
        "asked": {
            "name": "vqa",
            "splits": SPLITS,
            "images": "scenes",
            "files": {
                "questions": "vqa/v2_OpenEnded_mscoco_{split}_questions.json",
                "annotations": "vqa/v2_mscoco_{split}_annotations.json",
            },
            "config": {"image_name": "COCO_train2014_{id:012d}.jpg"},
        },
    }
    objectives = config.task.config["objectives"] | {
        "masked_text": 0.0,
        "image_qa": {"weight": 1.0, "answers": ["yes", "no", *map(str, range(6))]},
    }
    config = replaced(
        config,
        data={"name": "joined", "config": {"parts": parts}, "files": SHARED},
        task={"config": config.task.config | {"objectives": objectives}},
    )
    metrics = train(config)
    assert "val/image_qa_gt_boxes" in metrics and "val/relationship_gt_boxes" in metrics
    records = json.loads((tmp_path / "run" / "predictions_val_gt.json").read_text())
    assert {"question_id" in record for record in records} == {True, False}
    losses = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "train"]
    assert all(0 < line["masked_words"] < 100 for line in losses)
