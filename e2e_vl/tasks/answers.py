"""The answers that a model chooses from."""

from __future__ import annotations

from collections.abc import Sequence

from e2e_vl.metrics.vqa import UNKNOWN


class AnswerVocabulary:
    """Answers in the order of their classes; they are saved with the model."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = [str(answer) for answer in answers]
        self.class_of: dict[str, int] = {}
        for number, answer in enumerate(self.answers):
            if answer != UNKNOWN:
                self.class_of.setdefault(answer, number)

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def canonical_answer(cls, answer: str) -> str:
        """Normalise an annotated answer for a vocabulary that is built from the data."""
        return answer

    @classmethod
    def parse_official_answer(cls, line: str) -> str:
        """Parse a stripped, lower-case line of an official answer file."""
        return line
