"""Descriptions of objects as questions and sentences need them: of one object alone, or of any number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import numpy as np

from e2e_vl.synthetic.language import SLOTS, Description, pluralised
from e2e_vl.synthetic.relations import SceneFacts, members
from e2e_vl.synthetic.scenes import Look

Values = Mapping[str, Sequence[str]]  # of each attribute, see ``SceneConfig.values``


def all_descriptions(slots: Sequence[str], values: Values) -> list[Description]:
    """Every description that names these attributes."""
    chosen = product(*(values[slot] for slot in slots))
    return [Description(**dict(zip(slots, combination, strict=True))) for combination in chosen]


def identify(facts: SceneFacts, slots: Sequence[str], rng: np.random.Generator) -> tuple[int, Description] | None:
    """An object drawn at random and attributes among these slots that only it has; None if there is no such object."""
    for index in rng.permutation(facts.count):
        look = facts.looks[index]
        subsets = [subset for number in range(1, len(slots) + 1) for subset in combinations(slots, number)]
        descriptions = [Description(**{slot: getattr(look, slot) for slot in subset}) for subset in subsets]
        identifying = [one for one in descriptions if members(one.mask(facts)) == [index]]
        if identifying:
            return int(index), identifying[rng.integers(len(identifying))]
    return None


def is_true_of(description: Description, look: Look) -> bool:
    """The look has everything that the description names."""
    return all(getattr(description, slot) in (None, getattr(look, slot)) for slot in SLOTS)


def noun_phrase(description: Description, *, plural: bool = False) -> str:
    """Size, texture, colour and noun, without an article."""
    noun = description.shape or "thing"
    words = (description.size, description.texture, description.colour, pluralised(noun) if plural else noun)
    return " ".join(word for word in words if word)


def without(values: Sequence[str], value: str) -> list[str]:
    """The other values."""
    return [other for other in values if other != value]
