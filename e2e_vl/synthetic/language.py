"""Referring expressions: their meaning and their words.

As in RefCOCO+, the language has no word for a place in the image: objects are named by their attributes, by
comparing their sizes and by their relations to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

    @property
    def num_attributes(self) -> int:
        """The number of attributes that are named."""
        return sum(getattr(self, slot) is not None for slot in SLOTS)

    def mask(self, graph: SceneGraph) -> int:
        """Return the bit mask of the objects that fit the description."""
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
        """The kind of the expression, one of `FAMILIES`."""
        if self.operator is None:
            return "attribute"
        if self.operator in _SUPERLATIVES:
            return "superlative"
        if self.operator in _COMPARISONS:
            return "comparison"
        return "relation"

    @property
    def subfamily(self) -> str:
        """The family, and for a relation which one, such as "relation/in_front"."""
        if self.family == "relation":
            return f"relation/{self.operator.replace(' ', '_')}"
        return self.family


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
    related = graph.related[operator][anchor]
    unrelated = graph.unrelated[operator][anchor]
    if candidates & ~(related | unrelated):
        return None
    return _only(candidates & related)


def _only(mask: int) -> int | None:
    """Return the only object of a bit mask; None if it has none or several."""
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def _best(candidates: int, better: str, graph: SceneGraph) -> int | None:
    """Return the candidate that is clearly better than every other one; needs at least two candidates."""
    items = members(candidates)
    if len(items) < 2:
        return None
    for item in items:
        others = [other for other in items if other != item]
        if all(graph.related[better][other] >> item & 1 for other in others):
            return item
    return None


def to_words(expression: ReferringExpression, rng: np.random.Generator) -> str:
    """Put the expression into words: lower case, separated by single spaces, no punctuation."""
    description = expression.description
    operator = expression.operator
    article = "the " if rng.random() < 0.45 else ""
    if operator is None:
        return article + _noun_phrase(description, rng, suffix=True)
    if operator in _SUPERLATIVES:
        superlative = _pick(_SUPERLATIVES[operator], rng)
        return f"{article}{superlative} {_noun_phrase(description, rng)}"
    head = article + _noun_phrase(description, rng)
    if rng.random() < 0.15:
        head += " that is"
    if operator in _COMPARISONS:
        if expression.anchor is None:
            comparative = _pick(_COMPARISONS[operator], rng).split()[0]
            return f"{head} {comparative} {_pick(_OTHERS, rng)}"
        link = _pick(_COMPARISONS[operator], rng)
    else:
        link = _pick(_RELATIONS[operator], rng)
    anchor_article = "the " if rng.random() < 0.85 else ""
    return f"{head} {link} {anchor_article}{_noun_phrase(expression.anchor, rng)}"


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
        head, separator, rest = sentence.partition(f" {link} ")
        if separator:
            break
    phrase = head.removesuffix(" that is")
    that_is = head[len(phrase) + 1 :]
    return phrase, f"{that_is} {link}".strip(), rest


def _noun_phrase(description: Description, rng: np.random.Generator, suffix: bool = False) -> str:
    """Join adjectives and noun; with `suffix` the texture may follow as "with stripes"."""
    words = []
    if description.size:
        words.append(_pick(_SIZE_WORDS[description.size], rng))
    surface = []  # texture and colour, in either order
    ending = ""
    if description.texture:
        if suffix and description.texture in _SUFFIXES and rng.random() < 0.25:
            ending = " " + _SUFFIXES[description.texture]
        else:
            surface.append(_pick(_TEXTURE_WORDS[description.texture], rng))
    if description.colour:
        surface.append(description.colour)
    if len(surface) == 2 and rng.random() < 0.3:
        surface.reverse()
    words += surface
    words.append(description.shape or _pick(THINGS, rng))
    return " ".join(words) + ending


def pluralised(noun: str) -> str:
    """Return the plural of a noun."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _pick(words: tuple[str, ...], rng: np.random.Generator) -> str:
    return words[int(rng.random() * len(words))]


