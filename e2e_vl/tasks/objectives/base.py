"""Base classes of the pre-training objectives: a preprocessor, a loss, predictions, and answers to users.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.structures import Detector, Loss
from e2e_vl.predictions import Prediction, Ranked
from e2e_vl.samples import DatasetInfo, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions
from e2e_vl.targets import Targets
from e2e_vl.tasks.answers import AnswerVocabulary
from e2e_vl.tasks.base import Sizes, Transform, init_head
from e2e_vl.tasks.config import ObjectiveConfig, PretrainingConfig
from e2e_vl.text import TextEncoding, TextTokenizer

MASK = "[MASK]"  # a masked wordpiece in a text
NO_LABEL = -1


@dataclasses.dataclass
class TextDraft:
    """A text before it is encoded; each objective may change it in turn."""

    words: str
    sample: Sample
    has_image: bool = True
    text: SampleText | None = None  # the text of the data set, with its truth; None: it is not from the data set
    second: str | None = None  # the second text of a pair; None: a single text
    # wordpieces of each word, before masking; for a pair, the words of both texts in order
    pieces: list[list[int]] = dataclasses.field(default_factory=list)
    ids: Int64[np.ndarray, " pieces"] | None = None  # after masking
    labels: Int64[np.ndarray, " pieces"] | None = None  # original ids of the masked wordpieces; `NO_LABEL` elsewhere
    is_match: bool | None = True  # whether the text describes its image; None: unknown
    is_choice: bool | None = None  # whether it is the right one of several choices; None: there are no choices
    record: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields that the objectives add to the record


@dataclasses.dataclass(frozen=True)
class ObjectivePreprocessor:
    """Prepares texts and targets for an objective, in data workers.

    The methods are called in order; by default they do nothing.
    """

    text_tokenizer: TextTokenizer

    def edit_text(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        """Replace the words of the text, or add a second text.

        An objective that adds a second text and reads the summary needs `Ability.SUMMARY_OF_PAIR`.
        `index` is that of the text in the data set.
        """

    def mask(self, draft: TextDraft, generator: np.random.Generator) -> None:
        """Mask wordpieces."""

    def targets(self, draft: TextDraft, encoding: TextEncoding) -> Targets:
        """Return the targets of the encoded text, of the same class for every text."""
        return Targets()

    def extra_texts(self, sample: Sample, generator: np.random.Generator) -> Iterable[tuple[TextDraft, TextEncoding]]:
        """Return texts without an image to add after each text of the data set; they get no predictions."""
        return ()


@dataclasses.dataclass
class ObjectiveOutput:
    """The loss of an objective, and its prediction for each item: a masked wordpiece, a region or a text."""

    loss: Loss  # weighted
    text: Int64[Tensor, " items"]  # index of the item's text
    is_correct: Bool[Tensor, " items"]
    logits: Float[Tensor, "items ..."]
    # for classification: position in the text, predicted class and true class
    position: Int64[Tensor, " items"] | None = None
    best: Int64[Tensor, " items"] | None = None
    truth: Int64[Tensor, " items"] | None = None


def classified(
    weight: float,
    index: tuple[Int64[Tensor, " items"], ...],
    logits: Float[Tensor, "items classes"],
    truth: Int64[Tensor, " items"],
    losses: Float[Tensor, " items"] | None = None,
) -> ObjectiveOutput:
    """Make the output of a classification objective.

    Args:
        index: the text of each item, and its position in the text if the objective chooses positions.
        losses: of each item; None: the cross entropy.
    """
    best = logits.argmax(dim=1)
    if losses is None:
        total = F.cross_entropy(logits, truth, reduction="sum")
    else:
        total = losses.sum()
    loss = Loss(weight * total, logits.new_full((), len(logits)))
    position = index[1] if len(index) > 1 else torch.zeros_like(index[0])
    return ObjectiveOutput(loss, index[0], best == truth, logits, position, best, truth)


class ItemPrediction(msgspec.Struct, frozen=True):
    """The class predicted for one item."""

    position: int  # of the wordpiece, or of the region; region 0 is the whole image if there is one
    predicted: str
    truth: str


class ObjectiveCounts(msgspec.Struct):
    """The number of items of an objective in one text, and how many were predicted correctly."""

    count: int
    right: int
    items: list[ItemPrediction] = []  # one per item, if the classes have names


class PretrainingPrediction(Prediction, kw_only=True):
    """The predictions of each objective for a text; for a user's text, the words that fill its masks."""

    objectives: dict[str, ObjectiveCounts] = msgspec.field(default_factory=dict)
    second: str | None = None  # the second text of a pair
    is_match: bool | None = None  # whether the text describes its image
    target_answer: str | None = None  # the target answer of `image_qa`
    filled: str = ""  # a user's text with the best word at each [MASK]
    masks: tuple[Ranked, ...] = ()  # the best words at each [MASK]


