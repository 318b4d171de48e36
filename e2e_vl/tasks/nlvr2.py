"""NLVR2: is a sentence true of two images? Classification of the encoder's summary of the sentence and both images.

The encoder determines how two images are encoded: with the regions of both in one sequence, or in two passes with
concatenated summaries.

The metrics are accuracy and consistency as in the official script, tested with golden data. An identifier is
split-set-pair-sentence, such as dev-850-2-0. Predictions and labels are compared case-insensitively, without stripping.
Identifiers that differ only in the pair form a group: the same sentence with different images.
Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor
from typing_extensions import override

from detector.images import load_image
from detector.io import write_text
from detector.structures import Loss
from e2e_vl.drawing import draw_side_by_side
from e2e_vl.io import Score
from e2e_vl.predictions import Prediction, Ranked, require_distinct_texts
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import CorrectChoice, Question, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import Head, PredictionSummary, Sizes, Task, Transform
from e2e_vl.tasks.config import NLVR2Config
from e2e_vl.tasks.submission import Submission
from e2e_vl.text import TextTokenizer
from e2e_vl.transforms import LoadedImage

IMAGES = (0, 1)  # left and right
LABELS = ("False", "True")  # as in the official files


class NLVR2Prediction(Prediction, kw_only=True):
    """Whether a sentence is true of two images."""

    metadata_fields = Prediction.metadata_fields | {"identifier"}
    prediction: Literal["True", "False"]
    score: Score  # probability of the prediction
    true: Score  # probability of "True"
    file_names: tuple[str, ...] = ()  # file names of the left and the right image
    label: Literal["True", "False"] | None = None
    identifier: str = ""


def group_of(identifier: str) -> str:
    split, number, _, sentence = identifier.split("-")
    return f"{split}-{number}-{sentence}"


def nlvr2_scores(labels: Mapping[str, str], predictions: Mapping[str, str]) -> dict[str, float]:
    """Compute accuracy and consistency, 0 to 1.

    Args:
        labels: identifier -> "True" or "False".
        predictions: identifier -> prediction; identifiers without a label are ignored (official).

    Returns:
        "accuracy" over the labelled examples, and "consistency", the share of groups with only right
        predictions.
    """
    groups: dict[str, list[bool]] = defaultdict(list)
    num_hits = 0
    for identifier, label in labels.items():
        is_hit = predictions[identifier].lower() == label.lower()
        groups[group_of(identifier)].append(is_hit)
        num_hits += is_hit
    return {
        "accuracy": num_hits / len(labels),
        "consistency": sum(all(group) for group in groups.values()) / len(groups),
    }


def nlvr2_metrics(predictions: Sequence[NLVR2Prediction]) -> dict[str, float]:
    """Return the metrics of a run.

    They are "count"; and if there are labels, "accuracy", "accuracy/<label>" (over the examples with that label) and
    "consistency".
    """
    labelled = [prediction for prediction in predictions if prediction.label is not None]
    metrics = {"count": float(len(predictions))}
    if not labelled:
        return metrics
    labels = {prediction.identifier: prediction.label for prediction in labelled}
    answers = {prediction.identifier: prediction.prediction for prediction in labelled}
    metrics |= nlvr2_scores(labels, answers)
    for label in LABELS:
        hits = [prediction.prediction == label for prediction in labelled if prediction.label == label]
        if hits:
            metrics[f"accuracy/{label.lower()}"] = sum(hits) / len(hits)
    return metrics


def write_submission(path: Path, predictions: Sequence[NLVR2Prediction]) -> None:
    """Write predictions in the official script's format: identifier,True or identifier,False without a header."""
    require_distinct_texts(path, (prediction.identifier for prediction in predictions))
    write_text(path, "".join(f"{prediction.identifier},{prediction.prediction}\n" for prediction in predictions))


@dataclasses.dataclass
class NLVR2Targets(Targets):
    """Whether each sentence is true."""

    label: int | np.int64 | Int64[Tensor, " M"] | None = stacked()  # 1 = true


