"""Runs on the formats of grounding pre-training, and on images inside parquet files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e_vl.config import RunConfig
from e2e_vl.run.build import make_synthetic_data
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.run.runs import SHORT, logged, predictions_of, tiny
from tests.same import assert_same
from tests.weights.starts import options, replaced

pytestmark = pytest.mark.usefixtures("on_cpu")

PHOTOS = "images/train2014"
HEAD = "phrases={weight: 1.0, layer: 1, size: 8}"
DRAWN = "data.synthetic={scenes: {train: 4, val: 4}, config: {language: {no_target: 0.3}}, formats: [mdetr, odvg]}"
BOXES = (
    "detector.loss_weight=0",
    "data={texts_per_image: 2, boxes: {train: detections}}",
    *("eval.boxes=[detections]", "train.warmup_steps=0"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grounding")


def write_boxes(folder: Path) -> None:
    """A file of the boxes of all objects that captions name, by the names of the images."""
    rows = []
    for path in sorted((folder / "mdetr").glob("final_*.json")):
        content = json.loads(path.read_text())
        names = {image["id"]: Path(image["file_name"]).stem for image in content["images"]}
        for row in content["annotations"]:
            rows.append({"image_id": names[row["image_id"]], "box": row["bbox"], "score": 0.9})
    (folder / "boxes.json").write_text(json.dumps(rows))


@pytest.fixture
def run_on(folder, tmp_path) -> Callable[..., RunConfig]:
    """`run_on(TASK, DATA, "key=value", ...)`: the tiny run of a task on other data, with boxes of a file."""

    def make(task: str, data: dict[str, Any], *words: str) -> RunConfig:
        config = tiny(
            task, folder / task, tmp_path / "run", HEAD, DRAWN, *SHORT, *BOXES, "detector.loss_weight=0", *words
        )
        make_synthetic_data(config)
        write_boxes(folder / task)
        files = {"detections": "boxes.json", **data.get("files", {})}
        return replaced(config, data={**data, "files": files})

    return make


def test_phrases_of_captions_by_mdetr(run_on, tmp_path):
    files = {"annotations": "mdetr/final_flickr_separateGT_{split}.json", "images": PHOTOS}
    metrics = train(run_on("flickr30k", {"name": "mdetr", "files": files, "config": {}}))
    assert 0 <= metrics["val/accuracy_detected_boxes"] <= metrics["val/ceiling_detected_boxes"] <= 1
    predictions = predictions_of(tmp_path / "run", "val_detections")
    assert {prediction["sentence"] for prediction in predictions} >= {0, 1}
    assert all(prediction["gt_boxes"] for prediction in predictions if prediction["phrases"])
    assert all(line["phrases"] > 0 for line in logged(tmp_path / "run"))


def test_expressions_without_a_target_by_mdetr(run_on, tmp_path):
    files = {"annotations": "mdetr/finetune_grefcoco_{split}.json", "images": PHOTOS}
    data = {"name": "mdetr", "files": files, "config": {"texts": "expressions"}}
    metrics = train(run_on("refcoco", data, "task.config.null_candidate=true", "encoder.config.with_pooler=true"))
    assert {"val/n_acc_detected_boxes", "val/t_acc_detected_boxes"} <= metrics.keys()
    assert any(prediction.get("gt_boxes") == [] for prediction in predictions_of(tmp_path / "run", "val_detections"))


def test_pretraining_on_joined_captions_expressions_and_class_names(run_on, tmp_path):
    mixed = {"annotations": "mdetr/final_mixed_{split}.json", "images": "{source}"}
    parts: dict[str, dict[str, Any]] = {
        "mixed": {"name": "mdetr", "files": mixed, "config": {"image_folders": {"coco": PHOTOS, "vg": "mdetr/vg"}}},
    }
    for kind in ("vg", "rec", "od"):
        files = {"annotations": f"odvg/{{split}}_{kind}.jsonl", "images": PHOTOS}
        parts[kind] = {"name": "odvg", "files": files}
    for part in parts.values():
        part["splits"] = {"train": "train", "val": "val"}
    config = run_on("visual_genome", {"name": "joined", "config": {"datasets": parts}})
    objectives = {"masked_text": 0.0, "masked_regions": 0.0, "relationship": 1.0}
    config = replaced(config, task={"config": options(config.task.config) | {"objectives": objectives}})
    metrics = train(config)
    assert 0 <= metrics["val/phrase_accuracy_detected_boxes"] <= 1
    losses = [line["phrases"] for line in logged(tmp_path / "run")]
    assert all(map(math.isfinite, losses)) and sum(losses) > 0


@pytest.mark.parametrize("layout", ["images", "objects"])
def test_a_run_is_evaluated_on_images_inside_parquet_files(trained_run, tmp_path, layout):
    """The boxes of the detector and the answers are those for REFER's files."""
    pytest.importorskip("pyarrow", reason='pyarrow is not installed; pip install "e2e-vl[parquet]" lets this test run')
    expected, path = evaluate_run(trained_run.path, split="val", boxes="online", output=tmp_path / "refer.json")
    words = ["data.name=refcoco_parquet", f"data.files.parquet=refcoco+_parquet/{layout}/{{split}}-*.parquet"]
    output = tmp_path / "parquet.json"
    metrics, output = evaluate_run(trained_run.path, split="val", boxes="online", output=output, overrides=words)
    groups = {name for name in expected if "/by_" in name}
    assert_same(metrics, {name: value for name, value in expected.items() if name in metrics and name not in groups})
    answers = [[record["box"] for record in json.loads(file.read_text())] for file in (path, output)]
    assert answers[0] == answers[1]
