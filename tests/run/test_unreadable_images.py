"""An image that an evaluation cannot read is named and counted, and ends no run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from e2e_vl.io import read_log
from e2e_vl.run import evaluate as evaluation
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train

SETTINGS = (
    "data.boxes.train=gt",
    "detector.loss_weight=0",
    "eval.boxes=[gt]",
    "train.max_steps=3",
    "train.save_every_epochs=0.3333333",
    "eval.every_epochs=0.6666667",
    "data.workers=1",
    "data.texts_per_image=null",  # three steps per epoch
)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def data(tiny_words, tmp_path) -> Path:
    """A copy of the tiny data set, in which an image of the evaluation is cut off."""
    [root] = [word.partition("=")[2] for word in tiny_words if word.startswith("data.root=")]
    shutil.copytree(root, tmp_path / "data")
    image = sorted((tmp_path / "data" / "images" / "train2014").iterdir())[12]
    image.write_bytes(image.read_bytes()[:200])
    return tmp_path / "data"


def test_a_corrupt_image_of_the_evaluation_ends_no_run(data, tiny_config, caplog):
    config = tiny_config(*SETTINGS, f"data.root={data}")
    run = Path(config.output)
    metrics = train(config)
    assert metrics["val/unreadable_images_gt_boxes"] == 1
    records = json.loads((run / "predictions_val_gt.json").read_text())
    [lost] = json.loads((run / "unreadable_val_gt.json").read_text())
    assert lost["images"] == ["13"] and "000000000013" in lost["reason"]
    assert {record["image_id"] for record in records}.isdisjoint({13})
    assert sorted([record["text_index"] for record in records] + lost["texts"]) == list(
        range(len(records) + len(lost["texts"]))
    )
    assert metrics["val/count_gt_boxes"] == len(records)
    assert "val, gt: " in caplog.text and "000000000013" in caplog.text and "have no prediction" in caplog.text
    [line] = [line for line in read_log(run / "log.jsonl") if line["kind"] == "eval" and line["step"] == 2]
    assert line["val/unreadable_images_gt_boxes"] == 1
    # later, only by request
    with pytest.raises(ValueError, match=r"000000000013.*skip_broken=true"):
        evaluate_run(run, split="val", boxes="gt")
    again, path = evaluate_run(run, split="val", boxes="gt", overrides=["data.skip_broken=true"])
    assert again["val/unreadable_images_gt_boxes"] == 1
    assert len(json.loads(path.with_name("val_gt_unreadable.json").read_text())) == 1


def test_a_checkpoint_comes_before_the_evaluation_of_its_step(tiny_config, monkeypatch):
    """Whatever happens in an evaluation, its step is saved, and a resumed run makes the evaluation."""
    config = tiny_config(*SETTINGS)
    evaluate = evaluation.evaluate

    def fail(*arguments, **named):
        raise ValueError("the annotations of image 13 are damaged")

    monkeypatch.setattr(evaluation, "evaluate", fail)
    with pytest.raises(ValueError, match="damaged"):
        train(config)
    assert (Path(config.output) / "checkpoints" / "step_00000002" / "step.json").is_file()
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    train(config, resume=True)
    lines = read_log(Path(config.output) / "log.jsonl")
    assert [(line["step"], line["kind"]) for line in lines] == [
        *((1, "train"), (2, "train"), (2, "eval"), (3, "train"), (3, "eval")),
    ]
