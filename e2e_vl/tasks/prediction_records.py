"""What the predictions of a file must hold for reports; each task declares more of its own.

Keys that no field names are allowed. Boxes are xyxy in pixels of the original image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from e2e_vl.records import Count, FourNumbers, Record, Score

Items = Annotated[float, Meta(ge=0, le=2**31)]  # a number of hidden items, which sums in float32 make


class NamedBox(Record, kw_only=True):
    """What one phrase of a text names."""

    text: str
    box: FourNumbers | None
    score: Score
    correct: bool = True


class PredictionRecord(Record, kw_only=True):
    """What every prediction has."""

    correct: Score | None
    sent: str = ""
    family: str | None = None
    file_name: str | None = None
    grounded: tuple[NamedBox, ...] = ()


class ChosenItem(Record):
    """What was chosen for one hidden item of a text."""

    place: Count
    chosen: str
    truth: str


def found_items(names: Iterable[str]) -> type[PredictionRecord]:
    """The kind of predictions that count hidden items: of each name `<name>`, `<name>_right` and `<name>_choices`."""
    fields: list[tuple] = []
    for name in names:
        fields += [(name, Items), (f"{name}_right", Items), (f"{name}_choices", tuple[ChosenItem, ...], ())]
    return msgspec.defstruct("FoundItems", fields, bases=(PredictionRecord,), kw_only=True)


def check_lengths(**lists: Sequence | None) -> None:
    """Refuse lists of a record that should have an entry for each other's entries; None is left out.

    Raises:
        ValueError: the lengths differ.
    """
    lengths = {name: len(one) for name, one in lists.items() if one is not None}
    if len(set(lengths.values())) > 1:
        found = " and ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"there are {found}, expected equally many")
