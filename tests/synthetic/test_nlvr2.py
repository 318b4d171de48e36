"""The NLVR2 files: labels are right, judged from the annotations alone; neither words nor images tell them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
from pycocotools.coco import COCO

from e2e_vl.synthetic.config import LanguageConfig
from e2e_vl.synthetic.generate import make_scenes
from tests.synthetic.meaning import NUMBERS, described, words_of


@pytest.fixture(scope="module")
def folder(synthetic_folder) -> Path:
    return synthetic_folder / "nlvr2"


def read(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "data" / f"{split}.json").read_text().splitlines()]


@pytest.fixture(scope="module")
def examples(folder) -> list[dict]:
    return [*read(folder, "train"), *read(folder, "val")]


def is_true(sentence: str, left: list[set[str]], right: list[set[str]]) -> bool:
    """Reads a sentence anew."""
    text, sides = sentence.lower().removesuffix("."), {"left": left, "right": right}
    if found := re.fullmatch("both images contain a (.*)", text):
        return all(described(found[1], side) for side in (left, right))
    if found := re.fullmatch("exactly one of the two images contains a (.*)", text):
        return bool(described(found[1], left)) != bool(described(found[1], right))
    if found := re.fullmatch("the (left|right) image contains a (.*)", text):
        return bool(described(found[2], sides[found[1]]))
    if found := re.fullmatch("there are more (.*) in the (left|right) image than in the (left|right) image", text):
        return len(described(found[1], sides[found[2]])) > len(described(found[1], sides[found[3]]))
    found = re.fullmatch(r"the images contain (\w+) (.*) in total", text)
    return len(described(found[2], left)) + len(described(found[2], right)) == NUMBERS[found[1]]


def pair_of(example: dict) -> str:
    return example["identifier"].rpartition("-")[0]


def test_labels_are_right(folder, examples):
    objects = {}
    for split in ("train", "val"):
        coco = COCO(str(folder / f"instances_{split}.json"))
        objects |= {image["file_name"].removesuffix(".png"): words_of(coco, key) for key, image in coco.imgs.items()}
    for example in examples:
        sides = [objects[f"{pair_of(example)}-img{side}"] for side in (0, 1)]
        assert example["label"] == str(is_true(example["sentence"], *sides)), example["sentence"]


def test_neither_the_sentence_nor_the_images_tell_the_label(examples):
    by_sentence, by_pair = defaultdict(list), defaultdict(list)
    for example in examples:
        name, number, _, sentence = example["identifier"].split("-")
        by_sentence[name, number, sentence].append(example["label"])
        by_pair[pair_of(example)].append(example["label"])
    assert {tuple(sorted(own)) for own in by_sentence.values()} == {("False", "False", "True", "True")}
    assert {tuple(sorted(own)) for own in by_pair.values()} == {("False", "True")}
    assert len({one["family"] for one in examples}) == 5


def test_the_pairs_of_a_set_join_two_left_images_with_two_right_ones(folder):
    images = folder / "images" / "val"
    pairs_of = defaultdict(set)
    for example in read(folder, "val"):
        pair = pair_of(example)
        left, right = ((images / f"{pair}-img{side}.png").read_bytes() for side in (0, 1))
        pairs_of[pair.rpartition("-")[0]].add((left, right))
    for pairs in pairs_of.values():
        lefts, rights = (set(side) for side in zip(*pairs, strict=True))
        assert pairs == set(product(lefts, rights))
        assert (len(lefts), len(rights), len(lefts | rights)) == (2, 2, 4)


def test_more_sentences_per_pair_are_as_balanced(tmp_path):
    language = LanguageConfig(sentences_per_pair=8, pair_families=("side", "both", "more"))
    make_scenes(tmp_path / "data", scenes={"train": 30}, seed=11, formats=["nlvr2"], language=language)
    examples = read(tmp_path / "data" / "nlvr2", "train")
    assert {example["family"] for example in examples} == {"side", "both", "more"}
    labels = defaultdict(dict)
    for example in examples:
        labels[pair_of(example)][example["sentence"]] = example["label"]
    assert max(len(own) for own in labels.values()) == 8
    for own in labels.values():
        answers = list(own.values())
        assert all(one != other for one, other in zip(answers[::2], answers[1::2], strict=True))