def as_typed(sentence: str, rng: np.random.Generator) -> str:
    """Write the sentence as an annotator might have typed it: capitals, a full stop, stray spaces."""
    capitals, full_stop, spaces = rng.random(3)
    if capitals < 0.12:
        sentence = sentence.capitalize()
    elif capitals < 0.16:
        sentence = sentence.upper()
    if full_stop < 0.1:
        sentence += "."
    if spaces < 0.03:
        sentence = " " + sentence
    elif spaces < 0.06:
        sentence = sentence.replace(" ", "  ", 1)
    return sentence


# Which objects of a scene are referred to, and by which expressions.


T = TypeVar("T")
_PROPOSALS = 10  # expressions tried per object before the next object is tried


def _subsets(slots: Sequence[str], smallest: int) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of at least `smallest` slots, small ones first."""
    for size in range(smallest, len(slots) + 1):
        yield from combinations(slots, size)


@dataclass(frozen=True)
class Reference:
    """An expression about one object of a scene, or about none."""

    target: int | None  # index of the object that the expression is true of; None: it is true of none
    expression: ReferringExpression
    sentence: str  # its words (see `to_words`)
    typed: str = ""  # the sentence as an annotator might have typed it


def draw_references(graph: SceneGraph, config: LanguageConfig, rng: np.random.Generator) -> list[Reference]:
    """Draw different expressions about a scene, each clearly true of exactly one object, in the order of drawing.

    The families are drawn first and the objects second, uniformly, so that the mix of families is kept. Where a family
    has no expression about any object, an attribute expression is tried instead.
    """
    speaker = _Speaker(graph, rng)
    families = [name for name in FAMILIES if config.family_mix.get(name, 0) > 0]
    shares = np.array([config.family_mix[name] for name in families])
    low, high = config.refs_per_image
    shuffled = rng.permutation(graph.count)
    chosen = [int(index) for index in shuffled[: rng.integers(low, high + 1)]]
    low, high = config.sentences_per_ref
    num_planned = int(rng.integers(low, high + 1, len(chosen)).sum())
    references: dict[ReferringExpression, Reference] = {}
    counts = dict.fromkeys(chosen, 0)
    for family in rng.choice(families, num_planned, p=shares / shares.sum()):
        targets = sorted(counts, key=counts.__getitem__)  # the least described first
        targets += [int(index) for index in rng.permutation(graph.count) if index not in counts]
        reference = speaker.first(str(family), targets, references)
        if reference is None and family != "attribute" and "attribute" in families:
            reference = speaker.first("attribute", targets, references)
        if reference is not None:
            references[reference.expression] = reference
            counts[reference.target] = counts.get(reference.target, 0) + 1
    return [replace(reference, typed=as_typed(reference.sentence, rng)) for reference in references.values()]


def draw_without_target(
    graph: SceneGraph, references: Sequence[Reference], share: float, values: Values, rng: np.random.Generator
) -> list[Reference]:
    """Draw expressions that are clearly true of no object: expressions about the scene with one word changed.

    Args:
        share: their share among all expressions, on average.
        values: the values of each attribute.
    """
    expressions = {reference.expression for reference in references}
    without_target = []
    for _ in range(rng.binomial(len(references), share / (1 - share))):
        for _ in range(_PROPOSALS):
            reference = references[rng.integers(len(references))]
            expression = _change(reference.expression, values, rng)
            if expression not in expressions and fits_nothing(expression, graph):
                expressions.add(expression)
                sentence = to_words(expression, rng)
                without_target.append(Reference(None, expression, sentence, as_typed(sentence, rng)))
                break
    return without_target


def _change(expression: ReferringExpression, values: Values, rng: np.random.Generator) -> ReferringExpression:
    """Return the expression with another attribute of the object or of its anchor, or with another relation."""
    changeable = []  # a field of the expression, and an attribute in it
    for field in ("description", "anchor"):
        for slot in SLOTS:
            if getattr(getattr(expression, field), slot, None) is not None:
                changeable.append((field, slot))
    if expression.family == "relation":
        changeable.append(("operator", ""))
    if not changeable:
        return expression
    field, slot = changeable[rng.integers(len(changeable))]
    if field == "operator":
        return replace(expression, operator=str(rng.choice(RELATIONS)))
    description = getattr(expression, field)
    others = without(values[slot], getattr(description, slot))
    changed = replace(description, **{slot: others[rng.integers(len(others))]})
    return replace(expression, **{field: changed})


def fits_nothing(expression: ReferringExpression, graph: SceneGraph) -> bool:
    """Return whether an expression is clearly true of no object, or its anchor does not exist."""
    candidates = expression.description.mask(graph)
    if not candidates:
        return True
    if expression.anchor is None:
        return False
    anchors = expression.anchor.mask(graph)
    if not anchors:
        return True
    anchor = _only(anchors)
    if anchor is None:
        return False
    candidates &= ~(1 << anchor)
    if not candidates:
        return True
    if expression.operator not in graph.unrelated:  # the nearest and the farthest always exist
        return False
    unrelated = graph.unrelated[expression.operator][anchor]
    return not candidates & ~unrelated


class _Speaker:
    """Proposes expressions about the objects of one scene."""

    def __init__(self, graph: SceneGraph, rng: np.random.Generator) -> None:
        self.graph = graph
        self.rng = rng
        # of each object
        self._descriptions: list[list[tuple[Description, int]]] = []  # all, with their masks
        self._unique: list[list[Description]] = []  # those that fit only it
        self._minimal: list[list[Description]] = []  # those of them that name no attribute in vain
        for appearance in graph.appearances:
            descriptions = []
            unique: dict[frozenset[str], Description] = {}  # by the slots that it names
            minimal = []
            for slots in _subsets(SLOTS, 0):
                description = describe(appearance, slots)
                mask = description.mask(graph)
                descriptions.append((description, mask))
                if mask.bit_count() == 1:
                    # smaller subsets come first
                    if not any(fewer_slots < set(slots) for fewer_slots in unique):
                        minimal.append(description)
                    unique[frozenset(slots)] = description
            self._descriptions.append(descriptions)
            self._unique.append(list(unique.values()))
            self._minimal.append(minimal)

    def first(self, family: str, targets: Sequence[int], known: Collection[ReferringExpression]) -> Reference | None:
        """Find an expression of this family that is not known, about the first target that has one."""
        propose = getattr(self, f"_{family}")
        for target in targets:
            for _ in range(_PROPOSALS):
                expression = propose(target)
                if expression is None or expression in known:
                    continue
                if referent(expression, self.graph) == target:
                    return Reference(target, expression, to_words(expression, self.rng))
        return None

    def _attribute(self, target: int) -> ReferringExpression | None:
        may_be_redundant = self.rng.random() < _REDUNDANT
        descriptions = self._unique if may_be_redundant else self._minimal
        description = self._draw(descriptions[target])
        if description is None:
            return None
        return ReferringExpression(description)

    def _superlative(self, target: int) -> ReferringExpression | None:
        description = self._shared_description(target, 0)
        if description is None:
            return None
        return ReferringExpression(description, self._draw(["biggest", "smallest"]))

    def _comparison(self, target: int) -> ReferringExpression | None:
        operator = self._draw(["bigger", "smaller"])
        if self.rng.random() >= 0.25:
            return self._with_anchor(target, operator)
        description = self._shared_description(target, 0)
        if description is None:
            return None
        return ReferringExpression(description, operator)

    def _relation(self, target: int) -> ReferringExpression | None:
        return self._with_anchor(target, str(self.rng.choice(RELATIONS, p=_RELATION_SHARES)))

    def _with_anchor(self, target: int, operator: str) -> ReferringExpression | None:
        anchors = [index for index in range(self.graph.count) if index != target and self._minimal[index]]
        related = self.graph.related.get(operator)
        if related is not None:
            anchors = [index for index in anchors if related[index] >> target & 1]
        anchor = self._draw(anchors)
        if anchor is None:
            return None
        # An object that is compared by size is not also called big or small.
        description = self._shared_description(target, 1 << anchor, with_size=operator not in ("bigger", "smaller"))
        if description is None:
            return None
        return ReferringExpression(description, operator, self._draw(self._minimal[anchor]))

    def _shared_description(self, target: int, left_out: int, with_size: bool = False) -> Description | None:
        """Draw a description of the target that is also true of another object, so that it is not enough.

        Args:
            left_out: bit mask of objects that are no such other object.
        """
        options = []
        for description, mask in self._descriptions[target]:
            is_shared = (mask & ~left_out).bit_count() >= 2
            if is_shared and (with_size or description.size is None):
                options.append(description)
        if len(options) > 1 and self.rng.random() < 0.5:
            options = options[1:]  # the first is "thing" alone, which should be rare
        return self._draw(options)

    def _draw(self, options: Sequence[T]) -> T | None:
        if not options:
            return None
        return options[int(self.rng.random() * len(options))]


# Descriptions of objects as questions and sentences need them: of one object alone, or of any number.


Values = Mapping[str, Sequence[str]]  # of each attribute, see `SceneConfig.values`
THING_SLOTS = (("colour", "shape"), ("texture", "shape"), ("size", "colour"))  # attributes of things that are asked for


def describe(appearance: Appearance, slots: Sequence[str]) -> Description:
    """Describe an appearance by these attributes."""
    return Description(**{slot: getattr(appearance, slot) for slot in slots})


def all_descriptions(slots: Sequence[str], values: Values) -> list[Description]:
    """Return all descriptions with exactly these attributes."""
    descriptions = []
    for chosen in product(*(values[slot] for slot in slots)):
        attributes = dict(zip(slots, chosen, strict=True))
        descriptions.append(Description(**attributes))
    return descriptions


def identifying(appearances: Sequence[Appearance], index: int, slots: Sequence[str]) -> list[Description]:
    """Return the descriptions by some of these attributes that fit this object and no other one."""
    descriptions = []
    for subset in _subsets(slots, 1):
        description = describe(appearances[index], subset)
        num_fitting = sum(is_true_of(description, appearance) for appearance in appearances)
        if num_fitting == 1:
            descriptions.append(description)
    return descriptions


def identify(
    graph: SceneGraph,
    slots: Sequence[str],
    rng: np.random.Generator,
    is_suitable: Callable[[Description], bool] | None = None,
) -> tuple[int, Description] | None:
    """Draw an object, and a suitable description by some of these attributes that fits only it.

    None if no object has one.
    """
    for index in rng.permutation(graph.count):
        descriptions = identifying(graph.appearances, index, slots)
        if is_suitable is not None:
            descriptions = [description for description in descriptions if is_suitable(description)]
        if descriptions:
            return int(index), descriptions[rng.integers(len(descriptions))]
    return None


def identified_by_value(graph: SceneGraph, slot: str) -> dict[str, dict[int, list[Description]]]:
    """Find the objects whose value of an attribute a question can ask for.

    Returns value -> index of an object -> the descriptions by other attributes that fit only it.
    """
    by_value: dict[str, dict[int, list[Description]]] = {}
    for index, appearance in enumerate(graph.appearances):
        descriptions = identifying(graph.appearances, index, without(SLOTS, slot))
        if descriptions:
            by_value.setdefault(getattr(appearance, slot), {})[index] = descriptions
    return by_value


def identify_each_value(graph: SceneGraph, slot: str, rng: np.random.Generator) -> list[tuple[int, Description]]:
    """Draw, for each value that a question can ask for, an object with it and a description that fits only it.

    The values are in random order. So each is equally likely to be first, however many objects have it.
    """
    drawn = []
    for descriptions_of in identified_by_value(graph, slot).values():
        indices = list(descriptions_of)
        index = indices[rng.integers(len(indices))]
        descriptions = descriptions_of[index]
        drawn.append((index, descriptions[rng.integers(len(descriptions))]))
    return [drawn[number] for number in rng.permutation(len(drawn))]


def draw_thing(
    graph: SceneGraph, slots: Sequence[str], values: Values, exists: bool, rng: np.random.Generator
) -> str | None:
    """Describe a thing that is in the scene (or, unless it `exists`, is not) by these attributes."""
    options = []
    for description in all_descriptions(slots, values):
        if bool(description.mask(graph)) == exists:
            options.append(description)
    if not options:
        return None
    return noun_phrase(options[rng.integers(len(options))])


def is_true_of(description: Description, appearance: Appearance) -> bool:
    """Return whether the appearance has all attributes of the description."""
    return all(getattr(description, slot) in (None, getattr(appearance, slot)) for slot in SLOTS)


def noun_phrase(description: Description, *, plural: bool = False) -> str:
    """Join size, texture, colour and noun, without an article."""
    noun = description.shape or "thing"
    if plural:
        noun = pluralised(noun)
    words = (description.size, description.texture, description.colour, noun)
    return " ".join(word for word in words if word)


def without(values: Sequence[str], value: str) -> list[str]:
    """Return the other values."""
    return [other for other in values if other != value]


# Captions of scenes: five different true sentences per image, as in COCO.


_LINKS = {"near": "next to", "in front": "in front of", "behind": "behind"}
_ATTEMPTS = 20
CAPTIONS = 5  # of a scene


def draw_captions(graph: SceneGraph, rng: np.random.Generator) -> list[str]:
    """Draw up to `CAPTIONS` different captions; each is true of the scene, and may be true of other scenes."""
    makers = (_count_shapes, _count_colours, _name_some, _relate_two, _name_some)
    captions: dict[str, None] = {}
    for attempt in range(_ATTEMPTS * CAPTIONS):
        if len(captions) == CAPTIONS:
            break
        make = makers[(attempt + attempt // len(makers)) % len(makers)]  # each round begins with the next kind
        caption = make(graph, rng)
        if caption is not None:
            captions[caption[0].upper() + caption[1:] + "."] = None
    return list(captions)


def _count_shapes(graph: SceneGraph, rng: np.random.Generator) -> str:
    counts = Counter(appearance.shape for appearance in graph.appearances)
    shapes = [str(shape) for shape in rng.permutation(sorted(counts))]
    return _listed([_counted(counts[shape], shape) for shape in shapes])


def _count_colours(graph: SceneGraph, rng: np.random.Generator) -> str:
    """Count the objects of three colours at most."""
    counts = Counter(appearance.colour for appearance in graph.appearances)
    colours = [str(colour) for colour in rng.permutation(sorted(counts))]
    return _listed([_counted(counts[colour], f"{colour} shape") for colour in colours[:3]])


def _name_some(graph: SceneGraph, rng: np.random.Generator) -> str:
    shuffled = rng.permutation(graph.count)
    chosen = shuffled[: rng.integers(1, 4)]
    text = _listed([_with_article(_draw_words(graph.appearances[index], rng)) for index in chosen])
    num_others = graph.count - len(chosen)
    if num_others and rng.random() < 0.5:
        text += " with " + _counted(num_others, "other shape")
    return text


def _relate_two(graph: SceneGraph, rng: np.random.Generator) -> str | None:
    relation = str(rng.choice(list(_LINKS)))
    anchor = int(rng.integers(graph.count))
    others = members(graph.related[relation][anchor])
    if not others:
        return None
    other = others[rng.integers(len(others))]
    first = _with_article(_draw_words(graph.appearances[other], rng))
    second = _with_article(_draw_words(graph.appearances[anchor], rng))
    return f"{first} {_LINKS[relation]} {second}"


def _draw_words(appearance: Appearance, rng: np.random.Generator) -> str:
    """Describe an appearance by its shape and some of its other attributes."""
    words = [word for word in (appearance.size, appearance.texture, appearance.colour) if rng.random() < 0.5]
    return " ".join([*words, appearance.shape])


def _with_article(phrase: str) -> str:
    article = "an" if phrase[0] in "aeiou" else "a"
    return f"{article} {phrase}"


def _counted(number: int, noun: str) -> str:
    if number == 1:
        return _with_article(noun)
    count = NUMBERS[number] if number < len(NUMBERS) else str(number)
    return f"{count} {pluralised(noun)}"


def _listed(phrases: list[str]) -> str:
    if len(phrases) == 1:
        return phrases[0]
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]
