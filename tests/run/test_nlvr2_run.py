"""configs/tiny/nlvr2.yaml from drawing to predictions, two images per text, and a user's question about two photos."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import e2e_vl
from e2e_vl.config import load_config
from e2e_vl.data.batching import Request
from e2e_vl.run.build import build_collate, build_examples
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_run_trains_evaluates_and_answers(tmp_path):
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path / 'data'}",
        f"output={tmp_path / 'run'}",
        "data.synthetic.formats=[nlvr2]",
        "data.synthetic.scenes={train: 5, val: 4}",
        *("train.max_steps=2", "train.images_per_batch=2", "eval.boxes=[gt]", "eval.every_epochs=0"),
        "eval.report_pictures=1",
    ]
    metrics = train(load_config(ROOT / "configs" / "tiny" / "nlvr2.yaml", words))
    assert 0 <= metrics["val/consistency_gt_boxes"] <= metrics["val/accuracy_gt_boxes"] <= 1
    records = json.loads((tmp_path / "run" / "predictions_val_gt.json").read_text())
    assert all(len(record["file_names"]) == 2 for record in records) and len(records) % 8 == 0

    model = e2e_vl.load(tmp_path / "run")
    network = model.network
    data = build_examples(model.settings, network, model.tokenizer, "val", boxes="gt")
    batch = build_collate(model.settings, network)([data[Request(0, tuple(data.groups[0]))]])
    assert batch.image_index.tolist() == [[0, 1]] * 2
    with torch.no_grad():
        torch.nn.init.normal_(network.encoder.embeddings.image_slot_embeddings.weight)  # it starts at zero
        there = network(batch).task.logits
        back = network(dataclasses.replace(batch, image_index=batch.image_index.flip(1))).task.logits
    assert (there - back).abs().max() > 1e-6, "swapping the images changes the result"
    answer = model.ask(tuple(records[0]["file_names"]), "Both images contain a star.")
    assert answer.answer in ("True", "False") and set(answer.box_images) <= {0, 1}
    assert [name for name, _ in answer.top] in (["True", "False"], ["False", "True"])
