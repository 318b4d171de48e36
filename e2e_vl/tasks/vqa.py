"""Visual question answering (VQA v2): classification over an answer vocabulary, with ten human answers per question.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

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
from e2e_vl.samples import CorrectAnswer, HumanAnswers, ScoredAnswers
from e2e_vl.tasks.base import PredictionSummary
from e2e_vl.tasks.question_answering import AnswerLabels, AnswerTask, QuestionVocabulary
from e2e_vl.tasks.submission import Submission
from e2e_vl.text import swap_left_right


class VQAVocabulary(QuestionVocabulary):
    """Targets are the soft scores of human answers (with `normalised`, of normalised answers), or given scores.

    In flipped images, "left" and "right" are swapped in answers too (official VL-BERT code).
    """

    prediction_class = VQAPrediction
    learns_from = (HumanAnswers, ScoredAnswers, CorrectAnswer)

    def __init__(self, answers: Sequence[str], *, normalised: bool = False) -> None:
        super().__init__(answers)
        self.normalised = normalised

    @classmethod
    @override
    def canonical_answer(cls, answer: str) -> str:
        """Normalise an answer as BAN's tool for answer vocabularies does."""
        return vocabulary_answer(answer)

    @classmethod
    @override
    def parse_official_answer(cls, line: str) -> str:
        """Apply the punctuation step of the official evaluation (official VL-BERT code)."""
        return line if line == UNKNOWN else strip_punctuation(line)

    @override
    def labels_of(self, truth: Any, *, mirrored: bool = False) -> AnswerLabels | None:
        """The best answer is the first with the highest score, or the most frequent one."""

        def spelled(answer: str) -> str:
            return " ".join(swap_left_right(answer.split(" "))) if mirrored else answer

        if isinstance(truth, CorrectAnswer):  # to a question of GQA or Visual Genome
            truth = ScoredAnswers({truth.answer: 1.0})
        if isinstance(truth, ScoredAnswers):
            scores = {spelled(self.spell(answer)): score for answer, score in truth.scores.items()}
            known = [answer for answer, score in scores.items() if score > 0 and answer in self.class_of]
            best = self.class_of[max(known, key=scores.get)] if known else -1
            return AnswerLabels(scores, best, {"answer_scores": scores})
        if not isinstance(truth, HumanAnswers):
            return None
        answers = [spelled(answer) for answer in truth.answers]
        counted = [normalise_answer(answer) for answer in answers] if self.normalised else answers
        known = Counter(self.class_of[answer] for answer in counted if answer in self.class_of)
        best = known.most_common(1)[0][0] if known else -1
        record = {"answers": answers, "multiple_choice_answer": truth.most_frequent}
        return AnswerLabels(soft_scores(answers, normalised=self.normalised), best, record)


class VQATask(AnswerTask):
    """`AnswerTask` with the official accuracy."""

    loss_name = "vqa"
    prediction_class = VQAPrediction
    metrics = staticmethod(vqa_metrics)
    submission = Submission(write_submission)
    vocabulary_class = VQAVocabulary

    @override
    def make_vocabulary(self, answers: Sequence[str]) -> VQAVocabulary:
        return VQAVocabulary(answers, normalised=self.config.normalised_targets)

    @override
    def correctness(self, prediction: VQAPrediction) -> float | None:
        return prediction.accuracy

    @override
    def describe(self, prediction: VQAPrediction) -> PredictionSummary:
        said, scored = Counter(prediction.answers or ()), prediction.answer_scores or {}
        return PredictionSummary(
            prediction.text,
            prediction.answer,
            prediction.score,
            prediction.multiple_choice_answer or max(scored, key=scored.get, default=next(iter(said), "")),
            "people said: " + ", ".join(f"{answer} ({count})" for answer, count in said.most_common()) if said else "",
            prediction.question_type or "",
        )
