"""Generates annotation files as large as those of the papers' data sets, with a few broken records, and a config."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from detector.io import read_yaml
from e2e_vl.text import build_vocabulary
from measuring import ROOT

# RefCOCO+, all splits; the instances have all annotations of the images, of which a quarter is referred to
REFERRING = {"images": 19_992, "boxes": 196_737, "referred": 49_856, "texts": 141_564}
# images and texts of each split
QUESTIONS = {"train": (82_783, 443_757), "val": (40_504, 214_354)}  # VQA v2
GRAPH_QUESTIONS = {"train_balanced": (72_140, 943_000), "val_balanced": (10_234, 132_062)}  # GQA
PAIRS = {"train": (51_798, 86_373), "dev": (4_194, 6_982)}  # NLVR2: pairs of images
CHOICES = {"train": (80_418, 212_923), "val": (9_929, 26_534)}  # VCR
CAPTIONS = {"train": (29_783, 148_915), "val": (1_000, 5_000)}  # Flickr30K Entities: five captions each
WORDS = ["the", "left", "red", "dog", "cat", "front", "table", "what", "is", "color", "how", "many", "on", "under"]
ANSWERS = [f"answer {number}" for number in range(3000)]
BROKEN_EVERY = 10_000  # records between two that are broken


def _write_expressions(folder: Path, share: float) -> None:
    draw = random.Random(0)
    images, boxes, referred, texts = (int(number * share) for number in REFERRING.values())
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
            "sentences": sentences[number::referred],
        }
        for number in range(referred)
    ]
    (folder / "refs.p").write_bytes(pickle.dumps(refs, protocol=2))
    build_vocabulary([" ".join(WORDS)], folder / "vocab.txt")
    files = {"images": "images", "instances": "instances.json", "refs": "refs.p"}
    _write_config(folder, "expressions", files, ["train", "val", "testA", "testB"], "gt", 12)


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
    _write_config(folder, "questions", files, list(QUESTIONS), "online", 12)


def _write_graph_questions(folder: Path, share: float) -> None:
    """GQA: questions with programs, and scene graphs."""
    draw = random.Random(0)
    for split, (images, texts) in GRAPH_QUESTIONS.items():
        images, texts = int(images * share), int(texts * share)
        first = 0 if split.startswith("train") else 10**7
        ids = [str(first + number) for number in range(images)]
        _touch(folder / "images", [f"{one}.jpg" for one in ids])
        questions = (
            (f"{first + number:08d}", _graph_question(draw, number, ids[number % images])) for number in range(texts)
        )
        _write_object(folder / f"{split}_questions.json", questions)
        graphs = ((one, _scene_graph(draw)) for one in ids)
        _write_object(folder / f"{split.partition('_')[0]}_sceneGraphs.json", graphs)
    build_vocabulary([" ".join(WORDS)], folder / "vocab.txt")
    (folder / "answers.json").write_text(json.dumps(ANSWERS), encoding="utf-8")
    files = {"images": "images", "questions": "{split}_questions.json", "scene_graphs": "{part}_sceneGraphs.json"}
    files["answers"] = "answers.json"
    _write_config(folder, "graph_questions", files, list(GRAPH_QUESTIONS), "gt", 20)


def _graph_question(draw: random.Random, number: int, image_id: str) -> dict[str, Any]:
    answer, thing = draw.choice(ANSWERS), str(draw.randrange(10**6))
    steps = [("select", f"dog ({thing})"), ("relate", f"table,on,s ({thing})"), ("filter color", "red"), ("query", "x")]
    return {
        "semantic": [
            {"operation": operation, "dependencies": [step - 1] if step else [], "argument": argument}
            for step, (operation, argument) in enumerate(steps)
        ],
        "entailed": [f"{number + step:08d}" for step in range(1, 4)],
        "equivalent": [f"{number:08d}"],
        "question": _sentence(draw, 8) + "?",
        **({} if number % BROKEN_EVERY == 1 else {"imageId": image_id}),
        "isBalanced": True,
        "groups": {"global": "dog", "local": f"10q-{answer}_{thing}"},
        "answer": answer,
        "semanticStr": "->".join(
            f"{operation}: {argument} [{step}]" for step, (operation, argument) in enumerate(steps)
        ),
        "annotations": {"answer": {"0": thing}, "question": {"4": thing, "7:9": thing}, "fullAnswer": {"1": thing}},
        "types": {"detailed": "relO", "semantic": "rel", "structural": "query"},
        "fullAnswer": f"The {answer} is on the table in front of the dog.",
    }


def _scene_graph(draw: random.Random) -> dict[str, Any]:
    ids = [str(draw.randrange(10**6)) for _ in range(16)]
    objects = {
        one: {
            "name": draw.choice(WORDS),
            "x": draw.randrange(300),
            "y": draw.randrange(200),
            "w": draw.randrange(1, 200),
            "h": 90,
            "attributes": draw.choices(WORDS, k=2),
            "relations": [{"name": "to the left of", "object": other} for other in draw.sample(ids, 3)],
        }
        for one in ids
    }
    return {"width": 500, "height": 375, "objects": objects}


def _write_pairs(folder: Path, share: float) -> None:
    """NLVR2: sentences about two images, with who judged them and where the images were."""
    draw = random.Random(0)
    for split, (pairs, texts) in PAIRS.items():
        pairs, texts = int(pairs * share), int(texts * share)
        with (_folder(folder) / f"{split}.json").open("w", encoding="utf-8") as file:
            for number in range(texts):
                record = {
                    "validation": {str(one): "True" for one in range(4)},
                    "sentence": _sentence(draw, 15),
                    **{
                        f"{side}_url": f"https://example.org/photos/{number % pairs}/{side}"
                        for side in ("left", "right")
                    },
                    "writer": number % 90,
                    "label": "maybe" if number % BROKEN_EVERY == 1 else draw.choice(("True", "False")),
                    "synset": draw.choice(WORDS),
                    "query": f"{draw.choice(WORDS)}{number % 50}",
                    "identifier": f"{split}-{number % pairs}-0-{number // pairs}",
                    **({"directory": str(number % pairs % 100)} if split == "train" else {}),
                }
                file.write(json.dumps(record) + "\n")
        for place in range(100) if split == "train" else (None,):
            own = range(pairs) if place is None else range(place, pairs, 100)
            names = [f"{split}-{number}-0-img{side}.png" for number in own for side in (0, 1)]
            _touch(folder / "images" / split / ("" if place is None else str(place)), names)
    build_vocabulary([" ".join(WORDS)], folder / "vocab.txt")
    files = {"images": "images/{images}", "examples": "{split}.json"}
    _write_config(folder, "pairs", files, list(PAIRS), "online", 40)


def _write_choices(folder: Path, share: float) -> None:
    """VCR: questions with four answers and four rationales, and a metadata file for each image."""
    draw = random.Random(0)
    objects = ["person"] * 5 + ["dog", "chair", "chair", "cup", "tv"]
    for split, (images, texts) in CHOICES.items():
        images, texts = int(images * share), int(texts * share)
        place = _folder(folder / "vcr1images" / split)
        _touch(place, [f"{number}.jpg" for number in range(images)])
        for number in range(images):
            boxes = [
                [x := draw.uniform(0, 900), y := draw.uniform(0, 400), x + 200.25, y + 300.5, draw.random()]
                for _ in objects
            ]
            outlines = [
                [[[round(draw.uniform(0, 900), 2), round(draw.uniform(0, 400), 2)] for _ in range(40)]] for _ in objects
            ]
            content = {"boxes": boxes, "segms": outlines, "names": objects, "width": 1920, "height": 822}
            _write_json(place / f"{number}.json", content)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(texts):
                sentences = [
                    _tokens(draw, 8),
                    *(_tokens(draw, 8) for _ in range(4)),
                    *(_tokens(draw, 15) for _ in range(4)),
                ]
                record = {
                    "movie": "1054_Harry_Potter_and_the_prisoner_of_Azkaban",
                    "objects": objects,
                    "interesting_scores": [0, 1],
                    "answer_likelihood": "likely",
                    "img_fn": f"{split}/{number % images}.jpg",
                    "metadata_fn": f"{split}/{number % images}.json",
                    "answer_orig": " ".join(map(str, sentences[1])),
                    "question_orig": " ".join(map(str, sentences[0])),
                    "rationale_orig": " ".join(map(str, sentences[5])),
                    "question": sentences[0],
                    "answer_match_iter": [3, 0, 2, 1],
                    "answer_sources": [3287, 0, 10184, 2260],
                    "answer_choices": sentences[1:5],
                    "answer_label": 7 if number % BROKEN_EVERY == 1 else draw.randrange(4),
                    "rationale_choices": sentences[5:],
                    "rationale_sources": [1, 0, 4320, 5092],
                    "rationale_match_iter": [1, 2, 3, 0],
                    "rationale_label": draw.randrange(4),
                    "img_id": f"{split}-{number % images}",
                    "question_number": number // images,
                    "annot_id": f"{split}-{number}",
                    "match_fold": f"{split}-0",
                    "match_index": number,
                }
                file.write(json.dumps(record) + "\n")
    build_vocabulary([" ".join([*WORDS, "person", "chair", "cup", "tv"])], folder / "vocab.txt")
    files = {"images": "vcr1images", "questions": "{split}.jsonl"}
    _write_config(folder, "choices", files, list(CHOICES), "gt", 60)


def _tokens(draw: random.Random, mean: int) -> list[Any]:
    return [[draw.randrange(10)], *_sentence(draw, mean).split(), "."]


def _write_captions(folder: Path, share: float) -> None:
    """Flickr30K Entities: a file of captions and one of boxes for each image."""
    draw = random.Random(0)
    first = 10**9
    sentences, boxes = (_folder(folder / name) for name in ("Sentences", "Annotations"))
    for split, (images, _) in CAPTIONS.items():
        ids = [str(first + number) for number in range(int(images * share))]
        first += 10**7
        (folder / f"{split}.txt").write_text("".join(f"{one}\n" for one in ids), encoding="utf-8")
        _touch(folder / "images", [f"{one}.jpg" for one in ids])
        for number, image_id in enumerate(ids):
            lines = []
            for _ in range(5):
                phrases = [f"[/EN#{chain}/people {_sentence(draw, 3)}] on" for chain in draw.sample(range(9), 3)]
                lines.append(" ".join([*phrases, _sentence(draw, 3), "."]))
            if number % (BROKEN_EVERY // 10) == 1:
                lines.append("[/EN#1 a man]")
            (sentences / f"{image_id}.txt").write_text("\n".join(lines), encoding="utf-8")
            (boxes / f"{image_id}.xml").write_text(_annotation(draw, image_id), encoding="utf-8")
    build_vocabulary([" ".join(WORDS)], folder / "vocab.txt")
    files = {"images": "images", "ids": "{split}.txt", "sentences": "Sentences", "annotations": "Annotations"}
    _write_config(folder, "captions", files, list(CAPTIONS), "gt", 40)


def _annotation(draw: random.Random, image_id: str) -> str:
    objects = []
    for chain in range(9):
        x, y = draw.randrange(300), draw.randrange(200)
        sides = {"xmin": x, "ymin": y, "xmax": x + 90, "ymax": y + 60}
        box = "".join(f"\n\t\t\t<{side}>{value}</{side}>" for side, value in sides.items())
        objects.append(f"\t<object>\n\t\t<name>{chain}</name>\n\t\t<bndbox>{box}\n\t\t</bndbox>\n\t</object>\n")
    size = "\t<size>\n\t\t<width>500</width>\n\t\t<height>375</height>\n\t\t<depth>3</depth>\n\t</size>\n"
    return f"<annotation>\n\t<filename>{image_id}.jpg</filename>\n{size}{''.join(objects)}</annotation>\n"


WRITERS: dict[str, Callable[[Path, float], None]] = {
    "expressions": _write_expressions,
    "questions": _write_questions,
    "graph_questions": _write_graph_questions,
    "pairs": _write_pairs,
    "choices": _write_choices,
    "captions": _write_captions,
}


def _write_config(folder: Path, kind: str, files: dict[str, str], splits: list[str], boxes: str, longest: int) -> None:
    """`splits`: the one that is trained on, and those that are evaluated."""
    names = read_yaml(Path(__file__).with_name("check_settings.yaml"))
    content = {
        "output": "unused",
        "detector": {"config": str(ROOT / "configs" / "detector" / "vl_bert_R_101.yaml")},
        "encoder": {"name": names["encoder"]},
        "task": {"name": names[kind]},
        "data": {
            "name": names[kind],
            "root": str(folder),
            "files": files,
            "vocabulary": str(folder / "vocab.txt"),
            "max_text_length": longest,
            "train_split": splits[0],
            "eval_splits": splits[1:],
            "boxes": {"train": boxes},
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


def _write_object(path: Path, entries: Iterable[tuple[str, Any]]) -> None:
    """One JSON object, written entry by entry."""
    with path.open("w", encoding="utf-8") as file:
        for number, (key, value) in enumerate(entries):
            file.write(f"{', ' if number else '{'}{json.dumps(key)}: {json.dumps(value)}")
        file.write("}")


def _folder(path: Path) -> Path:
    """The folder, which is there afterwards."""
    path.mkdir(parents=True, exist_ok=True)
    return path
