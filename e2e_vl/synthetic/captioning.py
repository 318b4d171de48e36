"""Captions of scenes: five different true sentences per image, as in COCO."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np

from e2e_vl.synthetic.language import pluralised
from e2e_vl.synthetic.relations import SceneFacts, members
from e2e_vl.synthetic.scenes import Look

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_RELATIONS = {"near": "next to", "in front": "in front of", "behind": "behind"}
_ATTEMPTS = 20


def draw_captions(facts: SceneFacts, rng: np.random.Generator, count: int = 5) -> list[str]:
    """Up to ``count`` different captions; each is true of the scene, and may be true of other scenes."""
    count_shapes, count_colours = partial(_count, "shape", "{}", None), partial(_count, "colour", "{} shape", 3)
    kinds = (count_shapes, count_colours, _name_some, _relate_two, _name_some)
    captions: dict[str, None] = {}
    for i in range(_ATTEMPTS * count):
        if len(captions) == count:
            break
        caption = kinds[(i + i // len(kinds)) % len(kinds)](facts, rng)
        if caption is not None:
            captions[caption[0].upper() + caption[1:] + "."] = None
    return list(captions)


def _count(slot: str, noun: str, most: int | None, facts: SceneFacts, rng: np.random.Generator) -> str:
    counts = Counter(getattr(look, slot) for look in facts.looks)
    names = [str(name) for name in rng.permutation(sorted(counts))][:most]
    return _listed([_counted(counts[name], noun.format(name)) for name in names])


def _name_some(facts: SceneFacts, rng: np.random.Generator) -> str:
    some = rng.permutation(facts.count)[: rng.integers(1, 4)]
    text = _listed([_article(_named(facts.looks[i], rng)) for i in some])
    rest = facts.count - len(some)
    if rest and rng.random() < 0.5:
        text += " with " + _counted(rest, "other shape")
    return text


def _relate_two(facts: SceneFacts, rng: np.random.Generator) -> str | None:
    relation = str(rng.choice(list(_RELATIONS)))
    anchor = int(rng.integers(facts.count))
    others = members(facts.holds[relation][anchor])
    if not others:
        return None
    looks = facts.looks[others[rng.integers(len(others))]], facts.looks[anchor]
    first, second = (_article(_named(look, rng)) for look in looks)
    return f"{first} {_RELATIONS[relation]} {second}"


def _named(look: Look, rng: np.random.Generator) -> str:
    said = [word for word in (look.size, look.texture, look.colour) if rng.random() < 0.5]
    return " ".join([*said, look.shape])


def _article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _counted(number: int, noun: str) -> str:
    if number == 1:
        return _article(noun)
    return f"{_NUMBERS[number] if number < len(_NUMBERS) else number} {pluralised(noun)}"


def _listed(phrases: list[str]) -> str:
    if len(phrases) == 1:
        return phrases[0]
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]
