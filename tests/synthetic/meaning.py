"""What the drawn texts mean, judged from their words and the annotations alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pycocotools.coco import COCO

from e2e_vl.synthetic import language
from e2e_vl.synthetic.config import COLOURS, SHAPES
from e2e_vl.synthetic.language import Description, ReferringExpression

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10, "test": 5}
WORDS = re.findall(r"\w+", "zero one two three four five six seven eight nine ten")
NUMBERS = {word: number for number, word in enumerate(WORDS)}
SINGULAR = re.compile(rf"^({'|'.join(SHAPES)})(s|es)$")


def words_of(coco: COCO, image_id: int) -> list[set[str]]:
    """The words that are true of each object of an image."""
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    return [
        {shapes[item["category_id"]], *(names[i] for i in item["attribute_ids"])} for item in coco.imgToAnns[image_id]
    ]


def described(phrase: str, objects: Sequence[set[str]]) -> list[set[str]]:
    """The objects that a noun phrase is true of, given the words of each."""
    words = {SINGULAR.sub(r"\1", word) for word in phrase.split()} - {"thing", "things", "a", "the"}
    return [one for one in objects if words <= one]


def parse(sentence: str) -> ReferringExpression:
    """The meaning of a referring expression, the inverse of ``to_words``; ValueError for an unknown word."""
    words = sentence.split()
    for operator, spellings in language._SUPERLATIVES.items():
        start = 1 if words[:1] == ["the"] else 0
        if words[start : start + 1] and words[start] in spellings:
            return ReferringExpression(_parse_noun_phrase(words[start + 1 :]), operator)
    for operator, links in {**language._COMPARISONS, **language._RELATIONS}.items():
        for link in sorted(set(links), key=len, reverse=True):
            head, found, tail = f" {sentence} ".partition(f" {link} ")
            if not found:
                continue
            description = _parse_noun_phrase(head.removesuffix(" that is").split())
            if operator in language._COMPARISONS and f"than {tail.strip()}" in language._OTHERS:
                return ReferringExpression(description, operator)
            return ReferringExpression(description, operator, _parse_noun_phrase(tail.split()))
    return ReferringExpression(_parse_noun_phrase(words))


def _parse_noun_phrase(words: list[str]) -> Description:
    values: dict[str, str] = {}
    text = " ".join(words[1:] if words[:1] == ["the"] else words)
    for texture, ending in language._SUFFIXES.items():
        if text.endswith(" " + ending):
            values["texture"] = texture
            text = text.removesuffix(" " + ending)
    *adjectives, noun = text.split() or [""]
    meanings = [("colour", colour, (colour,)) for colour in COLOURS]
    for slot, table in (("size", language._SIZE_WORDS), ("texture", language._TEXTURE_WORDS)):
        meanings += [(slot, value, spellings) for value, spellings in table.items()]
    if noun in SHAPES:
        values["shape"] = noun
    elif noun not in language.THINGS:
        raise ValueError(f"'{noun}' is not a noun of this language")
    for word in adjectives:
        [(slot, value)] = [(slot, value) for slot, value, spellings in meanings if word in spellings]
        if slot in values:
            raise ValueError(f"'{text}' names the {slot} twice")
        values[slot] = value
    return Description(**values)
