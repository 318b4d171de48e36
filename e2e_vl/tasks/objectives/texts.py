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
from typing_extensions import override

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

    @override
    def edit_text(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        if draft.sample.from_user or self.config.text_format == "labelled":
            return
        is_pair = self.config.text_format == "pair"
        captions = draft.sample.pool
        image_captions = draft.sample.own_texts  # numbers of the captions of the image
        if generator.random() < self.config.probability:  # a caption of another image, drawn from all captions
            if len(image_captions) >= len(captions):
                raise UserError("Captions of other images need at least two images.")
            draft.is_match = False
            caption = index
            while caption in image_captions:
                caption = int(generator.integers(len(captions)))
        elif is_pair:  # another caption of the same image
            others = [number for number in image_captions if number != index]
            caption = others[int(generator.integers(len(others)))]
        else:
            return
        if is_pair:
            draft.second = captions[caption]
        else:
            draft.words = captions[caption]

    @override
    def targets(self, draft: TextDraft, encoding: TextEncoding) -> MatchTargets:
        if self.config.text_format == "labelled":
            draft.is_match = draft.is_choice
            truth = None if draft.text is None else draft.text.truth
            if draft.is_choice is None and isinstance(truth, CorrectChoice):
                draft.is_match = bool(truth.number)
        elif isinstance(draft.text, ChoiceText):
            raise UserError(
                "Questions with choices stay; set task.config.objectives.relationship.text_format to labelled."
            )
        draft.record["is_match"] = draft.is_match
        if draft.is_match is None or not draft.has_image:
            return MatchTargets(np.int64(NO_LABEL))
        return MatchTargets(np.int64(draft.is_match))


class Relationship(Objective):
    """Classifies, with a Linear on the summary, whether the text matches; cross entropy over the labelled texts."""

    config: RelationshipConfig

    def __init__(self, sizes: Sizes, config: RelationshipConfig):
        super().__init__(sizes, config)
        if config.text_format == "pair":
            self.needs = (Ability.SUMMARY_OF_PAIR,)
        else:
            self.needs = (Ability.SUMMARY_OF_SINGLE,)
        self.head = nn.Linear(sizes.summary_size, 2)
        init_head([self.head], "normal")

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> CaptionReplacement:
        return CaptionReplacement(text_tokenizer, self.config)

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        if info is None or self.config.text_format == "single":
            return
        missing = None
        if self.config.text_format == "pair":
            if any(len(texts) < 2 for texts in info.groups):
                missing = "some images have only one caption"
        elif not any(isinstance(truth, CorrectChoice) for truth in info.truths()):
            missing = "the data have no labels of true texts"
        if missing is not None:
            raise UserError(
                f"{self.config.key('text_format')} is {self.config.text_format}, but {missing}; set it to single."
            )

    @override
    def forward(
        self, targets: MatchTargets, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Classify the labelled texts; the logits are float32 [labelled texts, 2]: no match, match."""
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

    @override
    def mask(self, draft: TextDraft, generator: np.random.Generator) -> None:
        """Choose the target answer; the text is unchanged."""
        if draft.sample.from_user or not draft.is_match or draft.text is None:
            return
        scores = truth_scores(draft.text.truth)
        if scores is None:
            return
        if self.uses_best:
            known_scores = known_answers(scores, self.class_of)
            answer = max(known_scores, key=known_scores.get, default=None)
        else:
            answer = sample_answer(scores, self.class_of, generator)
        if answer is not None:
            draft.record["target_answer"] = answer

    @override
    def targets(self, draft: TextDraft, encoding: TextEncoding) -> AnswerLabel:
        return AnswerLabel(np.int64(self.class_of.get(draft.record.get("target_answer"), NO_LABEL)))


def truth_scores(truth: Any) -> Mapping[str, float] | None:
    """Return the score of each answer to a question, from any kind of truth; None for texts that are not questions.

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
    """Return the answers in the vocabulary, with their scores.

    Answers are first normalised with `simplify_answer`. If two become equal, the score of the one that was changed by
    the normalisation is used, as in the official code.
    """
    unchanged: dict[str, float] = {}
    changed: dict[str, float] = {}
    for answer, score in scores.items():
        simplified = simplify_answer(answer)
        if simplified == answer:
            unchanged[answer] = score
        else:
            changed[simplified] = score
    return {answer: score for answer, score in (unchanged | changed).items() if answer in class_of}


def sample_answer(
    scores: Mapping[str, float], class_of: Mapping[str, int], generator: np.random.Generator
) -> str | None:
    """Sample one of `known_answers` with probability proportional to its score; None if there are none.

    A single answer is returned without using the generator.
    """
    known_scores = known_answers(scores, class_of)
    answers = list(known_scores)
    if len(answers) < 2:
        return next(iter(answers), None)
    weights = np.array(list(known_scores.values()), dtype=np.float64)
    number = int(generator.choice(len(answers), p=weights / weights.sum()))
    return answers[number]


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

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> AnswerSampling:
        class_of = {answer: number for number, answer in enumerate(self.answer_vocabulary.answers)}
        return AnswerSampling(text_tokenizer, class_of, uses_best=self.config.label == "best")

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        if info is None:
            return
        vocabulary = set(self.answer_vocabulary.answers)
        for truth in info.truths():
            answers = truth_scores(truth) or ()
            if any(simplify_answer(answer) in vocabulary for answer in answers):
                return
        raise UserError(
            f"No text of the data has an answer in {self.config.key('answers')}; use data with questions, "
            f"or set {self.config.key('weight')} to 0."
        )

    @override
    def forward(
        self, targets: AnswerLabel, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Classify the texts with an answer; the logits are float32 [texts with an answer, Y]."""
        index = (targets.answer >= 0).nonzero(as_tuple=True)
        logits = at_least_float32(self.head(encoded.summary[index]))
        return classified(self.config.weight, index, logits, targets.answer[index])

    @override
    def class_names(self, output: ModelOutput, wordpieces: Sequence[str], masking: PretrainingConfig) -> Sequence[str]:
        return self.answer_vocabulary.answers
