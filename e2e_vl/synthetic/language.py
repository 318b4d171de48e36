"""Referring expressions: their meaning and their words.

As in RefCOCO+, the language has no word for a place in the image: objects are named by their attributes, by
comparing their sizes and by their relations to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic.relations import SceneFacts, members

FAMILIES = ("attribute", "superlative", "comparison", "relation")
SLOTS = ("size", "texture", "colour", "shape")

_SIZE_WORDS = {"big": ("big", "big", "large"), "small": ("small", "small", "little")}
_TEXTURE_WORDS = {"plain": ("plain", "plain", "solid"), "striped": ("striped",), "dotted": ("dotted",)}
_SUFFIXES = {"striped": "with stripes", "dotted": "with dots"}
THINGS = ("thing", "thing", "object", "shape", "one")
_SUPERLATIVES = {"biggest": ("biggest", "biggest", "largest"), "smallest": ("smallest",)}
_COMPARISONS = {"bigger": ("bigger than", "bigger than", "larger than"), "smaller": ("smaller than",)}
_RELATIONS = {
    "near": ("next to", "next to", "beside", "near"),
    "nearest": ("closest to", "nearest to"),
    "farthest": ("farthest from", "furthest from"),
    "overlapping": ("overlapping", "touching"),
    "in front": ("in front of", "covering"),
    "behind": ("behind", "partly hidden by"),
}
RELATIONS = tuple(_RELATIONS)
_OTHERS = ("than the others", "than all the others")


@dataclass(frozen=True)
class Description:
    """Attributes that an object must have; None where nothing is said."""

    size: str | None = None
    texture: str | None = None
    colour: str | None = None
    shape: str | None = None

    def mask(self, facts: SceneFacts) -> int:
        """Bit mask of the objects it is true of."""
        mask = facts.everything
        for slot in SLOTS:
            value = getattr(self, slot)
            if value is not None:
                mask &= facts.attribute_masks.get((slot, value), 0)
        return mask


@dataclass(frozen=True)
class ReferringExpression:
    """What a referring expression says.

    The operator is None (nothing more is said), "biggest" or "smallest" (of its description), a comparison ("bigger",
    "smaller") or a relation ("near", "nearest", "farthest", "overlapping", "in front", "behind").
    """

    description: Description  # what the object is
    operator: str | None = None
    anchor: Description | None = None  # what it is compared or related to; None: all others of the description

    @property
    def family(self) -> str:
        """One of ``FAMILIES``."""
        if self.operator is None:
            return "attribute"
        if self.operator in _SUPERLATIVES:
            return "superlative"
        return "comparison" if self.operator in _COMPARISONS else "relation"


def referent(expression: ReferringExpression, facts: SceneFacts) -> int | None:
    """The one object that the expression is clearly true of.

    Returns:
        its index; None when the expression is true of none or of several objects, when it is unclear for any object,
        or when its anchor is not exactly one object.
    """
    candidates = expression.description.mask(facts)
    operator = expression.operator
    if operator is None:
        return _only(candidates)
    if expression.anchor is None:
        better = {"biggest": "bigger", "smallest": "smaller"}.get(operator, operator)
        return _best(candidates, better, facts)
    anchor = _only(expression.anchor.mask(facts))
    if anchor is None:
        return None
    candidates &= ~(1 << anchor)
    if operator in ("nearest", "farthest"):
        return facts.extreme(candidates, anchor, far=operator == "farthest")
    holds, fails = facts.holds[operator][anchor], facts.fails[operator][anchor]
    if candidates & ~(holds | fails):
        return None
    return _only(candidates & holds)


def _only(mask: int) -> int | None:
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _best(candidates: int, better: str, facts: SceneFacts) -> int | None:
    """The candidate that is clearly better than each other candidate; at least one other is needed."""
    items = members(candidates)
    if len(items) < 2:
        return None
    holds = facts.holds[better]
    return next((item for item in items if all(holds[other] >> item & 1 for other in items if other != item)), None)


def to_words(expression: ReferringExpression, rng: np.random.Generator) -> str:
    """One wording of the expression: lower case, words separated by single spaces, no punctuation."""
    description, operator, anchor = expression.description, expression.operator, expression.anchor
    article = "the " if rng.random() < 0.45 else ""
    if operator is None:
        return article + _noun_phrase(description, rng, suffix=True)
    if operator in _SUPERLATIVES:
        return article + f"{_pick(_SUPERLATIVES[operator], rng)} {_noun_phrase(description, rng)}"
    head = article + _noun_phrase(description, rng)
    if rng.random() < 0.15:
        head += " that is"
    if operator in _COMPARISONS:
        if anchor is None:
            comparative = _pick(_COMPARISONS[operator], rng).split()[0]
            return f"{head} {comparative} {_pick(_OTHERS, rng)}"
        link = _pick(_COMPARISONS[operator], rng)
    else:
        link = _pick(_RELATIONS[operator], rng)
    anchor_article = "the " if rng.random() < 0.85 else ""
    return f"{head} {link} {anchor_article}{_noun_phrase(anchor, rng)}"


def two_phrases(expression: ReferringExpression, sentence: str) -> tuple[str, str, str]:
    """The words of an expression, taken apart.

    Returns:
        What it is, the words between, and what it is compared or related to; the last two are empty for an expression
        that names nothing else.
    """
    operator = expression.operator
    if operator is None or operator in _SUPERLATIVES:
        return sentence, "", ""
    links = _COMPARISONS.get(operator) or _RELATIONS[operator]
    for link in sorted(set(links), key=len, reverse=True):
        head, found, rest = sentence.partition(f" {link} ")
        if found:
            named = head.removesuffix(" that is")
            return named, f"{head[len(named) + 1 :]} {link}".strip(), rest
    raise UserError(f"'{sentence}' is no wording of {expression}")


def _noun_phrase(description: Description, rng: np.random.Generator, suffix: bool = False) -> str:
    """Adjectives and noun; with ``suffix`` the texture may follow as "with stripes"."""
    adjectives = []
    ending = ""
    if description.size:
        adjectives.append(_pick(_SIZE_WORDS[description.size], rng))
    rest = []
    if description.texture:
        if suffix and description.texture in _SUFFIXES and rng.random() < 0.25:
            ending = " " + _SUFFIXES[description.texture]
        else:
            rest.append(_pick(_TEXTURE_WORDS[description.texture], rng))
    if description.colour:
        rest.append(description.colour)
    if len(rest) == 2 and rng.random() < 0.3:
        rest.reverse()
    noun = description.shape or _pick(THINGS, rng)
    return " ".join([*adjectives, *rest, noun]) + ending


def pluralised(noun: str) -> str:
    """The plural of a noun of this language."""
    return noun + ("es" if noun.endswith("s") else "s")


def _pick(words: tuple[str, ...], rng: np.random.Generator) -> str:
    return words[int(rng.random() * len(words))]


def as_typed(sentence: str, rng: np.random.Generator) -> str:
    """The sentence as an annotator might have typed it: capitals, a full stop, stray spaces."""
    draw = rng.random(3)
    if draw[0] < 0.12:
        sentence = sentence.capitalize()
    elif draw[0] < 0.16:
        sentence = sentence.upper()
    if draw[1] < 0.1:
        sentence += "."
    if draw[2] < 0.03:
        sentence = " " + sentence
    elif draw[2] < 0.06:
        sentence = sentence.replace(" ", "  ", 1)
    return sentence
