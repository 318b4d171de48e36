"""What the wording of pre-training hands to objectives, and what it makes of the drafts that they hand back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

from e2e_vl.layout import LaidText, TextWriter
from e2e_vl.samples import HumanAnswers, Sample, SampleText
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.objectives.base import Draft, ObjectiveWording
from e2e_vl.tasks.pretraining import PretrainingWording
from tests.tasks.wordings import make_tokenizer, sample_of, word


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "what is red", "the red box", "a dog and a cat")


def wording_of(tokenizer, part: type[ObjectiveWording], **options) -> PretrainingWording:
    writer = TextWriter(tokenizer, **options)
    return PretrainingWording(writer, {"part": part(writer)})


# Texts of the data, and texts beside them


@dataclasses.dataclass
class AnswerTargets(Targets):
    known: np.ndarray | None = stacked()


class AnswerOfText(ObjectiveWording):
    """Learns the answers that the reader states, and asks once more beside each question."""

    def targets(self, draft: Draft, laid: LaidText) -> AnswerTargets:
        return AnswerTargets(np.int64(-1 if draft.text is None else len(draft.text.truth.answers)))

    def beside(self, sample: Sample, generator: np.random.Generator) -> Iterable[tuple[Draft, LaidText]]:
        for has_image in (True, False):
            yield Draft("", sample, has_image=has_image), self.writer.single([])


def test_an_objective_reads_the_truth_of_a_text(tokenizer):
    question = SampleText(0, "what is red", {}, HumanAnswers(("the box", "a dog")))
    texts = word(wording_of(tokenizer, AnswerOfText), sample_of(question))
    assert [int(text.targets.parts["part"].known) for text in texts] == [2, -1, -1]


def test_texts_beside_look_at_the_images_of_the_text_if_they_have_any(tokenizer):
    question = SampleText(0, "what is red", {}, HumanAnswers(()), looks_at=(0,))
    texts = word(wording_of(tokenizer, AnswerOfText), sample_of(question))
    assert [text.looks_at for text in texts] == [(0,), (0,), ()]
    assert [bool(text.record) for text in texts] == [True, False, False]
