"""Our readers and metrics give the official evaluators' numbers on golden data in the released formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.image_loader import read_detections
from e2e_vl.data.refcoco import Expression, read_expressions, read_refs, split_contains
from e2e_vl.metrics.refcoco import ReferringPrediction, box_iou, referring_metrics
from tests.parity.evaluation_common import folder_of


@pytest.fixture(scope="module")
def refcoco(golden_root: Path) -> dict:
    root = folder_of(golden_root, "refcoco")
    refs_file = next(root.glob("*/refs(*).p"))
    instances = CocoInstances(refs_file.parent / "instances.json")
    detections_file = next(root.glob("detections/*/*_dets.json"))
    return {
        "instances": instances,
        "expressions": read_expressions(refs_file, instances),
        "detections": read_detections(detections_file),
        "det_rows": {row["det_id"]: row for row in json.loads(detections_file.read_text("utf-8"))},
        "predictions": {row["sent_id"]: row for row in json.loads((root / "predictions.json").read_text("utf-8"))},
        "expected": json.loads((root / "expected.json").read_text("utf-8")),
        "refs_file": refs_file,
    }


def in_split(data: dict, split: str) -> list[Expression]:
    return [one for one in data["expressions"] if split_contains(split, one.split)]


def predict(data: dict, split: str, track: str) -> list[ReferringPrediction]:
    """Predictions of a split: the candidate with the highest score is the prediction."""
    instances = data["instances"]
    records = []
    for expression in in_split(data, split):
        prediction = data["predictions"][expression.sent_id]
        if track == "gt_boxes":
            boxes, scores = instances.objects(expression.image_id).boxes, prediction["ann_scores"]
        else:
            boxes, scores = data["detections"][str(expression.image_id)][0], prediction["det_scores"]
        assert len(boxes) == len(scores)
        image = instances[expression.image_id]
        [target] = [one for one in image.objects if (one.id,) == expression.ann_ids]
        records.append(
            ReferringPrediction(
                sent_id=expression.sent_id,
                image_id=expression.image_id,
                ann_id=target.id,
                box=boxes[int(np.argmax(scores))].tolist(),
                score=1.0,
                gt_box=target.box,
                candidate_boxes=boxes.tolist(),
                candidate_ann_ids=[one.id for one in image.objects] if track == "gt_boxes" else [],
                image_size=(image.height, image.width),
            )
        )
    return records


CONVENTION_OF = {
    "mattnet_same_annotation": "same_annotation",
    "mattnet_iou_ge_0.5": "mattnet",
    "mattnet_iou_formula_ge_0.5": "mattnet",
    "vlbert_iou_ge_0.5": "vlbert",
    "uniter_iou_gt_0.5": "strict",
}


@pytest.mark.parametrize("track", ["gt_boxes", "detected_boxes"])
def test_refcoco_accuracies_are_those_of_the_official_evaluators(refcoco, track):
    compared = 0
    for split, expected in refcoco["expected"]["accuracy"].items():
        records = predict(refcoco, split, track)
        assert len(records) == expected["expressions"]
        for name, accuracy in expected[track].items():
            metrics = referring_metrics(records, CONVENTION_OF[name])
            assert metrics["accuracy"] == pytest.approx(accuracy, abs=1e-12), (split, name)
            assert metrics["count"] == expected["expressions"]
            assert metrics["accuracy"] <= metrics["ceiling"] <= 1
            compared += 1
    assert compared >= 2 * len(refcoco["expected"]["accuracy"])


def test_refcoco_choices_and_ious_of_every_expression(refcoco):
    expected = refcoco["expected"]
    rows = {
        row[0]: dict(zip(expected["per_expression_columns"], row, strict=True)) for row in expected["per_expression"]
    }
    seen = 0
    for split in expected["accuracy"]:
        for track, prefix in (("gt_boxes", "gt"), ("detected_boxes", "det")):
            for record in predict(refcoco, split, track):
                row = rows[record.sent_id]
                assert row["gt_ann_id"] == record.ann_id
                if track == "gt_boxes":
                    chosen = int(np.argmax(refcoco["predictions"][record.sent_id]["ann_scores"]))
                    assert record.candidate_ann_ids[chosen] == row["pred_ann_id"]
                else:
                    chosen = refcoco["det_rows"][row["pred_det_id"]]
                    assert chosen["image_id"] == record.image_id
                    x, y, width, height = chosen["box"]
                    assert record.box == pytest.approx([x, y, x + width, y + height], abs=1e-3), record.sent_id
                for convention in ("mattnet", "vlbert"):
                    iou = box_iou(record.box, record.gt_box, convention, record.image_size)
                    assert iou == pytest.approx(row[f"{prefix}_iou_{convention}"], abs=1e-6), record.sent_id
                seen += 1
    assert seen == 2 * len(rows)


def test_refcoco_splits_follow_the_refer_api(refcoco):
    for split, ref_ids in refcoco["expected"]["ref_ids_per_split"].items():
        found = dict.fromkeys(expression.ref_id for expression in in_split(refcoco, split))
        assert set(found) == set(ref_ids), split
        assert list(found) == ref_ids, split


def test_refcoco_python_2_pickle_holds_the_same_as_its_json(refcoco):
    as_json = refcoco["refs_file"].with_suffix(".json")
    if not as_json.exists():
        pytest.skip(f"the set has no {as_json.name}; it is optional")
    assert read_refs(refcoco["refs_file"]) == read_refs(as_json)
