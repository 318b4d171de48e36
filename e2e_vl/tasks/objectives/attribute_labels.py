"""Attributes that a detector found in the regions (LXMERT's official code): what is each region like?"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from detector.interface import Detector
from e2e_vl.hiding import HidingRule
from e2e_vl.samples import DataFacts
from e2e_vl.structures import RegionLabels
from e2e_vl.tasks.objectives.object_labels import ObjectLabels, ObjectLabelsConfig


@dataclasses.dataclass(frozen=True)
class AttributeLabelsConfig(ObjectLabelsConfig):
    """The defaults follow the official code, whose weight is 1 / 0.15; its name for this loss is Attr."""

    name = "attribute_labels"
    classes: int = 400  # A, without "no attribute"; 400 for Visual Genome's attributes


class AttributeLabels(ObjectLabels):
    """As `ObjectLabels`, with the most probable attribute."""

    kind: ClassVar[str] = "attributes"
    config: AttributeLabelsConfig

    def check(self, facts: DataFacts | None, detector: Detector, rule: HidingRule) -> None:
        """What a detector's attribute head has shows in the first batch."""

    def found(self, labels: RegionLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """See `ObjectLabels.found`."""
        return labels.found_attributes, labels.found_attribute_scores
