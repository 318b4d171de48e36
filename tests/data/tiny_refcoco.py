"""A tiny hand-made RefCOCO in the official file formats: three drawn photos, five refs, nine expressions."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
from PIL import Image

from e2e_vl.config import DataConfig
from e2e_vl.text import build_vocabulary, load_tokenizer

GT_7 = [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 99, 59]]  # annotated in photo 7 (100 x 60), clamped
DETECTIONS_7 = [[61, 11, 89, 39], [11, 21, 29, 39]]  # in file order, scores 0.4 and 0.8
SENTENCES = ["red square on the left", "the red one", "blue square", "blue thing right", "a green box", "tall green"]


class TinyRefCOCO:
    """Contents of the files (change them, then `write`) and their paths."""

    def __init__(self, root: Path) -> None:
        self.images_root = root / "images"
        self.instances_file = root / "instances.json"
        self.refs_file = root / "refs(unc).p"
        self.detections_file = root / "dets.json"
        self.vocabulary_file = root / "vocab.txt"
        self.instances = {
            "images": [
                {"id": 7, "file_name": "seven.png", "width": 100, "height": 60},
                {"id": 3, "file_name": "three.png", "width": 40, "height": 80},
                {"id": 9, "file_name": "nine.png", "width": 50, "height": 50},
            ],
            "categories": [{"id": 90, "name": "box"}, {"id": 2, "name": "square"}],
            "attributes": [{"id": 20, "name": "red"}, {"id": 10, "name": "blue"}, {"id": 30, "name": "green"}],
            "annotations": [
                annotation(100, 7, 2, [10, 20, 20, 20], attribute_ids=[20]),
                annotation(101, 7, 2, [60, 10, 30, 30], attribute_ids=[10, 30]),
                annotation(102, 7, 90, [0, 0, 100, 60], iscrowd=1),
                annotation(200, 3, 90, [5.5, 10, 20.25, 60], attribute_ids=[30]),
                annotation(300, 9, 2, [0, 0, 25, 50]),
                annotation(301, 9, 90, [25, 0, 25, 50]),
            ],
        }
        self.refs = [
            ref(1, 100, 7, "train", ["red square on the left", "the red one"]),
            ref(2, 101, 7, "train", ["blue square", "blue thing right", "blue square"]),
            ref(3, 200, 3, "train", ["a green box", "tall green"]),
            ref(4, 300, 9, "testA", ["left square"]),
            ref(5, 301, 9, "testB", ["a box"]),
        ]
        self.refs[0]["sentences"][0]["family"] = "relation"
        self.detections = [
            detection(0, 3, [6, 11, 20, 58], 0.9),
            detection(1, 7, [61, 11, 28, 28], 0.4),
            detection(2, 7, [11, 21, 18, 18], 0.8),
            detection(3, 9, [1, 1, 24, 48], 0.7),
        ]

    def write(self) -> TinyRefCOCO:
        self.images_root.mkdir(exist_ok=True)
        for image in self.instances["images"]:
            pixels = np.full((image["height"], image["width"], 3), 200, dtype=np.uint8)
            for row in self.instances["annotations"]:
                x, y, w, h = (int(value) for value in row["bbox"])
                if row["image_id"] == image["id"] and not row["iscrowd"]:
                    pixels[y : y + h, x : x + w] = (row["id"] % 256, 30, 60)
            Image.fromarray(pixels).save(self.images_root / image["file_name"])
        self.instances_file.write_text(json.dumps(self.instances), encoding="utf-8")
        self.refs_file.write_bytes(pickle.dumps(self.refs, protocol=2))
        self.detections_file.write_text(json.dumps(self.detections), encoding="utf-8")
        build_vocabulary(SENTENCES, self.vocabulary_file)
        return self

    @property
    def settings(self) -> DataConfig:
        """Settings of the folder, as RefCOCO."""
        names = {"instances": self.instances_file, "refs": self.refs_file, "detections": self.detections_file}
        files = {"images": self.images_root.name} | {key: path.name for key, path in names.items()}
        return DataConfig(name="refcoco", root=str(self.images_root.parent), files=files)

    @property
    def tokenizer(self):
        return load_tokenizer(self.vocabulary_file)


def annotation(ann_id: int, image_id: int, category_id: int, bbox: list[float], **extra) -> dict:
    return {"id": ann_id, "image_id": image_id, "category_id": category_id, "bbox": bbox, "iscrowd": 0, **extra}


def ref(ref_id: int, ann_id: int, image_id: int, split: str, sentences: list[str]) -> dict:
    rows = [
        {"sent_id": 10 * ref_id + i, "sent": sentence, "raw": sentence.upper(), "tokens": sentence.split()}
        for i, sentence in enumerate(sentences)
    ]
    ids = {"ref_id": ref_id, "ann_id": ann_id, "image_id": image_id, "category_id": 2}
    texts = {"sentences": rows, "sent_ids": [row["sent_id"] for row in rows]}
    return ids | texts | {"split": split, "file_name": f"not_a_file_{ref_id}.jpg"}


def detection(det_id: int, image_id: int, box: list[float], score: float) -> dict:
    names = {"category_id": 2, "category_name": "square"}
    return {"det_id": det_id, "h5_id": det_id, "image_id": image_id, "box": box, "score": score, **names}
