"""Masked language modelling of a text-only corpus, one text of it beside each caption (VL-BERT, section 3.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from detector.errors import UserError
from detector.interface import Detector
from e2e_vl.hiding import HidingRule
from e2e_vl.layout import LaidText, TextWriter
from e2e_vl.samples import DataFacts, Sample
from e2e_vl.tasks.objectives.base import Draft, Objective
from e2e_vl.tasks.objectives.masked_words import MaskedWords, MaskedWordsConfig, WordMasking
from e2e_vl.text import word_pieces


@dataclasses.dataclass(frozen=True)
class MaskedTextConfig(MaskedWordsConfig):
    """The defaults follow the official code."""

    name = "masked_text"
    min_words: int = 64  # words that a text of the corpus has at least; following lines are added until it has
    max_length: int = 64  # wordpieces that it has at most
    # texts of the corpus are `[CLS] text [SEP]` (the paper starts with [CLS]) instead of words alone (official code)
    special_tokens: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("min_words", 1), ("max_length", 3 if self.special_tokens else 1)):
            if getattr(self, field) < least:
                raise UserError(f"{self.key(field)} is {getattr(self, field)}; it must be at least {least}.")


@dataclasses.dataclass(frozen=True)
class CorpusMasking(WordMasking):
    """Draws a text of the corpus for each text of the data, and masks its words."""

    of_images = False
    config: MaskedTextConfig = dataclasses.field(default_factory=MaskedTextConfig)

    def beside(self, sample: Sample, generator: np.random.Generator) -> Iterable[tuple[Draft, LaidText]]:
        if sample.corpus is None:
            return
        words = self.words(sample.corpus, int(generator.integers(len(sample.corpus))))
        ids, labels = self.hide(words, generator)
        kept = self.config.max_length - (self.writer.layout.single.extra if self.config.special_tokens else 0)
        writer = dataclasses.replace(self.writer, max_length=None)
        laid = (writer.single if self.config.special_tokens else writer.bare)(ids[:kept])
        yield Draft("", sample, has_image=False, ids=ids, labels=labels), laid

    def words(self, corpus: Sequence[str], number: int) -> list[list[int]]:
        """Wordpieces of the words of the text that begins with a line; after the last line the first one follows.

        Raises:
            ValueError: there is no word in the corpus.
        """
        words: list[list[int]] = []
        for step in range(len(corpus) * self.config.min_words):
            words += word_pieces(corpus[(number + step) % len(corpus)], self.writer.tokenizer)
            if len(words) >= self.config.min_words:
                break
            if step + 1 == len(corpus) and not words:
                raise UserError("There is no word in the text corpus; check data.files.corpus.")
        return words


class MaskedText(MaskedWords):
    """As `MaskedWords`, on texts without an image."""

    config: MaskedTextConfig

    def wording(self, writer: TextWriter) -> CorpusMasking:
        return CorpusMasking(writer, self.config)

    def check(self, facts: DataFacts | None, detector: Detector, rule: HidingRule) -> None:
        """Raises ValueError if the data have no corpus."""
        if facts is not None and facts.corpus is None:
            raise UserError(
                f"task.config.objectives.masked_text has the weight {self.config.weight}, but the data have no "
                "text-only corpus; set data.files.corpus and data.config.use_corpus=true, or "
                "task.config.objectives.masked_text=0."
            )

    answer, lines = Objective.answer, Objective.lines  # a user's text has an image
    choices = Objective.choices  # texts of the corpus have no record