class MLMHead(nn.Module):
    """BERT's masked-language-modelling head: Linear, GELU, LayerNorm, then the encoder's word embeddings and a bias."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.transform = Transform(hidden_size, norm=True)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        init_head([self.transform["dense"]], "normal")

    def forward(
        self, states: Float[Tensor, "*shape E"], word_embeddings: Float[Tensor, "V E"]
    ) -> Float[Tensor, "*shape V"]:
        return F.linear(self.transform(states), word_embeddings, self.bias)


class Objective(nn.Module, abc.ABC):
    """A pre-training objective, built as `Objective(sizes, config)` with a subclass of `ObjectiveConfig`."""

    needs: ClassVar[tuple[Ability, ...]] = ()  # abilities that the encoder must have
    predicts_regions: ClassVar[bool] = False  # needs masked regions
    reads_words: ClassVar[bool] = False  # uses the shared word head
    # gets the region states after a `Transform` that is shared by all such objectives
    transforms_regions: ClassVar[bool] = False

    answer_vocabulary: AnswerVocabulary | None = None  # None: it chooses from no list of answers

    def __init__(self, sizes: Sizes, config: ObjectiveConfig):
        super().__init__()
        self.config = config

    def preprocessor(self, text_tokenizer: TextTokenizer) -> ObjectivePreprocessor:
        """Return the text preprocessor, which runs in data workers; by default it does nothing."""
        return ObjectivePreprocessor(text_tokenizer)

    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        """Raise a UserError if data, detector or region masking do not fit the objective; does nothing by default.

        `info` is None in prediction.
        """

    @abc.abstractmethod
    def forward(
        self, targets: Targets, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Compute the weighted loss over all labelled items of the batch, and the predictions."""

    def class_names(
        self, output: ModelOutput, wordpieces: Sequence[str], masking: PretrainingConfig
    ) -> Sequence[str] | None:
        """Return the names of the predicted classes, for reports and answers; None: they have no names.

        `masking` says whether the background is the first class or the last one.
        """
        return None

    def answer(self, output: ModelOutput, logits: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
        """Return fields of the `PretrainingPrediction` for a user's text."""
        return {}

    def answer_lines(self, prediction: PretrainingPrediction) -> list[str]:
        """Return the objective's part of an answer as lines of text."""
        return []


def top_classes(probabilities: Float[Tensor, "rows columns"], names: Sequence[str]) -> list[Ranked]:
    """Return the five most probable classes of each row, by name, with their probabilities, best first."""
    values, numbers = probabilities.topk(min(5, probabilities.shape[1]), dim=1)
    ranked = []
    for row_numbers, row_values in zip(numbers.tolist(), values.tolist(), strict=True):
        row_names = [names[number] for number in row_numbers]
        ranked.append(tuple(zip(row_names, row_values, strict=True)))
    return ranked


def format_ranked(pairs: Ranked) -> str:
    """Write names with their probabilities, to three decimals, as one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in pairs)
