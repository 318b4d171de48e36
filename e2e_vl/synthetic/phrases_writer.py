"""Writer of the noun phrases of all expressions, in the format of Flickr30K Entities.

There is a line per expression, in the order of their sentence ids. The phrase that an expression begins with names
every object that its description is true of: which of them is meant follows from the rest. The second one names what it
is compared or related to, or all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e_vl.synthetic.flickr30k_writer import DrawnPhrase, EntitiesWriter, EntityCaption
from e2e_vl.synthetic.language import two_phrases
from e2e_vl.synthetic.references import Reference
from e2e_vl.synthetic.relations import SceneFacts, members
from e2e_vl.synthetic.scene_records import SceneRecord

_TYPE = "other"


class PhrasesWriter(EntitiesWriter):
    """Writes what ``EntitiesWriter`` writes, with expressions in place of captions."""

    def draw(self, scene: SceneRecord[Any], facts: SceneFacts) -> list[EntityCaption]:
        return [phrases_of_reference(reference, facts) for reference in scene.references]

    def write_parses(self, folder: Path, split: str, scenes: Sequence[SceneRecord[list[EntityCaption]]]) -> None:
        """Expressions have no gold parses."""


def phrases_of_reference(reference: Reference, facts: SceneFacts) -> EntityCaption:
    """The words of an expression as phrases and what stands between them."""
    expression, fitting = reference.expression, reference.expression.description.mask(facts)
    head, link, rest = two_phrases(expression, reference.sentence)
    if not rest:
        return [DrawnPhrase(head, _TYPE, (reference.target,))]
    others = fitting & ~(1 << reference.target) if expression.anchor is None else expression.anchor.mask(facts)
    return [
        DrawnPhrase(head, _TYPE, tuple(members(fitting))),
        link,
        DrawnPhrase(rest, _TYPE, tuple(members(others))),
    ]
