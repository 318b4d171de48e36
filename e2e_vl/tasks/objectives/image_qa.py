"""Image question answering as a part of pre-training (LXMERT, section 3.1.3): which answer of a list is right?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from detector.errors import UserError
from detector.structures import Detector, Loss
from e2e_vl.examples import Targets, stacked
from e2e_vl.metrics.vqa import soft_scores
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import CorrectAnswer, DatasetInfo, HumanAnswers, ScoredAnswers
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions, at_least_float32
from e2e_vl.tasks.base import Head, Transform
from e2e_vl.tasks.config import ImageQAConfig
from e2e_vl.tasks.objectives.base import (
    NO_LABEL,
    Choice,
    Draft,
    Objective,
    ObjectiveOutput,
    ObjectivePreprocessor,
    Sizes,
    WordHead,
)
from e2e_vl.text import TextEncoding, TextTokenizer, simplify_answer


@dataclasses.dataclass
class DrawnAnswer(Targets):
    """The answer that was chosen for each text."""

    # class of the answer; -1: the text is no question, nobody's answer is in the list, or the image is another one
    answer: int | np.int64 | Int64[Tensor, " M"] | None = stacked()


@dataclasses.dataclass(frozen=True)
class AnswerDraw(ObjectivePreprocessor):
    """Chooses one of the answers to a question: draws it anew in each epoch, or takes the best one."""

    class_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    takes_best: bool = False

    def mask(self, draft: Draft, generator: np.random.Generator) -> None:
        """The text itself stays as it is: its answer is not in it."""
        if draft.sample.from_user or not draft.is_match or draft.text is None:
            return
        scores = scores_of(draft.text.truth)
        if scores is not None:
            if self.takes_best:
                known = known_answers(scores, self.class_of)
                answer = max(known, key=known.get, default=None)
            else:
                answer = draw_answer(scores, self.class_of, generator)
            if answer is not None:
                draft.record["drawn_answer"] = answer

    def targets(self, draft: Draft, encoding: TextEncoding) -> DrawnAnswer:
        return DrawnAnswer(np.int64(self.class_of.get(draft.record.get("drawn_answer"), NO_LABEL)))


def scores_of(truth: Any) -> Mapping[str, float] | None:
    """How good each answer to a question is, whatever the data say of it; None for a text that is no question.

    Human answers score as in VQA v2, normalised; the one right answer scores 1. Those are the scores in the files that
    the official code learns from.
    """
    match truth:
        case ScoredAnswers(scores=scores):
            return scores
        case HumanAnswers(answers=answers):
            return soft_scores(answers, normalised=True)
        case CorrectAnswer(answer=answer):
            return {answer: 1.0}
    return None


def known_answers(scores: Mapping[str, float], class_of: Mapping[str, int]) -> dict[str, float]:
    """Of some answers with their scores those that are in the list.

    Answers are spelled as in the list first (`simplify_answer`). If two become the same, the score of the one that was
    spelled otherwise counts alone, as in the official code.
    """
    spelled = {answer: score for answer, score in scores.items() if answer == simplify_answer(answer)}
    spelled |= {simplify_answer(answer): score for answer, score in scores.items() if answer != simplify_answer(answer)}
    return {answer: score for answer, score in spelled.items() if answer in class_of}


def draw_answer(scores: Mapping[str, float], class_of: Mapping[str, int], generator: np.random.Generator) -> str | None:
    """One of `known_answers`, with a probability in proportion to its score; None if there is none.

    Nothing is drawn where there is no choice.
    """
    known = known_answers(scores, class_of)
    if len(known) < 2:
        return next(iter(known), None)
    shares = np.array(list(known.values()), dtype=np.float64)
    return list(known)[int(generator.choice(len(shares), p=shares / shares.sum()))]


class ImageQA(Objective):
    """Linear, GELU, LayerNorm, Linear on the summary; cross entropy over the texts with an answer."""

    needs = (Ability.SUMMARY_OF_SINGLE,)
    config: ImageQAConfig

    def __init__(self, sizes: Sizes, config: ImageQAConfig):
        super().__init__(sizes, config)
        if not isinstance(config.answers, list):
            raise UserError(
                f"{config.key('answers')} is missing; give the list of possible answers, or a file of them."
            )
        self.answers: Sequence[str] = tuple(config.answers)
        width = config.head_width * sizes.summary_size
        transform = Transform(sizes.summary_size, norm=True, width=width)
        self.head = Head(width, len(self.answers), 0.0, "normal", transform=transform)

    def preprocessor(self, text_tokenizer: TextTokenizer) -> AnswerDraw:
        class_of = {answer: number for number, answer in enumerate(self.answers)}
        return AnswerDraw(text_tokenizer, class_of, takes_best=self.config.label == "best")

    def check(self, facts: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """Raises ValueError if no text of the data has an answer that is in the list."""
        if facts is None:
            return
        known = set(self.answers)
        if not any(simplify_answer(answer) in known for truth in facts.truths() for answer in scores_of(truth) or ()):
            raise UserError(
                f"No text of the data has an answer that is in {self.config.key('answers')}; use data with questions, "
                f"or set {self.config.key('weight')} to 0."
            )

    def forward(
        self, targets: DrawnAnswer, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: WordHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [texts with an answer, Y]."""
        is_known = targets.answer >= 0
        truth = targets.answer[is_known]
        logits = at_least_float32(self.head(encoded.summary[is_known]))
        total = F.cross_entropy(logits, truth, reduction="sum")
        loss = Loss(self.config.weight * total, is_known.sum().to(logits.dtype))
        return ObjectiveOutput(loss, is_known.nonzero()[:, 0], logits.argmax(dim=1) == truth, logits)

    def choices(
        self, targets: DrawnAnswer, output: ModelOutput, logits: Tensor, wordpieces: Sequence[str], rule: RegionMasking
    ) -> list[tuple[int, Choice]]:
        texts = (targets.answer >= 0).nonzero()[:, 0]
        rows: Any = zip(texts.tolist(), logits.argmax(dim=1).tolist(), targets.answer[texts].tolist(), strict=True)
        return [(text, Choice(0, self.answers[best], self.answers[truth])) for text, best, truth in rows]
