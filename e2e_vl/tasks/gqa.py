"""GQA: classification over an answer vocabulary; every question has one right answer.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from detector.structures import Loss
from e2e_vl.metrics.gqa import GQAPrediction, belongs, gqa_metrics, grounding, write_submission
from e2e_vl.samples import CorrectAnswer, ScoredAnswers, StructuredAnswer
from e2e_vl.structures import EncoderOutput, ModelOutput, TextBatch
from e2e_vl.tasks.base import PredictionSummary
from e2e_vl.tasks.question_answering import AnswerLabels, AnswerTargets, AnswerTask, QuestionVocabulary
from e2e_vl.tasks.submission import Submission


def attention_to_regions(
    encoded: EncoderOutput, texts: TextBatch, attention_mask: Bool[Tensor, "M R"]
) -> Float[Tensor, "M R"]:
    """Return the attention of each answer over the regions; sums to 1 per text, or 0 without attention on regions.

    Attention is taken from the last layer in which text attends to regions, at the position of the summary ([CLS] if
    the summary is the pooled vector), and averaged over the heads.
    """
    first_region = texts.input_ids.shape[1]
    regions = slice(first_region, first_region + attention_mask.shape[1])
    rows = torch.arange(len(texts), device=attention_mask.device)
    summary = torch.zeros_like(rows) if texts.summary is None else texts.summary
    attention = torch.zeros_like(attention_mask, dtype=torch.float32)
    for layer_attention in encoded.attentions:
        layer_mean = layer_attention[rows, :, summary, regions].float().mean(dim=1) * attention_mask
        sees_regions = layer_mean.sum(dim=1) > 0
        attention = torch.where(sees_regions[:, None], layer_mean, attention)
    return attention / attention.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


class GQAVocabulary(QuestionVocabulary):
    """Targets are 1 for the right answer, or the one with the best score, and 0 for all others."""

    prediction_class = GQAPrediction
    learns_from = (CorrectAnswer, ScoredAnswers)

    @override
    def labels_of(self, truth: Any, *, mirrored: bool = False) -> AnswerLabels | None:
        answer = None
        if isinstance(truth, CorrectAnswer):
            answer = truth.answer
        elif isinstance(truth, ScoredAnswers):
            answer = max(truth.scores, key=truth.scores.get, default=None)
        if answer is None:
            return None
        answer = self.spell(answer)
        if mirrored:
            answer = {"left": "right", "right": "left"}.get(answer, answer)
        record = {"right_answer": answer}
        if isinstance(truth, StructuredAnswer):
            record |= {name: getattr(truth, name) for name in ("types", "group", "entailed", "steps")}
            # `GQATask.predict` replaces these by what they say of the predicted answer
            evaluation = {"choices": truth.choices, "named_boxes": truth.named_boxes}
            record |= {name: value for name, value in evaluation.items() if value is not None}
        return AnswerLabels({answer: 1.0}, self.class_of.get(answer, -1), record)


class GQATask(AnswerTask):
    """`AnswerTask` with the metrics of the official script."""

    loss_name = "gqa"
    prediction_class = GQAPrediction
    metrics = staticmethod(gqa_metrics)
    submission = Submission(write_submission)
    vocabulary_class = GQAVocabulary

    @property
    @override
    def reads_attention(self) -> bool:
        return self.config.grounding

    @override
    def predict(self, output: ModelOutput, top_k: int | None = None) -> list[GQAPrediction]:
        """Predict as `AnswerTask.predict` does, and judge the answers.

        `is_valid` and `is_plausible` come from the question's choices, and `grounding` from the boxes of the objects
        that it mentions.
        """
        predictions = super().predict(output, top_k)
        for prediction, attended in zip(predictions, self._attended(output), strict=True):
            named_boxes = prediction.metadata.pop("named_boxes", None)
            if named_boxes is not None and attended is not None:
                prediction.grounding = grounding(named_boxes, attended)
            choices = prediction.metadata.pop("choices", None)
            if choices is not None:
                prediction.is_valid = belongs(prediction.answer, choices["valid"], prediction.types)
                prediction.is_plausible = belongs(prediction.answer, choices["plausible"], prediction.types)
        return predictions

    @override
    def _loss(self, logits: Float[Tensor, "M Y"], targets: AnswerTargets) -> Loss:
        if self.config.loss != "softmax_times_answers":
            return super()._loss(logits, targets)
        logits = targets.with_target(logits)
        best = targets.with_target(targets.best)
        if self.config.unlisted_is_first:
            best = best.clamp(min=0)
        total = F.cross_entropy(logits, best, ignore_index=-1, reduction="sum") * len(self.answers)
        return Loss(total=total, count=(best >= 0).sum().to(logits.dtype))

    def _attended(self, output: ModelOutput) -> list[list[tuple[list[float], float]] | None]:
        """Return the boxes of each text, relative to the image's width and height, with their attention.

        It is None for each text without attention maps.
        """
        texts = output.batch.texts
        text_regions = output.text_regions
        if not self.config.grounding or output.encoded.attentions is None:
            return [None] * len(texts)
        relative_boxes = text_regions.boxes / text_regions.image_sizes.flip(-1).repeat(1, 1, 2)
        attention = attention_to_regions(output.encoded, texts, text_regions.attention_mask)
        has_area = text_regions.attention_mask & (relative_boxes[..., 2:] > relative_boxes[..., :2]).all(dim=-1)
        attended = []
        for row, rows_with_area in enumerate(has_area):
            boxes = relative_boxes[row, rows_with_area].tolist()
            attended.append(list(zip(boxes, attention[row, rows_with_area].tolist(), strict=True)))
        return attended

    @override
    def correctness(self, prediction: GQAPrediction) -> float | None:
        return None if prediction.right_answer is None else float(prediction.is_hit)

    @override
    def describe(self, prediction: GQAPrediction) -> PredictionSummary:
        note = ""
        if not prediction.is_balanced:
            note = "not balanced: only used for the consistency of balanced questions"
        return PredictionSummary(
            prediction.text,
            prediction.answer,
            prediction.score,
            prediction.right_answer or "",
            note,
            prediction.types.get("structural", ""),
        )
