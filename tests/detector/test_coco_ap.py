from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detector.coco_ap import coco_metrics

CATEGORIES = {3: "cat", 17: "dog", 44: "kite"}


def random_records(seed: int, images: int = 12) -> list[dict]:
    """Noisy detections of random objects of all sizes: misses, doubles, wrong categories, crowds, empty images."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(images):
        objects, boxes, ids = [], [], []
        for _ in range(int(rng.integers(1, 7)) if number % 5 else 0):
            corner, side = rng.uniform(0, 300, 2), np.exp(rng.uniform(np.log(8), np.log(250), 2))
            box = np.concatenate([corner, corner + side])
            category = int(rng.choice([3, 17]))
            area = float(side.prod() * rng.uniform(0.3, 1))
            is_crowd = bool(rng.random() < 0.15)
            objects.append(
                {"box": box.tolist(), "category_id": category, "category": CATEGORIES[category]}
                | {"area": area, "is_crowd": is_crowd}
            )
            for _ in range(int(rng.integers(0, 3))):
                boxes.append((box + rng.normal(0, 0.08, 4) * side.repeat(2)).tolist())
                ids.append(category if rng.random() < 0.8 else 44)
        boxes += (rng.uniform(0, 100, (2, 4)) + np.array([0, 0, 110, 110])).tolist()
        ids += [3, 17]
        scores = rng.random(len(boxes)).tolist()
        records.append(
            {"image_id": 100 - number, "boxes": boxes, "scores": scores, "category_ids": ids, "objects": objects}
        )
    return records


def by_pycocotools(records: list[dict], folder: Path) -> COCOeval:
    """The way its documentation goes: from files."""

    def xywh(box: list[float]) -> list[float]:
        return [*box[:2], box[2] - box[0], box[3] - box[1]]

    annotations = [
        {"image_id": record["image_id"], "category_id": entry["category_id"], "bbox": xywh(entry["box"])}
        | {"area": entry["area"], "iscrowd": int(entry["is_crowd"])}
        for record in records
        for entry in record["objects"]
    ]
    content = {
        "images": [{"id": record["image_id"]} for record in records],
        "annotations": [{"id": number, **entry} for number, entry in enumerate(annotations, start=1)],
        "categories": [{"id": key, "name": name} for key, name in CATEGORIES.items()],
    }
    found = [
        {"image_id": record["image_id"], "category_id": category, "score": score, "bbox": xywh(box)}
        for record in records
        for box, score, category in zip(record["boxes"], record["scores"], record["category_ids"], strict=True)
    ]
    (folder / "truth.json").write_text(json.dumps(content))
    (folder / "found.json").write_text(json.dumps(found))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(folder / "truth.json")
        evaluation = COCOeval(truth, truth.loadRes(str(folder / "found.json")), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


@pytest.mark.parametrize("seed", range(2))
def test_numbers_are_those_of_pycocotools(seed, tmp_path, capfd):
    records = random_records(seed)
    metrics = coco_metrics(records)
    assert capfd.readouterr().out == ""
    expected = by_pycocotools(records, tmp_path)
    names = dict(zip(("AP", "AP50", "AP75", "APs", "APm", "APl"), expected.stats[:6], strict=True))
    names["AR100"] = expected.stats[8]
    assert 0.05 < metrics["AP"] < metrics["AP50"] < 0.95
    for name, value in names.items():
        assert metrics[name] == pytest.approx(value, abs=1e-12), name
    for column, name in enumerate(("cat", "dog")):
        precision = expected.eval["precision"][:, :, column, 0, -1]
        assert metrics[f"AP/{name}"] == pytest.approx(precision[precision > -1].mean(), abs=1e-12)
    assert set(metrics) == {*names, "AP/cat", "AP/dog"}  # no kite in the truth


def test_a_false_detection_costs_precision_and_a_missed_object_recall():
    box = [10.0, 10.0, 50.0, 50.0]
    record = {"image_id": 1, "boxes": [box], "scores": [0.5], "category_ids": [3], "objects": []}
    truth = [{"box": box, "category_id": 3}]
    found = record | {"objects": truth}
    assert coco_metrics([found])["AP"] == pytest.approx(1)
    # a more certain detection where there is nothing: precision 1/2 at every recall
    false = record | {"image_id": 2, "scores": [0.9]}
    assert coco_metrics([found, false])["AP"] == pytest.approx(0.5)
    # the object of a second image is not found: recall stops at 1/2, which 51 of the 101 recall points reach
    missed = record | {"image_id": 2, "boxes": [], "scores": [], "category_ids": [], "objects": truth}
    metrics = coco_metrics([found, missed])
    assert metrics["AP"] == pytest.approx(51 / 101)
    assert metrics["AR100"] == pytest.approx(0.5)
    assert metrics["AP/3"] == metrics["AP"]  # without a name, the id


def test_without_an_area_the_box_decides_the_size():
    entry = {"box": [0.0, 0.0, 20.0, 20.0], "category_id": 1}
    record = {"image_id": 1, "boxes": [entry["box"]], "scores": [1.0], "category_ids": [1], "objects": [entry]}
    assert coco_metrics([record])["APs"] == pytest.approx(1)
    assert coco_metrics([record])["APm"] is None
    assert coco_metrics([record | {"objects": [entry | {"area": 2000.0}]}])["APm"] == pytest.approx(1)


def test_nothing_found_is_zero_and_nothing_to_find_is_none():
    records = random_records(0)
    blank = [record | {"boxes": [], "scores": [], "category_ids": []} for record in records]
    assert {coco_metrics(blank)[name] for name in ("AP", "AP50", "AR100", "AP/cat")} == {0.0}
    empty = [record | {"objects": []} for record in records]
    assert set(coco_metrics(empty).values()) == {None}
    assert set(coco_metrics([]).values()) == {None}


def test_categories_of_one_name_stay_apart():
    box = [0.0, 0.0, 20.0, 20.0]
    objects = [{"box": box, "category_id": number, "category": "thing"} for number in (1, 2)]
    record = {"image_id": 1, "boxes": [box], "scores": [1.0], "category_ids": [2], "objects": objects}
    metrics = coco_metrics([record])
    assert (metrics["AP/thing 1"], metrics["AP/thing 2"]) == (0.0, pytest.approx(1))
