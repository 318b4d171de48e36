"""A tiny hand-made VQA in the official file formats: questions about the photos of the tiny RefCOCO."""

from __future__ import annotations

from e2e_vl.config import DataSettings
from tests.data.helpers import write_json
from tests.data.tiny_refcoco import TinyRefCOCO

ANSWERS = ["left side"] * 6 + ["left"] * 4
QUESTIONS = {
    "train2014": [(7, "red square left"), (3, "tall green"), (7, "blue")],
    "val2014": [(9, "left square")],
    "test2015": [(9, "a box")],
}


def write_vqa(tiny: TinyRefCOCO) -> DataSettings:
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
    return DataSettings(name="vqa", root=str(root), files=files)
