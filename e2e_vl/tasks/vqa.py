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
        """Label a question; its best answer is the first with the highest score, or the most frequent one."""

        def mirror(answer: str) -> str:
            return " ".join(swap_left_right(answer.split(" "))) if mirrored else answer

        if isinstance(truth, CorrectAnswer):  # to a question of GQA or Visual Genome
            truth = ScoredAnswers({truth.answer: 1.0})
        if isinstance(truth, ScoredAnswers):
            scores = {mirror(self.spell(answer)): score for answer, score in truth.scores.items()}
            listed = [answer for answer, score in scores.items() if score > 0 and answer in self.class_of]
            best = -1
            if listed:
                best = self.class_of[max(listed, key=scores.get)]
            return AnswerLabels(scores, best, {"answer_scores": scores})
        if not isinstance(truth, HumanAnswers):
            return None
        answers = [mirror(answer) for answer in truth.answers]
        spellings = answers
        if self.normalised:
            spellings = [normalise_answer(answer) for answer in answers]
        class_counts = Counter(self.class_of[answer] for answer in spellings if answer in self.class_of)
        best = -1
        if class_counts:
            [(best, _)] = class_counts.most_common(1)
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
        human_answers = Counter(prediction.answers or ())
        answer_scores = prediction.answer_scores or {}
        if prediction.multiple_choice_answer:
            truth = prediction.multiple_choice_answer
        elif answer_scores:
            truth = max(answer_scores, key=answer_scores.get)
        else:
            truth = next(iter(human_answers), "")
        note = ""
        if human_answers:
            counts = [f"{answer} ({count})" for answer, count in human_answers.most_common()]
            note = f"people said: {', '.join(counts)}"
        return PredictionSummary(
            prediction.text, prediction.answer, prediction.score, truth, note, prediction.question_type or ""
        )
