"""A task on pairs of images: is the statement true?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from detector.structures import Loss
from e2e_vl.predictions import Prediction
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.registry import Config
from e2e_vl.samples import CorrectChoice, Question, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage


class StatementConfig(Config, frozen=True):
    dropout: float = 0.1


@dataclasses.dataclass
class StatementTargets(Targets):
    label: Tensor | None = stacked()  # int64 [M], 1 = true


class StatementPrediction(Prediction, kw_only=True):
    true: float
    label: int | None = None


class StatementPreprocessor(Preprocessor):
    prediction_class = StatementPrediction
    learns_from = (CorrectChoice,)

    @override
    def truth_record(self, truth: CorrectChoice, *, flipped: bool) -> dict[str, Any]:
        return {"label": truth.number}

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        encoding = self.text_tokenizer.single(
            self.text_tokenizer.pieces(text.words, mirrored=images[0].image_transform.flipped)
        )
        record = self.record(text, images, encoding)
        targets = StatementTargets(None if text.truth is None else np.int64(text.truth.number))
        yield EncodedText(encoding, text.image_index, record, targets)


class StatementTask(Task):
    """A Linear on the summary: [M, 2]."""

    prediction_class = StatementPrediction

    needs = (Ability.SUMMARY_OF_SINGLE, Ability.IMAGE_PAIRS)

    def __init__(self, summary_size: int, config: StatementConfig):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(summary_size, 2)

    @classmethod
    @override
    def build(cls, sizes: Sizes, config: StatementConfig) -> Self:
        return cls(sizes.summary_size, config)

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> StatementPreprocessor:
        return StatementPreprocessor(text_tokenizer)

    @override
    def question(self, question: Question) -> Sample:
        return question.sample(SampleText(0, question.text, {}, image_index=(0, 1)))

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        logits = at_least_float32(self.output(self.dropout(encoded.summary)))
        losses = {}
        if batch.targets.label is not None:
            total = F.cross_entropy(logits, batch.targets.label, reduction="sum")
            losses["statement"] = Loss(total, logits.new_tensor(float(len(logits))))
        return TaskOutput(losses=losses, logits=logits)

    @override
    def predict(self, output: ModelOutput) -> list[StatementPrediction]:
        shares = output.task.logits.softmax(dim=1)[:, 1].tolist()
        return [self.prediction(record, true=share) for record, share in zip(output.batch.records, shares, strict=True)]

    @override
    def correctness(self, prediction: StatementPrediction) -> float:
        return float((prediction.true > 0.5) == prediction.label)

    @override
    def metrics(self, predictions: list[StatementPrediction]) -> dict[str, float]:
        return {"accuracy": sum(map(self.correctness, predictions)) / len(predictions)}

    @override
    def answer_lines(self, prediction: StatementPrediction) -> list[str]:
        return [f"{prediction.true:.3f}  true"]
