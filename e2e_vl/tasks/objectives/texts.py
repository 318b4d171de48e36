"""Objectives on the encoder's summary: does the text match its image, and what is the answer to the question?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from torch import Tensor, nn

from detector.errors import UserError
from detector.structures import Detector
from e2e_vl.metrics.vqa import soft_scores
from e2e_vl.samples import ChoiceText, CorrectAnswer, CorrectChoice, DatasetInfo, HumanAnswers, ScoredAnswers
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.answers import AnswerVocabulary
from e2e_vl.tasks.base import Head, Transform, init_head
from e2e_vl.tasks.config import ImageQAConfig, PretrainingConfig, RelationshipConfig
from e2e_vl.tasks.objectives.base import (
    NO_LABEL,
    MLMHead,
    Objective,
    ObjectiveOutput,
    ObjectivePreprocessor,
    Sizes,
    TextDraft,
    classified,
)
from e2e_vl.text import TextEncoding, TextTokenizer, simplify_answer

# Sentence-image relationship prediction, in three variants: the caption may belong to another image (VL-BERT, table 4,
# row c; LXMERT); a second caption after the image's own may belong to another image (VisualBERT, section 3.3); the data
# have labels (VisualBERT's code, pre-training on NLVR2 and VCR).


@dataclasses.dataclass
class MatchTargets(Targets):
    """Whether each text matches its image."""

    # 1 = match, or true; 0 = caption of another image, or false; -1 = no image, or unknown
    is_match: int | np.int64 | Int64[Tensor, " M"] | None = stacked()


@dataclasses.dataclass(frozen=True)
class CaptionReplacement(ObjectivePreprocessor):
    """Replaces some captions with captions of other images, or adds a second caption to each."""

    config: RelationshipConfig = dataclasses.field(default_factory=RelationshipConfig)

    def edit_text(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        if draft.sample.from_user or self.config.text_format == "labelled":
            return
        own, pool = draft.sample.own_texts, draft.sample.pool
        if generator.random() < self.config.probability:  # a caption of another image, drawn from all captions
            if len(own) >= len(pool):
                raise UserError("Captions of other images need at least two images.")
            found, draft.is_match = index, False
            while found in own:
                found = int(generator.integers(len(pool)))
        elif self.config.text_format == "pair":  # another caption of the same image
            others = [number for number in own if number != index]
            found = others[int(generator.integers(len(others)))]
        else:
            return
        if self.config.text_format == "pair":
            draft.second = pool[found]
        else:
            draft.words = pool[found]

    def targets(self, draft: TextDraft, encoding: TextEncoding) -> MatchTargets:
        if self.config.text_format == "labelled":
            truth = None if draft.text is None else draft.text.truth
            is_labelled = draft.is_choice is None and isinstance(truth, CorrectChoice)
            draft.is_match = bool(truth.number) if is_labelled else draft.is_choice
        elif isinstance(draft.text, ChoiceText):
            raise UserError(
                "Questions with choices stay; set task.config.objectives.relationship.text_format to labelled."
            )
        draft.record["is_match"] = draft.is_match
        return MatchTargets(np.int64(-1 if draft.is_match is None or not draft.has_image else draft.is_match))


class Relationship(Objective):
    """Linear on the summary to two classes; cross entropy over the texts with a label."""

    config: RelationshipConfig

    def __init__(self, sizes: Sizes, config: RelationshipConfig):
        super().__init__(sizes, config)
        is_pair = config.text_format == "pair"
        self.needs = (Ability.SUMMARY_OF_PAIR if is_pair else Ability.SUMMARY_OF_SINGLE,)
        self.head = nn.Linear(sizes.summary_size, 2)
        init_head([self.head], "normal")

    def preprocessor(self, text_tokenizer: TextTokenizer) -> CaptionReplacement:
        return CaptionReplacement(text_tokenizer, self.config)

    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        if info is None or self.config.text_format == "single":
            return
        missing = None
        if self.config.text_format == "pair" and any(len(texts) < 2 for texts in info.groups):
            missing = "some images have only one caption"
        elif self.config.text_format == "labelled" and not any(
            isinstance(truth, CorrectChoice) for truth in info.truths()
        ):
            missing = "the data have no labels of true texts"
        if missing is not None:
            raise UserError(
                f"{self.config.key('text_format')} is {self.config.text_format}, but {missing}; set it to single."
            )

    def forward(
        self, targets: MatchTargets, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """The logits are float32 [labelled texts, 2]: no match, match."""
        index = (targets.is_match >= 0).nonzero(as_tuple=True)
        logits = at_least_float32(self.head(encoded.summary[index]))
        return classified(self.config.weight, index, logits, targets.is_match[index])


# Image question answering (LXMERT, section 3.1.3)


@dataclasses.dataclass
class AnswerLabel(Targets):
    """The target answer of each text."""

    # class of the answer; -1: not a question, no answer in the vocabulary, or another image
    answer: int | np.int64 | Int64[Tensor, " M"] | None = stacked()


@dataclasses.dataclass(frozen=True)
class AnswerSampling(ObjectivePreprocessor):
    """Chooses one of the answers to a question: draws it anew in each epoch, or takes the best one."""

    class_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    uses_best: bool = False

    def mask(self, draft: TextDraft, generator: np.random.Generator) -> None:
        """Sample the target answer; the text is unchanged."""
        if draft.sample.from_user or not draft.is_match or draft.text is None:
            return
        scores = truth_scores(draft.text.truth)
        if scores is not None:
            if self.uses_best:
                listed = known_answers(scores, self.class_of)
                answer = max(listed, key=listed.get, default=None)
            else:
                answer = sample_answer(scores, self.class_of, generator)
            if answer is not None:
                draft.record["target_answer"] = answer

    def targets(self, draft: TextDraft, encoding: TextEncoding) -> AnswerLabel:
        return AnswerLabel(np.int64(self.class_of.get(draft.record.get("target_answer"), NO_LABEL)))


def truth_scores(truth: Any) -> Mapping[str, float] | None:
    """The score of each answer to a question, from any kind of truth; None for texts that are not questions.

    Human answers get VQA v2's soft scores after normalisation, and a single right answer gets 1, as in the official
    training files.
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
    """The answers in the vocabulary, with their scores.

    Answers are first normalised with `simplify_answer`. If two become equal, the score of the one that was changed by
    the normalisation is used, as in the official code.
    """
    spelled = {answer: score for answer, score in scores.items() if answer == simplify_answer(answer)}
    spelled |= {simplify_answer(answer): score for answer, score in scores.items() if answer != simplify_answer(answer)}
    return {answer: score for answer, score in spelled.items() if answer in class_of}


