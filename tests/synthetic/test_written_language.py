"""The written expressions: each is true of its object and of no other, judged from the annotations alone."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from pycocotools.coco import COCO

from e2e_vl.synthetic import LanguageConfig

LOCATION_WORDS = set(
    re.findall(
        r"\w+",
        """
    left right top bottom middle center centre central corner upper lower above below under underneath over high low
    side edge row column first second third last end background foreground up down north south east west
""",
    )
)
SYNONYMS = {"large": "big", "little": "small", "solid": "plain"}
ANY_SHAPE = {"thing", "object", "shape", "one"}
LINKS = {
    "next to|beside|near": "near",
    "closest to|nearest to": "nearest",
    "farthest from|furthest from": "farthest",
    "overlapping|touching": "touching",
    "in front of|covering": "in front",
    "behind|partly hidden by": "behind",
    "bigger than|larger than": "bigger",
    "smaller than": "smaller",
}


class Judge:
    """Decides which objects of an image a sentence is true of, from the annotations alone and in plain words."""

    def __init__(self, coco: COCO, image_id: int) -> None:
        self.objects = sorted(coco.imgToAnns[image_id], key=lambda entry: entry["id"])
        names = [entry["name"] for entry in coco.dataset["attributes"]]
        shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
        self.words = [
            {shapes[item["category_id"]], *(names[i] for i in item["attribute_ids"])} for item in self.objects
        ]
        self.pixels = [np.argwhere(coco.annToMask(item)) for item in self.objects]

    def described(self, phrase: str) -> set[int]:
        phrase = re.sub(r"^the ", "", phrase)
        phrase = re.sub(r"^(.*) with stripes$", r"striped \1", phrase)
        wanted = {SYNONYMS.get(word, word) for word in phrase.split()} - ANY_SHAPE
        return {i for i, words in enumerate(self.words) if wanted <= words}

    def size(self, i: int) -> tuple[float, float]:
        return max(self.objects[i]["bbox"][2:]), self.objects[i]["area"]

    def bigger(self, i: int, j: int) -> bool | None:
        """None when one is longer and the other has more area."""
        verdicts = {a > b for a, b in zip(self.size(i), self.size(j), strict=True)}
        return verdicts.pop() if len(verdicts) == 1 else None

    def gap(self, i: int, j: int) -> float:
        a, b = self.pixels[i].astype(float), self.pixels[j].astype(float)
        squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
        return float(np.sqrt(max(squares.min(), 0)))

    def distance(self, i: int, j: int) -> float:
        centres = [np.array(self.objects[k]["bbox"][:2]) + np.array(self.objects[k]["bbox"][2:]) / 2 for k in (i, j)]
        return float(np.linalg.norm(centres[0] - centres[1]))

    def true_of(self, sentence: str) -> set[int]:
        match = re.fullmatch(r"(?:the )?(biggest|largest|smallest) (.*)", sentence)
        if match:
            return self.extreme(self.described(match[2]), bigger=match[1] != "smallest")
        for words, relation in LINKS.items():
            match = re.fullmatch(rf"(.*?)(?: that is)? (?:{words}) (.*)", sentence)
            if not match:
                continue
            candidates = self.described(match[1])
            if match[2] in ("the others", "all the others"):
                return self.extreme(candidates, bigger=relation == "bigger")
            (anchor,) = self.described(match[2])
            return self.related(candidates - {anchor}, relation, anchor)
        return self.described(sentence)

    def extreme(self, candidates: set[int], bigger: bool) -> set[int]:
        assert len(candidates) >= 2
        return {i for i in candidates if all(self.bigger(i, j) is bigger for j in candidates - {i})}

    def related(self, candidates: set[int], relation: str, anchor: int) -> set[int]:
        assert len(candidates) >= 2
        if relation in ("nearest", "farthest"):
            choose = min if relation == "nearest" else max
            by_centre = choose(candidates, key=lambda i: self.distance(i, anchor))
            assert by_centre == choose(candidates, key=lambda i: self.gap(i, anchor))
            return {by_centre}
        if relation in ("bigger", "smaller"):
            assert all(self.bigger(i, anchor) is not None for i in candidates)
        tests = {
            "bigger": lambda i: self.bigger(i, anchor),
            "smaller": lambda i: self.bigger(i, anchor) is False,
            "near": lambda i: self.gap(i, anchor) < 9,
            "touching": lambda i: self.gap(i, anchor) < 1.5,
            "in front": lambda i: self.gap(i, anchor) < 1.5 and i > anchor,
            "behind": lambda i: self.gap(i, anchor) < 1.5 and i < anchor,
        }
        return {i for i in candidates if tests[relation](i)}


def test_every_expression_is_true_of_its_object_and_no_other(coco, said):
    judges: dict[int, Judge] = {}
    families = Counter()
    for ref, sentence in said:
        judge = judges.setdefault(ref["image_id"], Judge(coco, ref["image_id"]))
        true_of = {judge.objects[i]["id"] for i in judge.true_of(sentence["sent"])}
        assert true_of == {ref["ann_id"]}, f'image {ref["image_id"]}: "{sentence["sent"]}"'
        families[sentence["family"]] += 1
    assert len(families) == 4


@pytest.mark.parametrize("words", [*LINKS, "biggest|largest", "smallest", "the others|all the others"])
def test_every_construction_is_used(words, said):
    assert sum(re.search(rf"\b(?:{words})\b", sentence["sent"]) is not None for _, sentence in said) >= 8


def test_no_word_for_a_place_in_the_picture(said):
    words = Counter(word for _, sentence in said for word in sentence["tokens"])
    assert not set(words) & LOCATION_WORDS
    assert words["front"] == sum(" in front of " in sentence["sent"] for _, sentence in said)
    assert len(words) > 45


def test_mix_of_families_and_number_of_texts(synthetic_folder, said):
    shares = {name: count / len(said) for name, count in Counter(item["family"] for _, item in said).items()}
    for name, share in LanguageConfig().family_mix.items():
        assert shares[name] == pytest.approx(share, abs=0.05)
    statistics = json.loads((synthetic_folder / "synthetic.json").read_text())["statistics"]
    assert statistics["families"] == pytest.approx(shares, abs=1e-4)
    assert statistics["expressions_per_image"] == pytest.approx(len(said) / 150, abs=1e-3)
    assert 6 <= statistics["expressions_per_image"] <= 9
    assert 2 <= statistics["expressions_per_image"] / statistics["refs_per_image"] <= 3


def test_choices_that_ignore_the_sentence_are_poor(synthetic_folder, coco, said):
    right = Counter()
    for ref, _ in said:
        objects = coco.imgToAnns[ref["image_id"]]
        central = [np.linalg.norm(np.add(item["bbox"][:2], np.divide(item["bbox"][2:], 2)) - 64) for item in objects]
        choices = {
            "biggest": objects[int(np.argmax([item["area"] for item in objects]))],
            "most_central": objects[int(np.argmin(central))],
            "first": objects[0],
            "last": objects[-1],
        }
        right.update(name for name, item in choices.items() if item["id"] == ref["ann_id"])
    accuracy = {name: count / len(said) for name, count in right.items()}
    assert max(accuracy.values()) <= 0.25
    statistics = json.loads((synthetic_folder / "synthetic.json").read_text())["statistics"]["blind_accuracy"]
    for name in ("biggest", "most_central"):
        assert statistics[name] == pytest.approx(accuracy[name], abs=0.01)


def test_one_attribute_is_rarely_enough(coco, said):
    """How often a guess among the objects of the named shape, or of the named colour, would be right."""
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    chances = {"shape": [], "colour": []}
    for ref, sentence in said:
        if sentence["family"] != "attribute":
            continue
        appearances = [
            {"shape": shapes[item["category_id"]], "colour": names[item["attribute_ids"][0]]}
            for item in coco.imgToAnns[ref["image_id"]]
        ]
        for slot, values in chances.items():
            fitting = [appearance for appearance in appearances if appearance[slot] in sentence["tokens"]]
            values.append(1 / len(fitting or appearances))
    assert np.mean(chances["shape"]) < 0.65
    assert np.mean(chances["colour"]) < 0.65
