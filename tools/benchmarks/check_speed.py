"""How long `e2e-vl check-data` takes on files as large as RefCOCO+'s and VQA v2's, which are generated for it."""

from __future__ import annotations

import json
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from e2e_vl.commands import check_data
from e2e_vl.text import build_vocabulary
from measuring import ROOT

REFERRING = {"images": 19_992, "boxes": 49_856, "texts": 141_564}  # RefCOCO+, all splits
QUESTIONS = {"train": (82_783, 443_757), "val": (40_504, 214_354)}  # VQA v2: images and questions
WORDS = ["the", "left", "red", "dog", "cat", "front", "table", "what", "is", "color", "how", "many", "on", "under"]
ANSWERS = [f"answer {number}" for number in range(3000)]
LONGEST = 12  # wordpieces
BROKEN_EVERY = 10_000  # records between two that are broken


def benchmark_check(folder: Path, kinds: list[str], share: float) -> dict[str, Any]:
    """Write the files of each kind into the folder, unless they are there, and check them.

    Args:
        kinds: "expressions" or "questions".
        share: of the full size.

    Returns:
        `share` and `cases`: each with `kind`, `texts`, `problems`, `seconds` and `cpu_seconds`.
    """
    cases = []
    for kind in kinds:
        place = folder / f"{kind}_{share:g}"
        config = place / "run.yaml"
        if not config.is_file():
            WRITERS[kind](place, share)
        started, cpu = time.perf_counter(), time.process_time()
        check_data.main(["--config", str(config), "--json", str(place / "found.json")])
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        found = json.loads((place / "found.json").read_text(encoding="utf-8"))
        texts = sum(split["texts"] for split in found["splits"])
        problems = len(found["problems"])
        cases.append(
            {"kind": kind, "texts": texts, "problems": problems, "seconds": seconds, "cpu_seconds": cpu_seconds}
        )
    return {"share": share, "cases": cases}


def _write_expressions(folder: Path, share: float) -> None:
    draw = random.Random(0)
    images, boxes, texts = (int(number * share) for number in REFERRING.values())
    names = [f"COCO_train2014_{number:012d}.jpg" for number in range(images)]
    _touch(folder / "images", names)
    annotations = [
        {
            "id": number,
            "image_id": number % images,
            "category_id": number % 80,
            "bbox": [draw.uniform(0, 300), draw.uniform(0, 200), 0 if number % BROKEN_EVERY == 1 else 100.5, 90.25],
            "area": 9000.0,
            "iscrowd": 0,
            "segmentation": [[round(draw.uniform(0, 400), 2) for _ in range(40)]],
        }
        for number in range(boxes)
    ]
    _write_json(
        folder / "instances.json",
        {
            "images": [{"id": n, "file_name": name, "width": 640, "height": 480} for n, name in enumerate(names)],
            "annotations": annotations,
            "categories": [{"id": number, "name": f"class {number}"} for number in range(80)],
        },
    )
    splits = ["train"] * 17 + ["val", "testA", "testB"]
    sentences = [{"sent_id": number, "sent": _sentence(draw, 4)} for number in range(texts)]
    refs = [
        {
            "ref_id": number,
            "ann_id": number,
            "image_id": number % images,
            "split": splits[number % images % len(splits)],
            "sentences": sentences[number::boxes],
        }
        for number in range(boxes)
    ]
    (folder / "refs.p").write_bytes(pickle.dumps(refs, protocol=2))
    build_vocabulary([" ".join(WORDS)], folder / "vocab.txt")
    files = {"images": "images", "instances": "instances.json", "refs": "refs.p"}
    _write_config(folder, "refcoco/vl_bert_base.yaml", files, {"eval_splits": ["val", "testA", "testB"]}, "gt")


def _write_questions(folder: Path, share: float) -> None:
    draw = random.Random(0)
    for split, (images, texts) in QUESTIONS.items():
        images, texts = int(images * share), int(texts * share)
        first = 0 if split == "train" else 10**9
        _touch(folder / split, [f"COCO_{split}2014_{first + number:012d}.jpg" for number in range(images)])
        questions, annotations = [], []
        for number in range(texts):
            facts = {"question_id": first + number, "image_id": first + number % images}
            answer = draw.choice(ANSWERS)
            questions.append({**facts, "question": _sentence(draw, 6) + "?"})
            given = [{"answer": answer, "answer_confidence": "yes", "answer_id": one} for one in range(1, 11)]
            annotations.append(
                {
                    **facts,
                    "answers": [] if number % BROKEN_EVERY == 1 else given,
                    "multiple_choice_answer": answer,
                    "answer_type": "other",
                    "question_type": "what is",
                }
            )
        content = {"data_subtype": f"{split}2014", "questions": questions}
        _write_json(folder / f"{split}_questions.json", content)
        _write_json(folder / f"{split}_annotations.json", {"annotations": annotations})
    build_vocabulary([" ".join(WORDS)], folder / "vocab.txt")
    (folder / "answers.txt").write_text("\n".join(ANSWERS), encoding="utf-8")
    files = {key: f"{{split}}_{key}.json" for key in ("questions", "annotations")}
    files |= {"images": "{split}", "answers": "answers.txt"}
    _write_config(folder, "vqa/vl_bert_base.yaml", files, {"train_split": "train", "eval_splits": ["val"]}, "online")


WRITERS = {"expressions": _write_expressions, "questions": _write_questions}


def _write_config(folder: Path, base: str, files: dict[str, str], data: dict[str, Any], boxes: str) -> None:
    content = {
        "base": str(ROOT / "configs" / base),
        "output": "unused",
        "detector": {"backend": "builtin"},
        "data": {
            "root": str(folder),
            "files": files,
            "vocabulary": str(folder / "vocab.txt"),
            "max_text_length": LONGEST,
            "boxes": {"train": boxes},
            **data,
        },
        "eval": {"boxes": [boxes]},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def _sentence(draw: random.Random, mean: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 2 * mean - 1)))


def _touch(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print("| files | texts | problems | seconds | of the processor |")
    print("|---|---:|---:|---:|---:|")
    for line in _rows(result):
        print(line)
    return 0


def _rows(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        yield (
            f"| {case['kind']} | {case['texts']:,} | {case['problems']:,} | {case['seconds']:.0f} | "
            f"{case['cpu_seconds']:.0f} |"
        )
