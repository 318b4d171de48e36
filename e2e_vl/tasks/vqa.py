"""Visual question answering (VQA v2): a class per possible answer; what ten people answered is the truth.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from e2e_vl.metrics.vqa import (
    UNKNOWN,
    VQAPrediction,
    normalise_answer,
    soft_scores,
    strip_punctuation,
    vocabulary_answer,
    vqa_metrics,
    write_submission,
)
from e2e_vl.samples import HumanAnswers, ScoredAnswers
from e2e_vl.tasks.base import PredictionWords
from e2e_vl.tasks.choice import AnswerPreprocessor, AnswerTargets, AnswerTask, PossibleAnswers
from e2e_vl.text import TextTokenizer, swap_left_right


@dataclasses.dataclass
class VQATargets(AnswerTargets):
    """How much people agree with each answer, and the most frequent one."""


@dataclasses.dataclass(frozen=True)
class VQAPreprocessor(AnswerPreprocessor):
    """In a mirrored image the answers change too (official code). Scores of answers are targets as they are."""

    answers: AnswerList
    learns_from = (HumanAnswers, ScoredAnswers)
    targets = VQATargets

    def judged(self, truth: Any, *, mirrored: bool) -> tuple[VQATargets, dict[str, Any]]:
        if isinstance(truth, ScoredAnswers):
            scores = dict(truth.scores)
            if mirrored:
                scores = {" ".join(swap_left_right(answer.split(" "))): score for answer, score in scores.items()}
            best = np.int64(self.answers.best_scored(scores))
            return VQATargets(self.answers.targets_of(scores), best), {"answer_scores": scores}
        if not isinstance(truth, HumanAnswers):
            return VQATargets(), {}
        given = truth.answers
        if mirrored:
            given = [" ".join(swap_left_right(answer.split(" "))) for answer in given]
        targets = VQATargets(self.answers.soft_targets(given), np.int64(self.answers.most_frequent(given)))
        return targets, {"answers": list(given)}


class AnswerList(PossibleAnswers):
    """The possible answers; with `normalised`, normalised human answers are counted."""

    def __init__(self, answers: Sequence[str], *, normalised: bool = False) -> None:
        super().__init__(answers)
        self.normalised = normalised

    def soft_targets(self, given: Sequence[str]) -> Float[np.ndarray, " Y"]:
        """Target of every possible answer from the human answers to one question.

        See `e2e_vl.metrics.vqa.soft_scores`; answers that are not in the list are left out, so all may be zero.
        """
        return self.targets_of(soft_scores(given, normalised=self.normalised))

    def most_frequent(self, given: Sequence[str]) -> int:
        """Class of the most frequent known answer (of several the one given first); -1 if none is known."""
        if self.normalised:
            given = [normalise_answer(answer) for answer in given]
        known = Counter(self.class_of[answer] for answer in given if answer in self.class_of)
        return known.most_common(1)[0][0] if known else -1


class VQATask(AnswerTask):
    """A score per possible answer, see `AnswerTask`; the official accuracy."""

    loss_name = "vqa"
    prediction_class = VQAPrediction

    def make_list(self, answers: Sequence[str]) -> AnswerList:
        return AnswerList(answers, normalised=self.config.normalised_targets)

    @classmethod
    def spell_answer(cls, answer: str) -> str:
        """As BAN's tool for answer vocabularies."""
        return vocabulary_answer(answer)

    @classmethod
    def official_answer(cls, line: str) -> str:
        """Through the punctuation step of the official evaluation (official VL-BERT code)."""
        return line if line == UNKNOWN else strip_punctuation(line)

    def make_preprocessor(self, text_tokenizer: TextTokenizer) -> VQAPreprocessor:
        return VQAPreprocessor(text_tokenizer, self.answer_list)

    def best_class(self, truth: Any) -> int | None:
        if isinstance(truth, ScoredAnswers):
            return self.answer_list.best_scored(truth.scores)
        return self.answer_list.most_frequent(truth.answers) if isinstance(truth, HumanAnswers) else None

    def correct(self, prediction: VQAPrediction) -> float | None:
        """The official accuracy of one prediction, 0 to 1; None for a question whose answers are unknown."""
        return prediction.accuracy

    def metrics(self, predictions: list[VQAPrediction]) -> dict[str, float]:
        """The official accuracy, over all and by type of answer and question; see `e2e_vl.metrics.vqa`."""
        return vqa_metrics(predictions)

    def describe(self, prediction: VQAPrediction) -> PredictionWords:
        """The question with its type, the best answer, and what people said, the most frequent answer first."""
        said, scored = Counter(prediction.answers or ()), prediction.answer_scores or {}
        return PredictionWords(
            prediction.text,
            prediction.answer,
            prediction.score,
            prediction.multiple_choice_answer or max(scored, key=scored.get, default=next(iter(said), "")),
            "people said: " + ", ".join(f"{answer} ({count})" for answer, count in said.most_common()) if said else "",
            prediction.question_type or "",
        )

    def write_submission(
        self, path: Path, predictions: list[VQAPrediction], second: list[VQAPrediction] | None = None
    ) -> None:
        """The result file of the VQA server: a JSON list of {"question_id", "answer"}."""
        write_submission(path, predictions)
