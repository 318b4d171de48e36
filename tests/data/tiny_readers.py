"""Every reader on the photos of the tiny RefCOCO: what holds for one data set holds for all of them."""

from __future__ import annotations

from e2e_vl.config import DataConfig
from e2e_vl.data.base import VLDataset
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco import CocoDetectionDataset
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.vqa import VQADataset
from tests.data.helpers import open_dataset, write_json
from tests.data.tiny_refcoco import TinyRefCOCO

ANSWERS = ["left side"] * 6 + ["left"] * 4
QUESTIONS = {
    "train2014": [(7, "red square left"), (3, "tall green"), (7, "blue")],
    "val2014": [(9, "left square")],
    "test2015": [(9, "a box")],
}


def write_vqa(tiny: TinyRefCOCO) -> DataConfig:
    """Settings of a folder with the tiny photos under the names of COCO. The test split has no answers."""
    root = tiny.images_root.parent
    for split, questions in QUESTIONS.items():
        rows = [
            {"question_id": 1000 * image + number, "image_id": image, "question": text}
            for number, (image, text) in enumerate(questions)
        ]
        write_json(root / "vqa" / f"{split}_questions.json", {"data_subtype": split, "questions": rows})
        if split != "test2015":
            kinds = {"answer_type": "other", "question_type": "what", "multiple_choice_answer": "left side"}
            answers = [{"answer": answer, "answer_id": 1} for answer in ANSWERS]
            annotations = [
                {"question_id": row["question_id"], "image_id": row["image_id"], "answers": answers, **kinds}
                for row in rows
            ]
            write_json(root / "vqa" / f"{split}_annotations.json", {"annotations": annotations})
        (root / split).mkdir()
        for image in tiny.instances["images"]:
            name = root / split / f"COCO_{split}_{image['id']:012d}.jpg"
            name.write_bytes((tiny.images_root / image["file_name"]).read_bytes())
    files = {
        "images": "{images}",
        "questions": "vqa/{split}_questions.json",
        "annotations": "vqa/{split}_annotations.json",
        "instances": "instances.json",
        "detections": "dets.json",
    }
    return DataConfig(name="vqa", root=str(root), files=files)


def settings_of(tiny: TinyRefCOCO, name: str, files: dict[str, str]) -> DataConfig:
    return DataConfig(name=name, root=str(tiny.images_root.parent), files=files)


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
    write_json(tiny.images_root.parent / "captions.json", {"images": tiny.instances["images"], "annotations": rows})
    files = {"images": "images", "instances": "instances.json", "captions": "captions.json"}
    return open_dataset(CaptionDataset, settings_of(tiny, "captions", files), "train", objects=True)


READERS = {reader.__name__: reader for reader in (refcoco, coco_detection, vqa, captions)}
