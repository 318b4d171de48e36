"""The GQA files: layout of the release, and answers that are right, judged from the scene graphs alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.synthetic.meaning import SPLITS, answer


@pytest.fixture(scope="module")
def folder(synthetic_folder) -> Path:
    return synthetic_folder / "gqa"


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


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
        assert 0.33 < answers[kind]["yes"] / answers[kind].total() < 0.67, kind


def test_both_values_of_a_choice_are_in_the_image(folder):
    for split in SPLITS:
        graphs = read(folder, f"sceneGraphs/{split}_sceneGraphs.json")
        for question in read(folder, f"questions/{split}_balanced_questions.json").values():
            if question["types"]["structural"] == "choose":
                shown = set()
                for item in graphs[question["imageId"]]["objects"].values():
                    shown.update([item["name"], *item["attributes"]])
                assert set(question["semantic"][1]["argument"].split("|")) <= shown, question["question"]
