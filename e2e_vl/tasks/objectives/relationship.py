"""Sentence-image relationship prediction (VL-BERT, table 4, row c): does the text belong to the image?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor, nn

from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.hiding import HidingRule
from e2e_vl.layout import LaidText, TextWriter
from e2e_vl.samples import DataFacts
from e2e_vl.structures import Ability, Batch, EncoderOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.heads import start_head
from e2e_vl.tasks.objectives.base import (
    Draft,
    Objective,
    ObjectiveConfig,
    ObjectiveOutput,
    ObjectiveWording,
    Sizes,
    WordHead,
)


@dataclasses.dataclass(frozen=True)
class RelationshipConfig(ObjectiveConfig):
    """How often texts and images are exchanged."""

    name = "relationship"
    probability: float = 0.5  # chance that a text is the caption of another image; the official option uses 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.probability < 1:
            raise ValueError(f"{self.key('probability')} is {self.probability}; it must be above 0 and below 1.")


@dataclasses.dataclass
class MatchTargets(Targets):
    """Whether each text belongs to its image."""

    # 1 = its own caption, 0 = another image's, -1 = no image
    is_match: int | np.int64 | Int64[Tensor, " M"] | None = stacked()


@dataclasses.dataclass(frozen=True)
class CaptionExchange(ObjectiveWording):
    """Puts captions of other images in the place of some."""

    config: RelationshipConfig = dataclasses.field(default_factory=RelationshipConfig)

    def exchange(self, draft: Draft, index: int, generator: np.random.Generator) -> None:
        sample = draft.sample
        if sample.is_asked or not generator.random() < self.config.probability:
            return
        if len(sample.own) >= len(sample.pool):
            raise ValueError("Captions of other images need at least two images.")
        while index in sample.own:
            index = int(generator.integers(len(sample.pool)))
        draft.words, draft.is_match = sample.pool[index], False

    def targets(self, draft: Draft, laid: LaidText) -> MatchTargets:
        draft.record["is_match"] = draft.is_match
        return MatchTargets(np.int64(draft.is_match if draft.has_image else -1))


class Relationship(Objective):
    """A Linear on the summary, two classes; cross entropy over the texts that have an image."""

    needs = (Ability.SUMMARY_OF_SINGLE,)
    config: RelationshipConfig

    def __init__(self, sizes: Sizes, config: RelationshipConfig):
        super().__init__(sizes, config)
        self.head = nn.Linear(sizes.summary_size, 2)
        start_head([self.head], "normal")

    def wording(self, writer: TextWriter) -> CaptionExchange:
        return CaptionExchange(writer, self.config)

    def check(self, facts: DataFacts | None, detector: Detector, rule: HidingRule) -> None:
        """Raises ValueError if there are no other images."""
        if facts is not None and len(facts.groups) < 2:
            raise ValueError("Captions of other images need at least two images.")

    def forward(
        self, targets: MatchTargets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: WordHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [texts with an image, 2], no match and match."""
        has_image = (batch.looks_at >= 0).any(dim=1)
        logits = at_least_float32(self.head(encoded.summary[has_image]))
        truth = targets.is_match[has_image]
        total = F.cross_entropy(logits, truth, reduction="sum")
        loss = Loss(self.config.weight * total, has_image.sum().to(logits.dtype))
        return ObjectiveOutput(loss, has_image.nonzero()[:, 0], logits.argmax(dim=1) == truth, logits)
