"""Every reader on the photos of the tiny RefCOCO: what holds for one data set holds for all of them."""

from __future__ import annotations

import json

from e2e_vl.config import DataSettings
from e2e_vl.data.base import VLDataset
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco import CocoDetectionDataset
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.data.vqa import VQADataset
from tests.data.helpers import open_dataset
from tests.data.tiny_refcoco import TinyRefCOCO
from tests.data.tiny_vqa import write_vqa


def settings_of(tiny: TinyRefCOCO, name: str, files: dict[str, str], config: dict | None = None) -> DataSettings:
    return DataSettings(name=name, root=str(tiny.images_root.parent), files=files, config=config or {})


def refcoco(tiny: TinyRefCOCO) -> RefCOCODataset:
    return open_dataset(RefCOCODataset, tiny.settings, "train", "gt")


def coco_detection(tiny: TinyRefCOCO) -> CocoDetectionDataset:
    files = {"images": "images", "instances": "instances.json"}
    return open_dataset(CocoDetectionDataset, settings_of(tiny, "coco_detection", files), "train")


def vqa(tiny: TinyRefCOCO) -> VLDataset:
    return open_dataset(VQADataset, write_vqa(tiny), "train2014", "gt", training=True)


def captions(tiny: TinyRefCOCO) -> CaptionDataset:
    rows = [
        {"image_id": image["id"], "id": number, "caption": f"a {colour} square"}
        for image in tiny.instances["images"]
        for number, colour in enumerate(("red", "blue"))
    ]
    file = tiny.images_root.parent / "captions.json"
    file.write_text(json.dumps({"images": tiny.instances["images"], "annotations": rows}), encoding="utf-8")
    files = {"images": "images", "instances": "instances.json", "captions": file.name}
    return open_dataset(CaptionDataset, settings_of(tiny, "captions", files), "train", "gt", objects=True)


def vcr(tiny: TinyRefCOCO) -> VCRDataset:
    names = {row["id"]: row["name"] for row in tiny.instances["categories"]}
    lines = []
    for image in tiny.instances["images"]:
        objects = [row for row in tiny.instances["annotations"] if row["image_id"] == image["id"]]
        boxes = [[x, y, x + width, y + height] for x, y, width, height in (row["bbox"] for row in objects)]
        metadata = {
            "boxes": [[*box, 0.9] for box in boxes],
            "segms": [[[[x1, y1], [(x1 + x2) / 2, y1], [x1, y2]]] for x1, y1, x2, y2 in boxes],
            "names": [names[row["category_id"]] for row in objects],
            "width": image["width"],
            "height": image["height"],
        }
        name = image["file_name"].replace(".png", ".json")
        (tiny.images_root / name).write_text(json.dumps(metadata), encoding="utf-8")
        lines += [
            {
                "annot_id": f"train-{image['id']}-{number}",
                "img_fn": image["file_name"],
                "metadata_fn": name,
                "objects": metadata["names"],
                "question": ["Is", [0], word, "?"],
                "answer_choices": [["yes"], ["no"], [[0]], [word]],
                "rationale_choices": [["yes"], ["no"], [[0]], [word]],
                "answer_label": 0,
                "rationale_label": 1,
            }
            for number, word in enumerate(("red", "blue"))
        ]
    file = tiny.images_root.parent / "vcr.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files, config = {"images": "images", "questions": "vcr.jsonl"}, {"class_names": ["square", "box"]}
    return open_dataset(VCRDataset, settings_of(tiny, "vcr", files, config), "train", "gt")


READERS = {reader.__name__: reader for reader in (refcoco, coco_detection, vqa, captions, vcr)}
