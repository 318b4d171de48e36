"""Mean losses of a split: over items, not over batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from detector.structures import Loss
from e2e_vl.config import load_config
from e2e_vl.run import evaluate as evaluation
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.optim import LossSums
from e2e_vl.run.train import train


def loss(total: float, count: float) -> Loss:
    return Loss(torch.tensor(total), torch.tensor(count))


def test_means_are_over_the_items_of_all_batches(tiny_config):
    sums = LossSums()
    sums.add({"words": loss(6.0, 2.0), "phrases": loss(1.0, 1.0)})
    sums.add({"words": loss(1.0, 5.0), "none": loss(0.0, 0.0)})
    assert sums.means() == {"words": 1.0, "phrases": 1.0}
    assert sums.score(tiny_config("phrases.weight=0.5")) == {"loss": 1.5}
    assert LossSums().score(tiny_config()) == {}


@pytest.mark.usefixtures("on_cpu")
def test_a_run_keeps_the_model_of_the_least_loss(tiny_config, monkeypatch, tmp_path):
    """Only the split and the boxes that are judged have a loss, and it is what the batches of the evaluation gave."""
    seen: list[list[Loss]] = []

    class Watched(LossSums):
        def __init__(self) -> None:
            super().__init__()
            seen.append([])

        def add(self, losses) -> None:
            seen[-1] += losses.values()
            super().add(losses)

    monkeypatch.setattr(evaluation, "LossSums", Watched)
    every = ("train.max_steps=2", "eval.every_epochs=0.3333333", "data.texts_per_image=null")
    metrics = train(tiny_config("train.keep_best=val/loss_gt_boxes", "eval.boxes=[gt, detections]", *every))
    assert "val/loss_detected_boxes" not in metrics
    [name] = {name for name in metrics if "loss" in name}
    total, count = (sum(float(getattr(one, part)) for one in seen[-1]) for part in ("total", "count"))
    # the last evaluation was of the best model
    assert metrics["best"]["value"] == pytest.approx(total / count) and count > 0
    assert metrics["best"]["value"] < metrics[name]

    again, path = evaluate_run(tmp_path / "run", split="val", boxes="gt", with_loss=True)
    assert again[name] == pytest.approx(metrics[name], rel=1e-6)
    written = json.loads(path.with_name(f"{path.stem}_metrics.json").read_text(encoding="utf-8"))
    assert written[name] == again[name] and name not in evaluate_run(tmp_path / "run", split="val", boxes="gt")[0]


def test_best_of_saved_configs_is_a_loss_where_the_official_code_judges_by_it():
    folder = Path(__file__).parents[2] / "configs" / "pretraining"
    files = [path for path in folder.glob("visual_bert_*.yaml") if path.stem != "visual_bert_common"]
    found = {path.stem: load_config(path, ["data.root=DATA"]).train.keep_best for path in files}
    assert len(found) == 8 and all("/loss_" in name for name in found.values()), found
