"""Referring expressions: their meaning and their words.

As in RefCOCO+, the language has no word for a place in the image: objects are named by their attributes, by
comparing their sizes and by their relations to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import TypeVar

import numpy as np

from e2e_vl.synthetic.config import FAMILIES, LanguageConfig
from e2e_vl.synthetic.scenes import Appearance, SceneGraph, members

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
    "away": ("away from", "away from", "far from"),
    "overlapping": ("overlapping", "touching"),
    "in front": ("in front of", "covering"),
    "behind": ("behind", "partly hidden by"),
}
RELATIONS = tuple(_RELATIONS)
# Shares of the tries, in their order: of the expressions drawn, the object nearest to the anchor is right for one half.
_RELATION_SHARES = (0.08, 0.05, 0.26, 0.38, 0.05, 0.09, 0.09)
_REDUNDANT = 0.4  # share of attribute expressions that may be redundant
_OTHERS = ("than the others", "than all the others")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class Description:
    """Attributes that an object must have; None allows any value."""

    size: str | None = None
    texture: str | None = None
    colour: str | None = None
    shape: str | None = None

    def mask(self, graph: SceneGraph) -> int:
        """Bit mask of the objects that fit the description."""
        mask = graph.everything
        for slot in SLOTS:
            value = getattr(self, slot)
            if value is not None:
                mask &= graph.attribute_masks.get((slot, value), 0)
        return mask


@dataclass(frozen=True)
class ReferringExpression:
    """What a referring expression says.

    The operator is None (nothing more is said), "biggest" or "smallest" (of its description), a comparison ("bigger",
    "smaller") or a relation ("near", "nearest", "farthest", "away", "overlapping", "in front", "behind").
    """

    description: Description  # what the object is
    operator: str | None = None
    anchor: Description | None = None  # what it is compared or related to; None: all others of the description

    @property
    def family(self) -> str:
        """One of `FAMILIES`."""
        if self.operator is None:
            return "attribute"
        if self.operator in _SUPERLATIVES:
            return "superlative"
        return "comparison" if self.operator in _COMPARISONS else "relation"

    @property
    def subfamily(self) -> str:
        """The family, and for a relation which one, such as "relation/in_front"."""
        return self.family if self.family != "relation" else f"relation/{self.operator.replace(' ', '_')}"


def referent(expression: ReferringExpression, graph: SceneGraph) -> int | None:
    """Return the index of the one object that the expression is clearly true of.

    None when the expression is true of none or of several objects, when it is unclear for any object, or when its
    anchor is not exactly one object.
    """
    candidates = expression.description.mask(graph)
    operator = expression.operator
    if operator is None:
        return _only(candidates)
    if expression.anchor is None:
        better = {"biggest": "bigger", "smallest": "smaller"}.get(operator, operator)
        return _best(candidates, better, graph)
    anchor = _only(expression.anchor.mask(graph))
    if anchor is None:
        return None
    candidates &= ~(1 << anchor)
    if operator in ("nearest", "farthest"):
        return graph.extreme(candidates, anchor, far=operator == "farthest")
    holds, fails = graph.related[operator][anchor], graph.unrelated[operator][anchor]
    if candidates & ~(holds | fails):
        return None
    return _only(candidates & holds)


def _only(mask: int) -> int | None:
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _best(candidates: int, better: str, graph: SceneGraph) -> int | None:
    """The candidate that is clearly better than every other one; needs at least two candidates."""
    items = members(candidates)
    if len(items) < 2:
        return None
    holds = graph.related[better]
    return next((item for item in items if all(holds[other] >> item & 1 for other in items if other != item)), None)


def to_words(expression: ReferringExpression, rng: np.random.Generator) -> str:
    """The expression in words: lower case, separated by single spaces, no punctuation."""
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


def split_phrases(expression: ReferringExpression, sentence: str) -> tuple[str, str, str]:
    """Parse an expression from its words.

    Returns what it is, the words between, and what it is compared or related to; the last two are empty for an
    expression that names nothing else.
    """
    operator = expression.operator
    if operator is None or operator in _SUPERLATIVES:
        return sentence, "", ""
    links = _COMPARISONS.get(operator) or _RELATIONS[operator]
    for link in sorted(set(links), key=len, reverse=True):
        head, found, rest = sentence.partition(f" {link} ")
        if found:
            break
    named = head.removesuffix(" that is")
    return named, f"{head[len(named) + 1 :]} {link}".strip(), rest


def _noun_phrase(description: Description, rng: np.random.Generator, suffix: bool = False) -> str:
    """Adjectives and noun; with `suffix` the texture may follow as "with stripes"."""
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
    """The plural of a noun."""
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


# Which objects of a scene are referred to, and by which expressions.


T = TypeVar("T")
_PROPOSALS = 10  # expressions tried per object before the next object is tried
# Subsets of the slots that a description names, most general first.
_SUBSETS = tuple(slots for k in range(len(SLOTS) + 1) for slots in combinations(SLOTS, k))


@dataclass(frozen=True)
class Reference:
    """An expression about one object of a scene, or about none."""

    target: int | None  # index of the object that the expression is true of; None: it is true of none
    expression: ReferringExpression
    sentence: str  # its words (see `to_words`)
    typed: str = ""  # the sentence as an annotator might have typed it


def draw_references(graph: SceneGraph, config: LanguageConfig, rng: np.random.Generator) -> list[Reference]:
    """Different expressions about a scene, each clearly true of exactly one object, in the order of drawing.

    The families are drawn first and the objects second, uniformly, so that the mix of families is kept. Where a family
    has no expression about any object, an attribute expression is tried instead.
    """
    speaker = _Speaker(graph, rng)
    families = [name for name in FAMILIES if config.family_mix.get(name, 0) > 0]
    shares = np.array([config.family_mix[name] for name in families])
    low, high = config.refs_per_image
    chosen = [int(i) for i in rng.permutation(graph.count)[: rng.integers(low, high + 1)]]
    low, high = config.sentences_per_ref
    planned = int(rng.integers(low, high + 1, len(chosen)).sum())
    said: dict[ReferringExpression, Reference] = {}
    counts = dict.fromkeys(chosen, 0)
    for family in rng.choice(families, planned, p=shares / shares.sum()):
        order = sorted(counts, key=counts.__getitem__)  # the least described first
        order += [int(i) for i in rng.permutation(graph.count) if i not in counts]
        reference = speaker.first(str(family), order, said)
        if reference is None and family != "attribute" and "attribute" in families:
            reference = speaker.first("attribute", order, said)
        if reference is not None:
            said[reference.expression] = reference
            counts[reference.target] = counts.get(reference.target, 0) + 1
    return [replace(reference, typed=as_typed(reference.sentence, rng)) for reference in said.values()]


def draw_without_target(
    graph: SceneGraph, references: Sequence[Reference], share: float, values: Values, rng: np.random.Generator
) -> list[Reference]:
    """Expressions that are clearly true of no object: expressions about the scene with one word changed.

    Args:
        share: their share among all expressions, on average.
        values: the values of each attribute.
    """
    said = {reference.expression for reference in references}
    found = []
    for _ in range(rng.binomial(len(references), share / (1 - share))):
        for _ in range(_PROPOSALS):
            expression = _changed(references[rng.integers(len(references))].expression, values, rng)
            if expression not in said and fits_nothing(expression, graph):
                said.add(expression)
                sentence = to_words(expression, rng)
                found.append(Reference(None, expression, sentence, as_typed(sentence, rng)))
                break
    return found


def _changed(expression: ReferringExpression, values: Values, rng: np.random.Generator) -> ReferringExpression:
    """The expression with another attribute of the object or of its anchor, or with another relation."""
    places = [(part, slot) for part in ("description", "anchor") for slot in SLOTS]
    places = [(part, slot) for part, slot in places if getattr(getattr(expression, part), slot, None) is not None]
    if expression.family == "relation":
        places.append(("operator", ""))
    part, slot = places[rng.integers(len(places))] if places else ("operator", "")
    if part == "operator":
        return replace(expression, operator=str(rng.choice(RELATIONS))) if places else expression
    description = getattr(expression, part)
    others = [value for value in values[slot] if value != getattr(description, slot)]
    return replace(expression, **{part: replace(description, **{slot: others[rng.integers(len(others))]})})


def fits_nothing(expression: ReferringExpression, graph: SceneGraph) -> bool:
    """Whether an expression is clearly true of no object, or its anchor does not exist."""
    candidates, anchor = expression.description.mask(graph), expression.anchor
    if not candidates or (anchor is not None and not anchor.mask(graph)):
        return True
    one = None if anchor is None else _only(anchor.mask(graph))
    if one is None:
        return False
    candidates &= ~(1 << one)
    fails = graph.unrelated.get(expression.operator)  # the nearest and the farthest always exist
    return not candidates or (fails is not None and not candidates & ~fails[one])


class _Speaker:
    """Proposes expressions about the objects of one scene."""

    def __init__(self, graph: SceneGraph, rng: np.random.Generator) -> None:
        self.graph = graph
        self.rng = rng
        self._descriptions: list[list[tuple[Description, int]]] = []
        self._unique: list[list[Description]] = []
        self._minimal: list[list[Description]] = []
        for appearance in graph.appearances:
            described = [Description(**{slot: getattr(appearance, slot) for slot in slots}) for slots in _SUBSETS]
            masks = [description.mask(graph) for description in described]
            rows = zip(_SUBSETS, described, masks, strict=True)
            unique = {frozenset(slots): item for slots, item, mask in rows if mask.bit_count() == 1}
            self._descriptions.append(list(zip(described, masks, strict=True)))
            self._unique.append(list(unique.values()))
            self._minimal.append([item for slots, item in unique.items() if not any(other < slots for other in unique)])

    def first(self, family: str, targets: list[int], said: dict[ReferringExpression, Reference]) -> Reference | None:
        """Find an unused expression of this family, about the first target that has one."""
        propose = getattr(self, f"_{family}")
        for target in targets:
            for _ in range(_PROPOSALS):
                expression = propose(target)
                if expression is None or expression in said:
                    continue
                if referent(expression, self.graph) == target:
                    return Reference(target, expression, to_words(expression, self.rng))
        return None

    def _attribute(self, target: int) -> ReferringExpression | None:
        redundant = self.rng.random() < _REDUNDANT
        description = self._any((self._unique if redundant else self._minimal)[target])
        return None if description is None else ReferringExpression(description)

    def _superlative(self, target: int) -> ReferringExpression | None:
        description = self._shared_description(target, 0)
        return None if description is None else ReferringExpression(description, self._any(["biggest", "smallest"]))

    def _comparison(self, target: int) -> ReferringExpression | None:
        operator = self._any(["bigger", "smaller"])
        if self.rng.random() < 0.25:
            description = self._shared_description(target, 0)
            return None if description is None else ReferringExpression(description, operator)
        return self._with_anchor(target, operator)

    def _relation(self, target: int) -> ReferringExpression | None:
        return self._with_anchor(target, str(self.rng.choice(RELATIONS, p=_RELATION_SHARES)))

    def _with_anchor(self, target: int, operator: str) -> ReferringExpression | None:
        holds = self.graph.related.get(operator)
        anchors = [
            i
            for i in range(self.graph.count)
            if i != target and self._minimal[i] and (holds is None or holds[i] >> target & 1)
        ]
        anchor = self._any(anchors)
        if anchor is None:
            return None
        # An object that is compared by size is not also called big or small.
        description = self._shared_description(target, 1 << anchor, with_size=operator not in ("bigger", "smaller"))
        if description is None:
            return None
        return ReferringExpression(description, operator, self._any(self._minimal[anchor]))

    def _shared_description(self, target: int, left_out: int, with_size: bool = False) -> Description | None:
        """A description of the target that is also true of another object (not of `left_out`): it is not enough."""
        options = [
            description
            for description, mask in self._descriptions[target]
            if (with_size or description.size is None) and (mask & ~left_out).bit_count() >= 2
        ]
        if len(options) > 1 and self.rng.random() < 0.5:
            options = options[1:]  # the first is "thing" alone, which should be rare
        return self._any(options)

    def _any(self, options: Sequence[T]) -> T | None:
        return options[int(self.rng.random() * len(options))] if options else None


# Descriptions of objects as questions and sentences need them: of one object alone, or of any number.


Values = Mapping[str, Sequence[str]]  # of each attribute, see `SceneConfig.values`
THING_SLOTS = (("colour", "shape"), ("texture", "shape"), ("size", "colour"))  # attributes of things that are asked for


def all_descriptions(slots: Sequence[str], values: Values) -> list[Description]:
    """All descriptions with exactly these attributes."""
    chosen = product(*(values[slot] for slot in slots))
    return [Description(**dict(zip(slots, combination, strict=True))) for combination in chosen]


def identify(graph: SceneGraph, slots: Sequence[str], rng: np.random.Generator) -> tuple[int, Description] | None:
    """Draw an object and a description by some of these attributes that fits only it; None if there is none."""
    for index in rng.permutation(graph.count):
        appearance = graph.appearances[index]
        subsets = [subset for number in range(1, len(slots) + 1) for subset in combinations(slots, number)]
        descriptions = [Description(**{slot: getattr(appearance, slot) for slot in subset}) for subset in subsets]
        identifying = [one for one in descriptions if members(one.mask(graph)) == [index]]
        if identifying:
            return int(index), identifying[rng.integers(len(identifying))]
    return None


def draw_thing(
    graph: SceneGraph, slots: Sequence[str], values: Values, wanted: bool, rng: np.random.Generator
) -> str | None:
    """Describe a thing that is in the scene (or, unless `wanted`, is not) by these attributes."""
    some = [one for one in all_descriptions(slots, values) if bool(one.mask(graph)) == wanted]
    return noun_phrase(some[rng.integers(len(some))]) if some else None


def is_true_of(description: Description, appearance: Appearance) -> bool:
    """Whether the appearance has all attributes of the description."""
    return all(getattr(description, slot) in (None, getattr(appearance, slot)) for slot in SLOTS)


def noun_phrase(description: Description, *, plural: bool = False) -> str:
    """Size, texture, colour and noun, without an article."""
    noun = description.shape or "thing"
    words = (description.size, description.texture, description.colour, pluralised(noun) if plural else noun)
    return " ".join(word for word in words if word)


def without(values: Sequence[str], value: str) -> list[str]:
    """The other values."""
    return [other for other in values if other != value]


# Captions of scenes: five different true sentences per image, as in COCO.


_LINKS = {"near": "next to", "in front": "in front of", "behind": "behind"}
_ATTEMPTS = 20
CAPTIONS = 5  # of a scene


def draw_captions(graph: SceneGraph, rng: np.random.Generator) -> list[str]:
    """Up to `CAPTIONS` different captions; each is true of the scene, and may be true of other scenes."""
    count_shapes, count_colours = partial(_count, "shape", "{}", None), partial(_count, "colour", "{} shape", 3)
    kinds = (count_shapes, count_colours, _name_some, _relate_two, _name_some)
    captions: dict[str, None] = {}
    for i in range(_ATTEMPTS * CAPTIONS):
        if len(captions) == CAPTIONS:
            break
        caption = kinds[(i + i // len(kinds)) % len(kinds)](graph, rng)
        if caption is not None:
            captions[caption[0].upper() + caption[1:] + "."] = None
    return list(captions)


def _count(slot: str, noun: str, most: int | None, graph: SceneGraph, rng: np.random.Generator) -> str:
    counts = Counter(getattr(appearance, slot) for appearance in graph.appearances)
    names = [str(name) for name in rng.permutation(sorted(counts))][:most]
    return _listed([_counted(counts[name], noun.format(name)) for name in names])


def _name_some(graph: SceneGraph, rng: np.random.Generator) -> str:
    some = rng.permutation(graph.count)[: rng.integers(1, 4)]
    text = _listed([_article(_named(graph.appearances[i], rng)) for i in some])
    rest = graph.count - len(some)
    if rest and rng.random() < 0.5:
        text += " with " + _counted(rest, "other shape")
    return text


def _relate_two(graph: SceneGraph, rng: np.random.Generator) -> str | None:
    relation = str(rng.choice(list(_LINKS)))
    anchor = int(rng.integers(graph.count))
    others = members(graph.related[relation][anchor])
    if not others:
        return None
    appearances = graph.appearances[others[rng.integers(len(others))]], graph.appearances[anchor]
    first, second = (_article(_named(appearance, rng)) for appearance in appearances)
    return f"{first} {_LINKS[relation]} {second}"


def _named(appearance: Appearance, rng: np.random.Generator) -> str:
    said = [word for word in (appearance.size, appearance.texture, appearance.colour) if rng.random() < 0.5]
    return " ".join([*said, appearance.shape])


def _article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _counted(number: int, noun: str) -> str:
    if number == 1:
        return _article(noun)
    return f"{NUMBERS[number] if number < len(NUMBERS) else number} {pluralised(noun)}"


def _listed(phrases: list[str]) -> str:
    if len(phrases) == 1:
        return phrases[0]
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]