def sample_answer(
    scores: Mapping[str, float], class_of: Mapping[str, int], generator: np.random.Generator
) -> str | None:
    """Sample one of `known_answers` with probability proportional to its score; None if there are none.

    A single answer is returned without using the generator.
    """
    listed = known_answers(scores, class_of)
    if len(listed) < 2:
        return next(iter(listed), None)
    shares = np.array(list(listed.values()), dtype=np.float64)
    return list(listed)[int(generator.choice(len(shares), p=shares / shares.sum()))]


class ImageQA(Objective):
    """Classifies the answer from the summary; cross entropy over the texts with an answer.

    The head is Linear, GELU, LayerNorm, Linear.
    """

    needs = (Ability.SUMMARY_OF_SINGLE,)
    config: ImageQAConfig

    def __init__(self, sizes: Sizes, config: ImageQAConfig):
        super().__init__(sizes, config)
        if not isinstance(config.answers, list):
            raise UserError(f"{config.key('answers')} is missing; set it to an answer vocabulary, or to its file.")
        self.answer_vocabulary = AnswerVocabulary(config.answers)
        width = config.head_width * sizes.summary_size
        transform = Transform(sizes.summary_size, norm=True, width=width)
        self.head = Head(width, len(self.answer_vocabulary), 0.0, "normal", transform=transform)

    def preprocessor(self, text_tokenizer: TextTokenizer) -> AnswerSampling:
        class_of = {answer: number for number, answer in enumerate(self.answer_vocabulary.answers)}
        return AnswerSampling(text_tokenizer, class_of, uses_best=self.config.label == "best")

    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        if info is None:
            return
        listed = set(self.answer_vocabulary.answers)
        if not any(
            simplify_answer(answer) in listed for truth in info.truths() for answer in truth_scores(truth) or ()
        ):
            raise UserError(
                f"No text of the data has an answer in {self.config.key('answers')}; use data with questions, "
                f"or set {self.config.key('weight')} to 0."
            )

    def forward(
        self, targets: AnswerLabel, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """The logits are float32 [texts with an answer, Y]."""
        index = (targets.answer >= 0).nonzero(as_tuple=True)
        logits = at_least_float32(self.head(encoded.summary[index]))
        return classified(self.config.weight, index, logits, targets.answer[index])

    def class_names(self, output: ModelOutput, wordpieces: Sequence[str], masking: PretrainingConfig) -> Sequence[str]:
        return self.answer_vocabulary.answers