class NLVR2Preprocessor(Preprocessor):
    """Encodes a sentence as one text. Words are not swapped in flipped images: "left" mostly means the left image."""

    prediction_class = NLVR2Prediction
    learns_from = (CorrectChoice,)

    @override
    def truth_record(self, truth: CorrectChoice, *, flipped: bool) -> dict[str, Any]:
        return {"label": LABELS[truth.number]}

    @override
    def placeholder_targets(self) -> NLVR2Targets:
        return NLVR2Targets(np.int64(0))

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        encoding = self.text_tokenizer.single(self.text_tokenizer.pieces(text.words))
        record = self.record(text, images, encoding)
        record["file_names"] = [images[row].name for row in text.image_index]
        targets = NLVR2Targets()
        if isinstance(text.truth, CorrectChoice):
            targets.label = np.int64(text.truth.number)
        yield EncodedText(encoding, text.image_index, record, targets)


class NLVR2Task(Task):
    """Two classes, or one score, from the summary."""

    prediction_class = NLVR2Prediction
    metrics = staticmethod(nlvr2_metrics)
    submission = Submission(write_submission)
    blind_without_boxes = True  # the numbers of boxes reveal how many objects there are
    needs = (Ability.SUMMARY_OF_SINGLE, Ability.IMAGE_PAIRS)
    example_call = '("left.jpg", "right.jpg"), "both images show a dog"'

    def __init__(self, summary_size: int, config: NLVR2Config | None = None):
        super().__init__()
        self.config = config or NLVR2Config()
        transform = Transform(summary_size, norm=True) if self.config.hidden_layer else None
        outputs = len(LABELS) if self.config.loss == "softmax" else None
        self.head = Head(summary_size, outputs, self.config.dropout, self.config.head_init, transform=transform)

    @classmethod
    @override
    def build(cls, sizes: Sizes, config: NLVR2Config) -> Self:
        return cls(sizes.summary_size, config)

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> NLVR2Preprocessor:
        return NLVR2Preprocessor(text_tokenizer)

    @override
    def question(self, question: Question) -> Sample:
        """Make the sample of a sentence about two images; without boxes the detector proposes them."""
        return question.sample(SampleText(0, question.text, {}, image_index=IMAGES))

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score whether M texts are true of their images.

        Returns `logits` float32 [M, 2], the score of "False" (0 with the loss "sigmoid") and of "True", and the loss
        `nlvr2` if the labels are known. Its count is the number of texts with a label.
        """
        logits = at_least_float32(self.head(encoded.summary))
        if self.config.loss == "sigmoid":
            logits = torch.stack([torch.zeros_like(logits), logits], dim=1)
        losses = {}
        if batch.targets is not None and batch.targets.label is not None:
            labels = batch.targets.with_target(batch.targets.label)
            # with "sigmoid" the logits are (0, score), whose softmax is the sigmoid of the score
            total = F.cross_entropy(batch.targets.with_target(logits), labels, reduction="sum")
            losses["nlvr2"] = Loss(total=total, count=logits.new_tensor(float(len(labels))))
        return TaskOutput(losses=losses, logits=logits)

    @override
    def predict(self, output: ModelOutput) -> list[NLVR2Prediction]:
        logits = output.task.logits
        predictions = []
        rows = zip(output.batch.records, logits.argmax(dim=1).tolist(), logits.softmax(dim=1).tolist(), strict=True)
        for record, best, probabilities in rows:
            _, true = probabilities
            predictions.append(self.prediction(record, prediction=LABELS[best], score=max(probabilities), true=true))
        return predictions

    @override
    def correctness(self, prediction: NLVR2Prediction) -> float | None:
        return None if prediction.label is None else float(prediction.prediction == prediction.label)

    @override
    def ranked(self, prediction: NLVR2Prediction) -> Ranked:
        answers = [("True", prediction.true), ("False", 1 - prediction.true)]
        return tuple(sorted(answers, key=lambda answer: -answer[1]))

    @override
    def draw(self, prediction: NLVR2Prediction) -> np.ndarray:
        return draw_side_by_side([load_image(name, "RGB") for name in prediction.file_names])

    @override
    def describe(self, prediction: NLVR2Prediction) -> PredictionSummary:
        return PredictionSummary(
            prediction.text,
            prediction.prediction,
            prediction.score,
            prediction.label or "",
            group=prediction.family or "",
        )
