"""A task with ragged targets: for every phrase of a text the region that it names, where any of several boxes is right.

Shape legend
    M   texts in the batch
    L   wordpieces of the longest text
    R   regions of the text with the most regions
    P   phrases of all texts
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from detector.boxes import pairwise_iou
from detector.structures import Loss
from e2e_vl.examples import GeneratorFactory, ImageExample, Preprocessor, Ragged, Targets, TextExample, nested, ragged
from e2e_vl.parts import Settings
from e2e_vl.predictions import Box, Prediction
from e2e_vl.samples import PhraseBoxes, Question, Sample, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.tasks.base import Task
from e2e_vl.text import TextTokenizer


class GroundingConfig(Settings, frozen=True):
    positive_iou: float = 0.5


@dataclasses.dataclass
class GroundingTargets(Targets):
    """`spans` says which words a phrase has, also where the truth is unknown."""

    spans: Ragged | None = ragged()  # int64 [P, 2], first wordpiece and last plus one; a list per text
    boxes: Ragged | None = nested()  # float32 [all boxes, 4], in pixels of the resized image; a list per phrase


class GroundingPreprocessor(Preprocessor):
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], make_generator: GeneratorFactory
    ) -> Iterable[TextExample]:
        [image] = images
        truth = text.truth if isinstance(text.truth, PhraseBoxes) else None
        spans = ((0, len(text.words)),) if truth is None else truth.spans
        pieces: list[int] = []
        owners: list[int] = []  # the phrase of each piece
        last = 0
        for number, (first, end) in enumerate(spans):
            for words, owner in ((text.words[last:first], -1), (text.words[first:end], number)):
                own = self.text_tokenizer.pieces(words, mirrored=image.image_transform.flipped)
                pieces += own
                owners += [owner] * len(own)
            last = end
        encoding = self.text_tokenizer.single(pieces)
        placed = encoding.place(owners)
        rows = [np.flatnonzero(placed == number) for number in range(len(spans))]
        targets = GroundingTargets(
            spans=np.array([(own[0], own[-1] + 1) if len(own) else (0, 1) for own in rows], dtype=np.int64)
        )
        if truth is not None:
            targets.boxes = [image.image_transform.transform_boxes(boxes).astype(np.float32) for boxes in truth.boxes]
        record = self.record(text, images, encoding) | {"phrases": [text.words[first:end] for first, end in spans]}
        yield TextExample(encoding, text.image_index, record, targets)


class GroundingPrediction(Prediction, kw_only=True):
    phrases: tuple[str, ...]
    boxes: tuple[Box, ...]
    gt_boxes: tuple[tuple[Box, ...], ...] = ()


class GroundingTask(Task):
    """The dot product of a phrase and a region; `logits` [P, R]."""

    prediction_class = GroundingPrediction

    def __init__(self, hidden_size: int, config: GroundingConfig):
        super().__init__()
        self.config = config
        self.phrase, self.region = (nn.Linear(hidden_size, hidden_size) for _ in range(2))

    def preprocessor(self, text_tokenizer: TextTokenizer) -> GroundingPreprocessor:
        return GroundingPreprocessor(text_tokenizer)

    def question(self, question: Question) -> Sample:
        return question.plain_sample("A phrase")

    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        spans, text = batch.targets.spans.values, batch.targets.spans.owner
        position = torch.arange(encoded.text.shape[1], device=text.device)
        inside = ((position >= spans[:, :1]) & (position < spans[:, 1:])).to(encoded.text.dtype)  # [P, L]
        states = (inside[:, None] @ encoded.text[text])[:, 0] / inside.sum(dim=1, keepdim=True)
        scores = at_least_float32(self.region(encoded.regions)[text] @ self.phrase(states)[..., None])[..., 0]
        logits = scores.masked_fill(~regions.attention_mask[text], torch.finfo(scores.dtype).min)
        losses = {}
        if batch.targets.boxes is not None:
            losses["grounding"] = self._loss(logits, regions.boxes[text], batch.targets.boxes.split())
        return TaskOutput(losses=losses, logits=logits)

    def _loss(self, logits: Tensor, candidates: Tensor, truth: Sequence[Tensor]) -> Loss:
        """Phrases that name no candidate do not contribute to the loss."""
        each = []
        for row, (own, boxes) in enumerate(zip(candidates, truth, strict=True)):
            is_right = (pairwise_iou(own, boxes) > self.config.positive_iou).any(dim=1)
            if is_right.any():
                each.append(logits[row].logsumexp(dim=0) - logits[row, is_right].logsumexp(dim=0))
        return Loss(torch.stack(each).sum() if each else 0 * logits.sum(), logits.new_tensor(float(len(each))))

    def predict(self, batch: Batch, output: ModelOutput) -> list[GroundingPrediction]:
        regions, counts = output.text_regions, batch.targets.spans.counts.tolist()
        best = output.task.logits.argmax(dim=1).split(counts)
        scales = batch.images.scales[batch.image_index[:, 0]]
        found = []
        for row, (record, own) in enumerate(zip(batch.records, best, strict=True)):
            boxes = regions.boxes[row, own] / torch.cat([scales[row], scales[row]])
            found.append(self.prediction(record, boxes=boxes.tolist()))
        return found

    def correct(self, prediction: GroundingPrediction) -> float | None:
        """Share of the phrases with a true box that found one."""
        named = [(box, truth) for box, truth in zip(prediction.boxes, prediction.gt_boxes, strict=True) if truth]
        hits = [bool((pairwise_iou(np.array([box]), np.array(truth)) > 0.5).any()) for box, truth in named]
        return sum(hits) / len(hits)

    def metrics(self, predictions: list[GroundingPrediction]) -> dict[str, float]:
        return {"accuracy": sum(map(self.correct, predictions)) / len(predictions)}

    def answer_lines(self, prediction: GroundingPrediction) -> list[str]:
        return [f"{phrase}: {box}" for phrase, box in zip(prediction.phrases, prediction.boxes, strict=True)]
