"""Drawn annotations in the released formats, and predictions for them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np

WORDS = ("left man", "man", "the red cup", "woman in blue", "dog")


def draw_refcoco(root: Path, seed: int, images: int = 12, folder: str = "refcoco") -> list[dict]:
    """Write `refcoco/` with a split val; return a row per expression: sent_id, ann_id, image_id, words, box, size."""
    generator = np.random.default_rng(seed)
    rows = []
    instances: dict[str, list] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "thing"}]}
    refs = []
    for number in range(images):
        image_id = 1000 + number
        width, height = generator.integers(300, 641, 2).tolist()
        name = f"COCO_train2014_{image_id:012d}.jpg"
        instances["images"].append({"id": image_id, "file_name": name, "width": width, "height": height})
        for _ in range(2):
            ann_id = 50_000 + len(refs)
            corner = generator.uniform(0, 0.6, 2) * (width, height)
            sides = generator.uniform(0.1, 0.4, 2) * (width, height)
            x, y, w, h = np.concatenate([corner, sides]).round(2).tolist()
            annotation = {"id": ann_id, "image_id": image_id, "category_id": 1, "bbox": [x, y, w, h], "iscrowd": 0}
            instances["annotations"].append(annotation)
            sentences = []
            for words in generator.choice(WORDS, 2, replace=False).tolist():
                sent_id = 7000 + len(rows)
                sentences.append({"sent_id": sent_id, "sent": words})
                row = {"sent_id": sent_id, "ann_id": ann_id, "image_id": image_id, "words": words, "file_name": name}
                rows.append({**row, "box": [x, y, x + w, y + h], "size": (height, width)})
            ids = {"ref_id": len(refs), "ann_id": ann_id, "image_id": image_id}
            refs.append({**ids, "split": "val", "sentences": sentences})
    (root / folder).mkdir(parents=True)
    (root / folder / "instances.json").write_text(json.dumps(instances))
    (root / folder / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))
    return rows


def draw_grefcoco(root: Path, seed: int, images: int = 20) -> list[dict]:
    """Write `grefcoco/` with a split val; return a row per expression, whose "boxes" may be none or several."""
    rows = draw_refcoco(root, seed, images, "grefcoco")
    generator = np.random.default_rng(seed)
    by_image: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        by_image.setdefault(row["image_id"], {})[row["ann_id"]] = row["box"]
    refs = []
    for number, row in enumerate(rows):
        objects = by_image[row["image_id"]]
        ann_ids = list(objects)[: int(generator.integers(0, 3))]
        row["boxes"] = [objects[ann_id] for ann_id in ann_ids]
        sentence = {"sent_id": row["sent_id"], "sent": row["words"]}
        ids = {"ref_id": number, "ann_id": ann_ids or [-1], "image_id": row["image_id"]}
        refs.append({**ids, "split": "val", "sentences": [sentence]})
    (root / "grefcoco" / "grefs(unc).json").write_text(json.dumps(refs))
    return rows


def draw_flickr30k(root: Path) -> list[list[list[float]]]:
    """Write `flickr30k/` with one caption in the split val; return the true boxes of its two phrases, from 1."""
    folder = root / "flickr30k"
    entities = folder / "Flickr30kEntities"
    for name in ("Sentences", "Annotations"):
        (entities / name).mkdir(parents=True)
    (folder / "val.txt").write_text("77\n")
    caption = "[/EN#1/people Two men] in [/EN#2/clothing red]"
    (entities / "Sentences" / "77.txt").write_text(f"{caption}\nA day out .\n")
    boxes = [[[10, 10, 110, 110], [210, 10, 310, 110]], [[10, 10, 60, 110]]]
    objects = ""
    for chain, boxes_of_phrase in enumerate(boxes, start=1):
        for x1, y1, x2, y2 in boxes_of_phrase:
            sides = f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
            objects += f"<object><name>{chain}</name><bndbox>{sides}</bndbox></object>"
    size = "<size><width>500</width><height>300</height><depth>3</depth></size>"
    (entities / "Annotations" / "77.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    return boxes


def draw_predictions(rows: list[dict], seed: int, most_boxes: int = 4) -> list[dict]:
    """Return boxes (some good, some exactly at an IoU of 0.5 or beside the object) and scores for each row."""
    generator = np.random.default_rng(seed)
    predictions = []
    for row in rows:
        boxes = []
        for _ in range(int(generator.integers(1, most_boxes + 1))):
            x1, y1, x2, y2 = row["box"]
            kind = generator.integers(4)
            if kind == 0:
                box = [x1, y1, x2, (y1 + y2) / 2]
            elif kind == 1:
                box = [x2, y1, x2 + 5, y2]
            else:
                box = np.array(row["box"]) + generator.normal(0, 0.1, 4) * np.tile([x2 - x1, y2 - y1], 2)
                box = np.concatenate([np.minimum(box[:2], box[2:]), np.maximum(box[:2], box[2:])])
                box = np.clip(box, 0, np.tile(row["size"][::-1], 2)).tolist()
            boxes.append([float(value) for value in box])
        scores = generator.permutation(len(boxes)) / len(boxes) + 0.1
        predictions.append({"boxes": boxes, "scores": scores.tolist()})
    return predictions
