"""Which objects of a scene are referred to, and by which expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from detector.errors import UserError
from e2e_vl.synthetic.language import (
    FAMILIES,
    RELATIONS,
    SLOTS,
    Description,
    ReferringExpression,
    as_typed,
    referent,
    to_words,
)
from e2e_vl.synthetic.relations import SceneFacts

T = TypeVar("T")
VCR_FAMILIES = ("colour", "match", "pair")
PAIR_FAMILIES = ("both", "exactly one", "side", "more", "total")
_FAMILY_MIX = {"attribute": 0.55, "superlative": 0.15, "comparison": 0.1, "relation": 0.2}
_RELATION_MIX = {"near": 0.34, "nearest": 0.2, "farthest": 0.1, "overlapping": 0.1, "in front": 0.13, "behind": 0.13}
_PROPOSALS = 10  # expressions tried per object before the next object is tried
# Subsets of the slots that a description names, most general first.
_SUBSETS = tuple(slots for k in range(len(SLOTS) + 1) for slots in combinations(SLOTS, k))


@dataclass(frozen=True)
class LanguageConfig:
    """How scenes are spoken about.

    The families of expressions are attribute ("big striped star"), superlative ("smallest red thing"), comparison
    ("circle bigger than the red star") and relation ("circle next to the red star"). Objects that are not chosen to be
    referred to are used where a family has no expression about the chosen ones.

    Raises:
        ValueError: a value is impossible; the message names it.
    """

    family_mix: Mapping[str, float] = field(default_factory=_FAMILY_MIX.copy)  # shares among the expressions
    refs_per_image: tuple[int, int] = (2, 4)  # least and most objects that are chosen to be referred to
    sentences_per_ref: tuple[int, int] = (2, 3)  # least and most expressions planned for each of them
    relation_mix: Mapping[str, float] = field(default_factory=_RELATION_MIX.copy)  # tries; rare relations stay rare
    redundant: float = 0.4  # share of attribute expressions that may say more than is needed
    vcr_families: tuple[str, ...] = VCR_FAMILIES  # what VCR's questions ask (see ``vcr_writer``)
    sentences_per_pair: int = 2  # of NLVR2; an even number, in the release about two
    pair_families: tuple[str, ...] = PAIR_FAMILIES  # what NLVR2's sentences say (see ``nlvr2_writer``)

    def __post_init__(self) -> None:
        for name, known in (("family_mix", FAMILIES), ("relation_mix", RELATIONS)):
            mix = getattr(self, name)
            if set(mix) - set(known) or sum(mix.values()) <= 0 or min(mix.values()) < 0:
                raise UserError(
                    f"language.{name} must give shares >= 0 to some of {', '.join(known)}; found {dict(mix)}"
                )
        for name in ("refs_per_image", "sentences_per_ref"):
            value = tuple(getattr(self, name))
            object.__setattr__(self, name, value)
            if len(value) != 2 or not 1 <= value[0] <= value[1]:
                raise UserError(f"language.{name} must be (least, most) with 1 <= least <= most; found {value}")
        object.__setattr__(self, "vcr_families", tuple(self.vcr_families))
        if not self.vcr_families or set(self.vcr_families) - set(VCR_FAMILIES):
            raise UserError(
                f"language.vcr_families must be some of {', '.join(VCR_FAMILIES)}; found {list(self.vcr_families)}"
            )
        object.__setattr__(self, "pair_families", tuple(self.pair_families))
        if not self.pair_families or set(self.pair_families) - set(PAIR_FAMILIES):
            raise UserError(
                f"language.pair_families must be some of {', '.join(PAIR_FAMILIES)}; found {list(self.pair_families)}"
            )
        if self.sentences_per_pair < 2 or self.sentences_per_pair % 2:
            raise UserError(f"language.sentences_per_pair must be 2, 4, 6, ...; found {self.sentences_per_pair}")
        if not 0 <= self.redundant <= 1:
            raise UserError(f"language.redundant must lie in [0, 1]; found {self.redundant}")


@dataclass(frozen=True)
class Reference:
    """An expression about one object of a scene."""

    target: int  # index of the object that the expression is true of
    expression: ReferringExpression
    sentence: str  # its words (see ``to_words``)
    typed: str = ""  # the sentence as an annotator might have typed it


def draw_references(facts: SceneFacts, config: LanguageConfig, rng: np.random.Generator) -> list[Reference]:
    """Different expressions about a scene, each clearly true of exactly one object, in the order of drawing.

    The families are drawn first and the objects second, uniformly, so that the mix of families is kept. Where a family
    has no expression about any object, an attribute expression is tried instead.
    """
    speaker = _Speaker(facts, config, rng)
    families = [name for name in FAMILIES if config.family_mix.get(name, 0) > 0]
    shares = np.array([config.family_mix[name] for name in families])
    low, high = config.refs_per_image
    chosen = [int(i) for i in rng.permutation(facts.count)[: rng.integers(low, high + 1)]]
    low, high = config.sentences_per_ref
    planned = int(rng.integers(low, high + 1, len(chosen)).sum())
    said: dict[ReferringExpression, Reference] = {}
    counts = dict.fromkeys(chosen, 0)
    for family in rng.choice(families, planned, p=shares / shares.sum()):
        order = sorted(counts, key=counts.__getitem__)  # the least described first
        order += [int(i) for i in rng.permutation(facts.count) if i not in counts]
        reference = speaker.first(str(family), order, said)
        if reference is None and family != "attribute" and "attribute" in families:
            reference = speaker.first("attribute", order, said)
        if reference is not None:
            said[reference.expression] = reference
            counts[reference.target] = counts.get(reference.target, 0) + 1
    return [replace(reference, typed=as_typed(reference.sentence, rng)) for reference in said.values()]


class _Speaker:
    """Proposes expressions about the objects of one scene."""

    def __init__(self, facts: SceneFacts, config: LanguageConfig, rng: np.random.Generator) -> None:
        self.facts = facts
        self.config = config
        self.rng = rng
        self._relations = list(config.relation_mix)
        shares = np.array(list(config.relation_mix.values()), float)
        self._relation_shares = shares / shares.sum()
        self._descriptions: list[list[tuple[Description, int]]] = []
        self._unique: list[list[Description]] = []
        self._minimal: list[list[Description]] = []
        for look in facts.looks:
            described = [Description(**{slot: getattr(look, slot) for slot in slots}) for slots in _SUBSETS]
            masks = [description.mask(facts) for description in described]
            rows = zip(_SUBSETS, described, masks, strict=True)
            unique = {frozenset(slots): item for slots, item, mask in rows if mask.bit_count() == 1}
            self._descriptions.append(list(zip(described, masks, strict=True)))
            self._unique.append(list(unique.values()))
            self._minimal.append([item for slots, item in unique.items() if not any(other < slots for other in unique)])

    def first(self, family: str, targets: list[int], said: dict[ReferringExpression, Reference]) -> Reference | None:
        """An expression of this family that has not been said, about the first target that has one."""
        propose = getattr(self, f"_{family}")
        for target in targets:
            for _ in range(_PROPOSALS):
                expression = propose(target)
                if expression is None or expression in said:
                    continue
                if referent(expression, self.facts) == target:
                    return Reference(target, expression, to_words(expression, self.rng))
        return None

    def _attribute(self, target: int) -> ReferringExpression | None:
        redundant = self.rng.random() < self.config.redundant
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
        return self._with_anchor(target, str(self.rng.choice(self._relations, p=self._relation_shares)))

    def _with_anchor(self, target: int, operator: str) -> ReferringExpression | None:
        holds = self.facts.holds.get(operator)
        anchors = [
            i
            for i in range(self.facts.count)
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
        """A description of the target that is also true of another object (not of ``left_out``): it is not enough."""
        options = [
            description
            for description, mask in self._descriptions[target]
            if (with_size or description.size is None) and (mask & ~left_out).bit_count() >= 2
        ]
        if len(options) > 1 and self.rng.random() < 0.5:
            options = options[1:]  # the first is "thing" alone, which is said rarely
        return self._any(options)

    def _any(self, options: Sequence[T]) -> T | None:
        return options[int(self.rng.random() * len(options))] if options else None
