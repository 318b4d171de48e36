"""What the drawn texts mean, judged from their words and the annotations alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pycocotools.coco import COCO

from e2e_vl.synthetic.config import COLOURS, SHAPES, SIZES

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10, "test": 5}
WORDS = re.findall(r"\w+", "zero one two three four five six seven eight nine ten")
NUMBERS = {word: number for number, word in enumerate(WORDS)}
SINGULAR = re.compile(rf"^({'|'.join(SHAPES)})(s|es)$")
SYNONYMS = {"large": "big", "little": "small", "solid": "plain"}
SAYS_NOTHING = {"thing", "things", "object", "shape", "one", "a", "the"}
LINKS = {
    "next to|beside|near": "near",
    "closest to|nearest to": "nearest",
    "farthest from|furthest from": "farthest",
    "away from|far from": "away",
    "overlapping|touching": "touching",
    "in front of|covering": "in front",
    "behind|partly hidden by": "behind",
    "bigger than|larger than": "bigger",
    "smaller than": "smaller",
}


def words_of(coco: COCO, image_id: int) -> list[set[str]]:
    """The words that are true of each object of an image."""
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    return [
        {shapes[item["category_id"]], *(names[i] for i in item["attribute_ids"])} for item in coco.imgToAnns[image_id]
    ]


def described(phrase: str, objects: Sequence[set[str]]) -> list[set[str]]:
    """The objects that a noun phrase is true of, given the words of each."""
    said = [SINGULAR.sub(r"\1", word) for word in phrase.replace("with stripes", "striped").split()]
    words = {SYNONYMS.get(word, word) for word in said} - SAYS_NOTHING
    return [one for one in objects if words <= one]


VALUES = {"color": set(COLOURS), "shape": set(SHAPES), "size": set(SIZES)}


def answer(question: str, objects: Sequence[set[str]]) -> str:
    """Answers a question of VQA or GQA anew."""
    text, yes_or_no = question.lower().removesuffix("?"), {True: "yes", False: "no"}
    if found := re.fullmatch(r"what (?:(color|shape|size) )?is the (.*)", text):
        [one] = described(found[2], objects)
        return next(iter(one & VALUES[found[1] or "shape"]))
    if found := re.fullmatch("how many (.*) are there", text):
        return str(len(described(found[1], objects)))
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
