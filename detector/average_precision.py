"""COCO average precision of detections, computed by pycocotools from plain records.

A record is a dict about one image; boxes are xyxy, continuous, in pixels of the original image:

    image_id        int
    boxes           list of [x1, y1, x2, y2], one per detection
    scores          list of floats, one per detection
    category_ids    list of ints, one per detection
    objects         the truth: a list of {"box", "category_id"} with, optionally, "category" (a name), "area" (of the
                    object's mask in pixels of the original image; otherwise the area of its box) and "is_crowd"
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

AREAS = {"s": "small", "m": "medium", "l": "large"}  # below 32^2, up to 96^2, above: pixels of the original image
MAX_DETECTIONS = 100  # per image; pycocotools counts the best


def coco_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """COCO's box metrics over all records.

    Args:
        records: one per image, as above; images without objects or without detections count too.

    Returns:
        in 0 .. 1: `AP` (mean over the IoU thresholds 0.5, 0.55, ..., 0.95 and the categories), `AP50`, `AP75`, `APs`,
        `APm`, `APl` (objects by area), `AR100` (mean recall with up to 100 detections per image), and `AP/<category>`
        for each category of the truth. None where there is no object to find. Crowds are ignored: a detection of one
        is neither right nor wrong. As in COCO, detections of a category that has no object in any record are ignored.

    Raises:
        ValueError: two records of one image; lists of different lengths; boxes or scores that are not finite.
    """
    _check(records)
    categories = {
        entry["category_id"]: str(entry.get("category", entry["category_id"]))
        for record in records
        for entry in record["objects"]
    }
    images = [{"id": record["image_id"]} for record in records]
    truth = _dataset(images, categories, _truth_annotations(records))
    # the area of a detection without a match decides whether it counts in APs, APm or APl
    found = [result | {"area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0} for result in coco_results(records)]
    evaluation = COCOeval(truth, _dataset(images, categories, found), iouType="bbox")
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation.evaluate()
        evaluation.accumulate()
    params = evaluation.params
    area = {name: params.areaRngLbl.index(name) for name in ("all", *AREAS.values())}
    most = params.maxDets.index(MAX_DETECTIONS)
    # [IoU thresholds, recalls, categories, areas, numbers of detections]; -1 where there is no object
    precision = evaluation.eval["precision"]
    metrics = {"AP": _mean(precision[:, :, :, area["all"], most])}
    for percent in (50, 75):
        threshold = int(np.flatnonzero(np.isclose(params.iouThrs, percent / 100))[0])
        metrics[f"AP{percent}"] = _mean(precision[threshold, :, :, area["all"], most])
    for letter, name in AREAS.items():
        metrics[f"AP{letter}"] = _mean(precision[:, :, :, area[name], most])
    metrics[f"AR{MAX_DETECTIONS}"] = _mean(evaluation.eval["recall"][:, :, area["all"], most])
    for column, category_id in enumerate(params.catIds):
        name = categories[category_id]
        name = name if list(categories.values()).count(name) == 1 else f"{name} {category_id}"
        metrics[f"AP/{name}"] = _mean(precision[:, :, column, area["all"], most])
    return metrics


def coco_results(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Detections in COCO's results format: {image_id, category_id, bbox [x, y, width, height], score}."""
    return [
        {"image_id": record["image_id"], "category_id": category_id, "bbox": _xywh(box), "score": score}
        for record in records
        for box, score, category_id in zip(record["boxes"], record["scores"], record["category_ids"], strict=True)
    ]


def _check(records: Sequence[dict[str, Any]]) -> None:
    seen = set()
    for record in records:
        where = f"image {record['image_id']}"
        if record["image_id"] in seen:
            raise ValueError(f"{where} has two records; give one record per image.")
        seen.add(record["image_id"])
        counts = [len(record[key]) for key in ("boxes", "scores", "category_ids")]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{where} has {counts[0]} boxes, {counts[1]} scores and {counts[2]} category ids; give one score and "
                "one category id per box."
            )
        numbers = [*record["scores"], *(value for box in record["boxes"] for value in box)]
        if not np.isfinite(np.array(numbers, dtype=np.float64)).all():
            raise ValueError(f"{where} has a detection whose box or score is not finite; check the detector's weights.")


def _truth_annotations(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    annotations = []
    for record in records:
        for entry in record["objects"]:
            x, y, width, height = _xywh(entry["box"])
            area = entry.get("area")
            annotations.append(
                {
                    "image_id": record["image_id"],
                    "category_id": entry["category_id"],
                    "bbox": [x, y, width, height],
                    "area": width * height if area is None else area,
                    "iscrowd": int(entry.get("is_crowd", False)),
                }
            )
    return annotations


def _dataset(images: list[dict], categories: dict[int, str], annotations: list[dict[str, Any]]) -> COCO:
    """The same object as `COCO(file)`. (`COCO.loadRes` fails where no image has a detection.)"""
    dataset = COCO()
    dataset.dataset = {
        "images": images,
        "categories": [{"id": category_id, "name": name} for category_id, name in categories.items()],
        # ids from 1: pycocotools takes the id 0 of a matched object for "no match"
        "annotations": [annotation | {"id": number} for number, annotation in enumerate(annotations, start=1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        dataset.createIndex()
    return dataset


def _xywh(box: Sequence[float]) -> list[float]:
    x1, y1, x2, y2 = box
    return [x1, y1, x2 - x1, y2 - y1]


def _mean(values: np.ndarray) -> float | None:
    """Mean of the values that exist, that is, are not -1."""
    values = values[values > -1]
    return float(values.mean()) if values.size else None
