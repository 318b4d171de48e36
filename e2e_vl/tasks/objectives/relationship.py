"""Sentence-image relationship prediction: does the text belong to the image?

Three kinds of it: a caption that may be another image's (VL-BERT, table 4, row c; LXMERT); a right caption with a
second one that may be another image's (VisualBERT, section 3.3); a text of which the data say whether it is true
(VisualBERT's code, pre-training on NLVR2 and VCR).

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor, nn

from detector.errors import UserError
from detector.structures import Detector, Loss
from e2e_vl.examples import Targets, stacked
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import ChoiceText, CorrectChoice, DatasetInfo
from e2e_vl.structures import Ability, Batch, EncoderOutput, TextRegions, at_least_float32
from e2e_vl.tasks.base import start_head
from e2e_vl.tasks.config import RelationshipConfig
from e2e_vl.tasks.objectives.base import (
    Draft,
    Objective,
    ObjectiveOutput,
    ObjectivePreprocessor,
    Sizes,
    WordHead,
)
from e2e_vl.text import TextEncoding, TextTokenizer

FEW_IMAGES = "Captions of other images need at least two images."
FEW_CAPTIONS = (
    "task.config.objectives.relationship.texts is pair, but an image has one caption only; use data with several "
    "captions per image, or set it to single."
)


@dataclasses.dataclass
class MatchTargets(Targets):
    """Whether each text belongs to its image."""

    # 1 = its own caption, or true; 0 = another image's, or false; -1 = no image, or nobody says
    is_match: int | np.int64 | Int64[Tensor, " M"] | None = stacked()


@dataclasses.dataclass(frozen=True)
class CaptionExchange(ObjectivePreprocessor):
    """Puts captions of other images in the place of some, or a second caption behind each."""

    config: RelationshipConfig = dataclasses.field(default_factory=RelationshipConfig)

    def exchange(self, draft: Draft, index: int, generator: np.random.Generator) -> None:
        if draft.sample.from_user or self.config.texts == "stated":
            return
        if generator.random() < self.config.probability:
            found, draft.is_match = self._other_image(draft, index, generator), False
        elif self.config.texts == "pair":
            found = self._same_image(draft, index, generator)
        else:
            return
        if self.config.texts == "pair":
            draft.second = found
        else:
            draft.words = found

    def _other_image(self, draft: Draft, index: int, generator: np.random.Generator) -> str:
        """A caption of another image, drawn from all captions."""
        own, pool = draft.sample.own_texts, draft.sample.pool
        if len(own) >= len(pool):
            raise UserError(FEW_IMAGES)
        while index in own:
            index = int(generator.integers(len(pool)))
        return pool[index]

    def _same_image(self, draft: Draft, index: int, generator: np.random.Generator) -> str:
        """Another caption of the same image."""
        others = [number for number in draft.sample.own_texts if number != index]
        if not others:
            raise UserError(FEW_CAPTIONS)
        return draft.sample.pool[others[int(generator.integers(len(others)))]]

    def targets(self, draft: Draft, encoding: TextEncoding) -> MatchTargets:
        """Raises ValueError for a question with choices unless the data state which are right."""
        if self.config.texts == "stated":
            truth = None if draft.text is None else draft.text.truth
            is_stated = draft.is_choice is None and isinstance(truth, CorrectChoice)
            draft.is_match = bool(truth.number) if is_stated else draft.is_choice
        elif isinstance(draft.text, ChoiceText):
            raise UserError(
                "Questions with choices stay as they are; set task.config.objectives.relationship.texts to stated."
            )
        draft.record["is_match"] = draft.is_match
        return MatchTargets(np.int64(-1 if draft.is_match is None or not draft.has_image else draft.is_match))


class Relationship(Objective):
    """A Linear on the summary, two classes; cross entropy over the texts that are judged."""

    config: RelationshipConfig

    def __init__(self, sizes: Sizes, config: RelationshipConfig):
        super().__init__(sizes, config)
        is_pair = config.texts == "pair"
        self.needs = (Ability.SUMMARY_OF_PAIR if is_pair else Ability.SUMMARY_OF_SINGLE,)
        self.head = nn.Linear(sizes.summary_size, 2)
        start_head([self.head], "normal")

    def preprocessor(self, text_tokenizer: TextTokenizer) -> CaptionExchange:
        return CaptionExchange(text_tokenizer, self.config)

    def check(self, facts: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """Raises ValueError if there are no other images, no second captions, or no stated truths."""
        if facts is None:
            return
        if self.config.texts == "stated":
            if not any(isinstance(truth, CorrectChoice) for truth in facts.truths()):
                raise UserError(
                    f"{self.config.key('texts')} is stated, but the data do not say which texts are true; use other "
                    f"data, or set {self.config.key('weight')} to 0."
                )
            return
        if len(facts.groups) < 2:
            raise UserError(FEW_IMAGES)
        if self.config.texts == "pair" and any(len(texts) < 2 for texts in facts.groups):
            raise UserError(FEW_CAPTIONS)

    def forward(
        self, targets: MatchTargets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: WordHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [judged texts, 2], no match and match."""
        is_judged = targets.is_match >= 0
        logits = at_least_float32(self.head(encoded.summary[is_judged]))
        truth = targets.is_match[is_judged]
        total = F.cross_entropy(logits, truth, reduction="sum")
        loss = Loss(self.config.weight * total, is_judged.sum().to(logits.dtype))
        return ObjectiveOutput(loss, is_judged.nonzero()[:, 0], logits.argmax(dim=1) == truth, logits)
