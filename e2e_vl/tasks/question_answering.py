"""Base classes of tasks with an answer vocabulary: classification of the summary of question and image.

The vocabulary is saved with the task. Subclasses define targets (`QuestionVocabulary.labels_of`) and metrics.
Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from detector.errors import UserError
from detector.structures import Detector, Loss
from e2e_vl.metrics.gqa import GQAPrediction
from e2e_vl.metrics.vqa import UNKNOWN, VQAPrediction
from e2e_vl.predictions import Prediction, Ranked
from e2e_vl.preprocessing import EncodedText, GeneratorFactory, Preprocessor
from e2e_vl.samples import DatasetInfo, Question, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.answers import AnswerVocabulary
from e2e_vl.tasks.base import Head, HeadInit, Sizes, Task, Transform
from e2e_vl.tasks.config import AnswerConfig
from e2e_vl.text import TextTokenizer, simplify_answer
from e2e_vl.transforms import LoadedImage

MANY_UNKNOWN = 0.5  # share of questions that triggers a warning
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class AnswerTargets(Targets):
    """The score of each answer, and the best answer."""

    scores: Float[np.ndarray, " Y"] | Float[Tensor, "M Y"] | None = stacked()  # soft targets
    best: int | np.int64 | Int64[Tensor, " M"] | None = stacked()  # class of the best answer; -1: unknown


class AnswerLabels(NamedTuple):
    """Labels of a question, from its ground truth."""

    scores: Mapping[str, float]  # scores of answers, some perhaps not in the vocabulary
    best: int  # class of the best answer; -1: not in the vocabulary
    record: dict[str, Any]  # the ground truth, stored in predictions


class QuestionVocabulary(AnswerVocabulary, abc.ABC):
    """An answer vocabulary with the labels of annotated questions, see `AnswerConfig`."""

    # see `Preprocessor`
    prediction_class: ClassVar[type[Prediction]]
    learns_from: ClassVar[tuple[type, ...]]

    @abc.abstractmethod
    def labels_of(self, truth: Any, *, mirrored: bool = False) -> AnswerLabels | None:
        """Make labels from the ground truth; None if it is unknown. `mirrored`: "left" and "right" are swapped."""

    def spell(self, answer: str) -> str:
        """Spell an answer as the vocabulary does, if it has it; answers of Visual Genome are whole sentences."""
        return answer if answer in self.class_of else simplify_answer(answer)

    def targets_of(self, scores: Mapping[str, float]) -> Float[np.ndarray, " Y"]:
        """Return float32 targets of all answers; scores of answers outside the vocabulary are dropped."""
        targets = np.zeros(len(self.answers), dtype=np.float32)
        for answer, score in scores.items():
            if answer in self.class_of:
                targets[self.class_of[answer]] = score
        return targets


@dataclasses.dataclass(frozen=True)
class AnswerPreprocessor(Preprocessor):
    """Encodes a question with its answer token.

    In flipped images "left" and "right" are swapped (official VL-BERT code).
    """

    answers: QuestionVocabulary

    @property
    @override
    def prediction_class(self) -> type[Prediction]:
        return self.answers.prediction_class

    @property
    @override
    def learns_from(self) -> tuple[type, ...]:
        return self.answers.learns_from

    @override
    def truth_record(self, truth: Any, *, flipped: bool) -> dict[str, Any]:
        labels = self.answers.labels_of(truth, mirrored=flipped)
        if labels is None:
            return {}
        return labels.record

    @override
    def placeholder_targets(self) -> AnswerTargets:
        return AnswerTargets(self.answers.targets_of({}), np.int64(-1))

    @override
    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[LoadedImage], make_generator: GeneratorFactory
    ) -> Iterable[EncodedText]:
        [image] = images
        mirrored = image.image_transform.flipped
        encoding = self.text_tokenizer.question(self.text_tokenizer.pieces(text.words, mirrored=mirrored))
        targets = AnswerTargets()
        labels = self.answers.labels_of(text.truth, mirrored=mirrored)
        if labels is not None:
            targets = AnswerTargets(self.answers.targets_of(labels.scores), np.int64(labels.best))
        yield EncodedText(encoding, text.image_index, self.record(text, images, encoding), targets)


class AnswerTask(Task):
    """Scores each answer from the summary of question and image; the answer with the highest score is predicted."""

    vocabulary_class: ClassVar[type[QuestionVocabulary]]
    blind_without_boxes = True  # the number of boxes reveals the answer to "how many"
    # pre-trained with question answering (LXMERT), or without (VL-BERT)
    init_from = HeadInit(
        copies={"image_qa.head.transform.": "head.transform."},
        answer_rows=("image_qa.head.output.", "head.output."),
        otherwise=HeadInit(copies={"word_head.transform.": "head.transform."}, random=("head.output.",)),
    )
    loss_name: ClassVar[str]  # name of the loss in logs

    def __init__(self, summary_size: int, config: AnswerConfig):
        super().__init__()
        self.config = config
        self.answer_vocabulary = self.make_vocabulary(config.answers)
        self.answers = self.answer_vocabulary.answers
        width = summary_size
        transform = None
        if config.hidden_layer:
            width = config.head_width * summary_size
            transform = Transform(summary_size, norm=True, width=width)
        else:  # only a head with a hidden layer matches the pre-training head
            self.init_from = None
        self.head = Head(width, len(self.answers), config.dropout, config.head_init, transform=transform)

    @classmethod
    @override
    def build(cls, sizes: Sizes, config: AnswerConfig) -> Self:
        return cls(sizes.summary_size, config)

    def make_vocabulary(self, answers: Sequence[str]) -> QuestionVocabulary:
        """Build the answer vocabulary of this task."""
        return self.vocabulary_class(answers)

    @property
    @override
    def needs(self) -> tuple[Ability, ...]:
        if self.config.init_from_words:
            return (Ability.SUMMARY_OF_QUESTION, Ability.WORD_EMBEDDINGS)
        return (Ability.SUMMARY_OF_QUESTION,)

    @override
    def preprocessor(self, text_tokenizer: TextTokenizer) -> AnswerPreprocessor:
        return AnswerPreprocessor(text_tokenizer, self.answer_vocabulary)

    @override
    def question(self, question: Question) -> Sample:
        return question.sample(SampleText(0, question.text, {}))

    @torch.no_grad()
    @override
    def init_weights(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Initialise the last Linear from word embeddings; rows of answers without wordpieces are unchanged."""
        if not self.config.init_from_words:
            return
        table = encoder.get_input_embeddings().weight
        for row, answer in enumerate(self.answers):
            pieces = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(answer))
            if pieces:
                self.head.output.weight[row] = table[pieces].mean(dim=0)

    @override
    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        """Log how many questions have no answer in the vocabulary; raise a UserError if none has one.

        Such questions do not contribute to the softmax loss; for the others see `AnswerConfig.skip_unlisted`.
        """
        total = 0
        without = 0
        for truth in info.truths():
            labels = self.answer_vocabulary.labels_of(truth)
            if labels is not None:
                total += 1
                without += labels.best == -1
        if not without:
            return
        if without == total:
            raise UserError(
                f"Not one of the {total} training questions has an answer in the vocabulary of {len(self.answers)}; "
                "set task.config.answers to the vocabulary of this data set, or leave it out to build one."
            )
        share = without / total
        logger.log(
            logging.WARNING if share > MANY_UNKNOWN else logging.INFO,
            "%d of %d training questions (%.1f %%) have no answer in the vocabulary of %d (task.config.answers).",
            without,
            total,
            100 * share,
            len(self.answers),
        )

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the answers of M texts.

        Returns `logits` float32 [M, Y], and the task's loss if the batch has targets. Its count is the number of texts
        with a target ("binary", "divergence"; see `AnswerConfig.skip_unlisted`) or with a known answer ("softmax").
        """
        logits = at_least_float32(self.head(encoded.summary))
        losses = {}
        if batch.targets is not None and batch.targets.scores is not None:
            losses[self.loss_name] = self._loss(logits, batch.targets)
        return TaskOutput(losses=losses, logits=logits)

    def _loss(self, logits: Float[Tensor, "M Y"], targets: AnswerTargets) -> Loss:
        logits = targets.with_target(logits)
        if self.config.loss == "softmax":
            best = targets.with_target(targets.best)
            total = F.cross_entropy(logits, best, ignore_index=-1, reduction="sum")
            return Loss(total=total, count=(best >= 0).sum().to(logits.dtype))
        scores = targets.with_target(targets.scores).to(logits)
        if self.config.skip_unlisted:
            is_listed = targets.with_target(targets.best) >= 0
            logits = logits[is_listed]
            scores = scores[is_listed]
        if self.config.loss == "binary":
            total = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum")
        else:  # "divergence": targets of 0 do not contribute
            total = F.kl_div(logits.log_softmax(dim=1), scores, reduction="sum")
        return Loss(total=total, count=logits.new_tensor(float(len(logits))))

    @override
    def predict_answers(self, output: ModelOutput, top_k: int | None = None) -> list[Prediction]:
        return self.predict(output, top_k)

    @override
    def predict(self, output: ModelOutput, top_k: int | None = None) -> list[Prediction]:
        """Predict the best answer, its `score`, and the `top_k` best answers, best first (None: `top_answers`).

        Scores are sigmoids of the logits with the binary loss, and a softmax over all answers with the other losses. Of
        equal scores, the first answer in the vocabulary wins, as in the arg-max of the official code.
        """
        logits = output.task.logits
        probabilities = logits.sigmoid() if self.config.loss == "binary" else logits.softmax(dim=1)
        cannot_win = [answer == UNKNOWN and not self.config.unknown_can_win for answer in self.answers]
        if top_k is None:
            top_k = self.config.top_answers
        top_k = min(top_k, len(self.answers) - sum(cannot_win))
        logits = logits.masked_fill(torch.tensor(cannot_win, device=logits.device), -torch.inf)
        best = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        best_scores = probabilities.gather(1, best)
        predictions = []
        for record, classes, scores in zip(output.batch.records, best.tolist(), best_scores.tolist(), strict=True):
            top_answers = [(self.answers[number], score) for number, score in zip(classes, scores, strict=True)]
            answer, score = top_answers[0]
            predictions.append(self.prediction(record, answer=answer, score=score, top_answers=top_answers))
        return predictions

    @override
    def ranked(self, prediction: VQAPrediction | GQAPrediction) -> Ranked:
        return prediction.top_answers
