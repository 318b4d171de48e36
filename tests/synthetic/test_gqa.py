"""The GQA files: layout of the release, and answers that are right, judged from the scene graphs alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from e2e_vl.synthetic.config import COLOURS, SHAPES, SIZES
from tests.synthetic.meaning import SPLITS, described

VALUES = {"color": set(COLOURS), "shape": set(SHAPES), "size": set(SIZES)}


@pytest.fixture(scope="module")
def folder(synthetic_folder) -> Path:
    return synthetic_folder / "gqa"


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def answer(text: str, objects: list[set[str]]) -> str:
    """Reads a question anew."""
    yes_or_no = {True: "yes", False: "no"}
    text = text.lower().removesuffix("?")
    if found := re.fullmatch(r"what (color|shape|size) is the (.*)", text):
        [one] = described(found[2], objects)
        return next(iter(one & VALUES[found[1]]))
    if found := re.fullmatch(r"(?:is|are) there (.*) (and|or) (.*)", text):
        both = [bool(described(found[part], objects)) for part in (1, 3)]
        return yes_or_no[all(both) if found[2] == "and" else any(both)]
    if found := re.fullmatch(r"is there (.*)", text):
        return yes_or_no[bool(described(found[1], objects))]
    if found := re.fullmatch(r"do the (.*) and the (.*) have the same (color|shape)", text):
        [[one], [other]] = described(found[1], objects), described(found[2], objects)
        return yes_or_no[one & VALUES[found[3]] == other & VALUES[found[3]]]
    if found := re.fullmatch(r"is the (.*?) (?:a )?(\w+) or (?:a )?(\w+)", text):
        [one] = described(found[1], objects)
        return next(value for value in (found[2], found[3]) if value in one)
    found = re.fullmatch(r"is the (.*?) (?:a )?(\w+)", text)
    [one] = described(found[1], objects)
    return yes_or_no[found[2] in one]


def test_answers_are_right(folder, coco):
    for split in SPLITS:
        graphs = read(folder, f"sceneGraphs/{split}_sceneGraphs.json")
        for question in read(folder, f"questions/{split}_all_questions.json").values():
            objects = [{one["name"], *one["attributes"]} for one in graphs[question["imageId"]]["objects"].values()]
            assert answer(question["question"], objects) == question["answer"], question["question"]
        for image_id, graph in graphs.items():
            boxes = [[one[side] for side in "xywh"] for one in graph["objects"].values()]
            assert boxes == [one["bbox"] for one in coco.imgToAnns[int(image_id)]]


def test_the_files_have_the_layout_of_the_release(folder):
    for split in SPLITS:
        every = read(folder, f"questions/{split}_all_questions.json")
        choices = read(folder, f"eval/{split}_choices.json")
        balanced = read(folder, f"questions/{split}_balanced_questions.json")
        assert balanced == {key: one for key, one in every.items() if one["isBalanced"]} and len(balanced) < len(every)
        assert set(choices) == set(every) and all(len(key) == 8 for key in every)
        for key, one in every.items():
            assert one["answer"] in choices[key]["valid"] and one["equivalent"] == [key]
            assert set(one["types"]) == {"structural", "semantic", "detailed"} and "choices" not in one
            for other in one["entailed"]:
                assert every[other]["imageId"] == one["imageId"] and not every[other]["isBalanced"]
            for number, step in enumerate(one["semantic"]):
                assert all(before < number for before in step["dependencies"])
        kinds = {one["types"]["structural"] for one in balanced.values()}
        assert kinds == {"query", "choose", "verify", "logical", "compare"}


def test_words_give_little_away(folder):
    answers: dict[str, Counter] = {}
    for split in SPLITS:
        for one in read(folder, f"questions/{split}_balanced_questions.json").values():
            answers.setdefault(one["types"]["structural"], Counter())[one["answer"]] += 1
    for kind in ("verify", "logical", "compare"):
        assert 0.38 < answers[kind]["yes"] / answers[kind].total() < 0.62, kind
