"""What the drawn texts mean, judged from their words and the annotations alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pycocotools.coco import COCO

from e2e_vl.synthetic.config import SHAPES

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10, "test": 5}
WORDS = re.findall(r"\w+", "zero one two three four five six seven eight nine ten")
NUMBERS = {word: number for number, word in enumerate(WORDS)}
SINGULAR = re.compile(rf"^({'|'.join(SHAPES)})(s|es)$")
SYNONYMS = {"large": "big", "little": "small", "solid": "plain"}
SAYS_NOTHING = {"thing", "things", "object", "shape", "one", "a", "the"}


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
