"""A tiny hand-made GQA in the official file formats: questions about the photos of the tiny RefCOCO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e_vl.config import DataSettings
from tests.data.tiny_refcoco import TinyRefCOCO

TYPES = {"structural": "query", "semantic": "attr", "detailed": "color"}
PROGRAM = [
    {"operation": "select", "dependencies": [], "argument": "box (1)"},
    {"operation": "query", "dependencies": [0], "argument": "color"},
]
CHOICES = {"valid": ["red", "blue"], "plausible": ["red"]}


def question(image: int, text: str, answer: str | None = "red", **changes: Any) -> dict[str, Any]:
    """One record of a question file."""
    record = {"imageId": str(image), "question": text, "isBalanced": True}
    if answer is not None:
        record |= {"answer": answer, "types": TYPES, "groups": {"global": "color", "local": "x"}, "entailed": []}
        record |= {"semantic": PROGRAM, "fullAnswer": f"{answer}.", "equivalent": []}
    return record | changes


QUESTIONS = {
    "train_balanced": {
        "05": question(7, "What color is it?"),
        "1": question(3, "Is it tall?", "yes"),
        "2": question(7, "Is it red ?", "yes", entailed=["2", "3"]),
    },
    "val_all": {"3": question(9, "What is it?", "box"), "4": question(9, "é?", "box", isBalanced=False)},
    "test_balanced": {"6": question(9, "What?", None)},
}


def write_gqa(tiny: TinyRefCOCO) -> DataSettings:
    """Settings of a folder with the tiny photos under names of GQA."""
    root = tiny.images_root.parent
    for folder in ("questions", "eval", "sceneGraphs", "photos"):
        (root / folder).mkdir()
    for split, questions in QUESTIONS.items():
        put(root / "questions" / f"{split}_questions.json", questions)
        part = split.partition("_")[0]
        if part != "test":
            put(root / "eval" / f"{part}_choices.json", dict.fromkeys(questions, CHOICES))
        graphs = {one["imageId"]: scene_graph(tiny, int(one["imageId"])) for one in questions.values()}
        put(root / "sceneGraphs" / f"{part}_sceneGraphs.json", graphs)
    for image in tiny.instances["images"]:
        (root / "photos" / f"{image['id']}.jpg").write_bytes((tiny.images_root / image["file_name"]).read_bytes())
    files = {
        "images": "photos",
        "questions": "questions/{split}_questions.json",
        "choices": "eval/{part}_choices.json",
        "scene_graphs": "sceneGraphs/{part}_sceneGraphs.json",
        "detections": "dets.json",
    }
    return DataSettings(name="gqa", root=str(root), files=files)


def scene_graph(tiny: TinyRefCOCO, image_id: int) -> dict[str, Any]:
    [image] = [row for row in tiny.instances["images"] if row["id"] == image_id]
    objects = {}
    for row in tiny.instances["annotations"]:
        if row["image_id"] == image_id:
            x, y, w, h = map(int, row["bbox"])
            objects[str(row["id"])] = {"name": "box", "x": x, "y": y, "w": w, "h": h, "attributes": [], "relations": []}
    return {"width": image["width"], "height": image["height"], "objects": objects}


def put(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
