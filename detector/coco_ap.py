"""COCO average precision of detections, computed with pycocotools.

A record is a dict with the detections and objects of one image. Boxes are xyxy in pixels of the original image:

    image_id        int
    boxes           list of [x1, y1, x2, y2], one per detection
    scores          list of floats, one per detection
    category_ids    list of ints, one per detection
    objects         ground truth: a list of {"box", "category_id"} with the optional keys "category" (a name), "area"
                    (of the object's mask in pixels of the original image; default: the box area) and "is_crowd"
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

SUMMARY = {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5, "AR100": 8}  # index in `COCOeval.stats`


def coco_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Compute COCO's box metrics.

    Args:
        records: one per image, see above. Include images without objects or without detections.

    Returns:
        values in 0 .. 1, or None if there is no object: `AP` (mean over the categories and the IoU thresholds 0.5,
        0.55, ..., 0.95), `AP50`, `AP75`, `APs`, `APm`, `APl` (objects with an area below 32^2, up to 96^2, above),
        `AR100` (mean recall), and `AP/<category>` for each category in the ground truth. The 100 detections with the
        highest scores count in each image. As in COCO, detections of crowds and of categories without any object are
        ignored.
    """
    categories = {
        entry["category_id"]: str(entry.get("category", entry["category_id"]))
        for record in records
        for entry in record["objects"]
    }
    images = [{"id": record["image_id"]} for record in records]
    objects = [
        {
            "image_id": record["image_id"],
            "category_id": entry["category_id"],
            "bbox": (box := _xywh(entry["box"])),
            "area": box[2] * box[3] if entry.get("area") is None else entry["area"],
            "iscrowd": int(entry.get("is_crowd", False)),
        }
        for record in records
        for entry in record["objects"]
    ]
    truth = _dataset(images, categories, objects)
    # the area of an unmatched detection decides whether it counts in APs, APm or APl
    found = [
        {
            "image_id": record["image_id"],
            "category_id": category_id,
            "bbox": (corner_and_sides := _xywh(box)),
            "area": corner_and_sides[2] * corner_and_sides[3],
            "iscrowd": 0,
            "score": score,
        }
        for record in records
        for box, score, category_id in zip(record["boxes"], record["scores"], record["category_ids"], strict=True)
    ]
    evaluation = COCOeval(truth, _dataset(images, categories, found), iouType="bbox")
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    metrics = {name: None if evaluation.stats[i] < 0 else float(evaluation.stats[i]) for name, i in SUMMARY.items()}
    # [IoU thresholds, recalls, categories], all areas and 100 detections; -1 where there is no object
    precision = evaluation.eval["precision"][..., 0, -1]
    for column, category_id in enumerate(evaluation.params.catIds):
        name = categories[category_id]
        name = name if list(categories.values()).count(name) == 1 else f"{name} {category_id}"
        values = precision[:, :, column]
        metrics[f"AP/{name}"] = float(values[values > -1].mean()) if (values > -1).any() else None
    return metrics


def _dataset(images: list[dict], categories: dict[int, str], annotations: list[dict[str, Any]]) -> COCO:
    """Build a `COCO` object without a file. `COCO.loadRes` fails if there are no detections."""
    dataset = COCO()
    dataset.dataset = {
        "images": images,
        "categories": [{"id": category_id, "name": name} for category_id, name in categories.items()],
        # ids start at 1: pycocotools reads the id 0 of a matched object as "no match"
        "annotations": [annotation | {"id": number} for number, annotation in enumerate(annotations, start=1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        dataset.createIndex()
    return dataset


def _xywh(box: Sequence[float]) -> list[float]:
    x1, y1, x2, y2 = box
    return [x1, y1, x2 - x1, y2 - y1]
