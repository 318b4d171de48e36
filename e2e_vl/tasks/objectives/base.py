"""One part of pre-training: how it changes a text, its loss, its predictions, and its answer to a user.

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
from e2e_vl.examples import Targets
from e2e_vl.predictions import Prediction, Ranked
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import DatasetInfo, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions
from e2e_vl.tasks.base import Sizes, Transform, init_head
from e2e_vl.tasks.config import ObjectiveConfig
from e2e_vl.text import TextEncoding, TextTokenizer

MASK = "[MASK]"  # a masked wordpiece in a text
NO_LABEL = -1


@dataclasses.dataclass
class TextDraft:
    """A text before it is encoded, as one objective after the other changes it."""

    words: str
    sample: Sample
    has_image: bool = True
    text: SampleText | None = None  # of the data, with its truth; None for a text that is not from the data
    second: str | None = None  # words of a second text, which makes a pair of the two
    # wordpieces of each word, before masking; of a pair the wordpieces of both texts, one after the other
    pieces: list[list[int]] = dataclasses.field(default_factory=list)
    ids: Int64[np.ndarray, " pieces"] | None = None  # after masking
    labels: Int64[np.ndarray, " pieces"] | None = None  # the masked wordpieces; `NO_LABEL` elsewhere
    is_match: bool | None = True  # the text belongs to its image, or is true of it; None: unknown
    is_choice: bool | None = None  # of a text that is one of several choices: it is the right one; None: it is none
    record: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the objectives add to the record


@dataclasses.dataclass(frozen=True)
class ObjectivePreprocessor:
    """What an objective does to a text in a data worker; nothing by default. Texts are changed in three steps."""

    text_tokenizer: TextTokenizer

    def exchange(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        """First: perhaps replace the words of the text of this index, or add a second text.

        A second text needs `Ability.SUMMARY_OF_PAIR`, if the objective reads the summary.
        """

    def mask(self, draft: TextDraft, generator: np.random.Generator) -> None:
        """Then: perhaps mask wordpieces."""

    def targets(self, draft: TextDraft, encoding: TextEncoding) -> Targets:
        """Last: what to learn from the text; the same class for every text."""
        return Targets()

    def extra_texts(self, sample: Sample, generator: np.random.Generator) -> Iterable[tuple[TextDraft, TextEncoding]]:
        """Further texts beside each text of the data, about its images or none; predictions leave them out."""
        return ()


@dataclasses.dataclass
class ObjectiveOutput:
    """The loss of one objective, and the prediction for each item (a masked word, a region or a text)."""

    loss: Loss  # weighted
    text: Int64[Tensor, " items"]  # which text an item belongs to
    is_right: Bool[Tensor, " items"]
    logits: Float[Tensor, "items ..."]
    # of an objective that chooses classes: position in the text, the most probable class and the true one
    position: Int64[Tensor, " items"] | None = None
    best: Int64[Tensor, " items"] | None = None
    truth: Int64[Tensor, " items"] | None = None


def classified(
    weight: float,
    is_labelled: Bool[Tensor, " *labelled"],
    logits: Float[Tensor, "items classes"],
    truth: Int64[Tensor, " items"],
    losses: Float[Tensor, " items"] | None = None,
) -> ObjectiveOutput:
    """The output of an objective that chooses classes for the labelled texts, or positions of texts.

    Args:
        losses: of each item; None: the cross entropy.
    """
    index, best = is_labelled.nonzero(), logits.argmax(dim=1)
    total = F.cross_entropy(logits, truth, reduction="sum") if losses is None else losses.sum()
    loss = Loss(weight * total, logits.new_tensor(float(len(logits))))
    position = index[:, 1] if is_labelled.ndim > 1 else torch.zeros_like(index[:, 0])
    return ObjectiveOutput(loss, index[:, 0], best == truth, logits, position, best, truth)


class Choice(msgspec.Struct, frozen=True):
    """The class predicted for one item."""

    place: int  # of the wordpiece or of the region in its text, from 0; region 0 is the whole image, where there is one
    chosen: str
    truth: str


class ObjectiveCounts(msgspec.Struct):
    """How many items of a text one objective had, and how many of them were predicted right."""

    count: int
    right: int
    choices: list[Choice] = []  # of each item, for an objective whose classes have names


class PretrainingPrediction(Prediction, kw_only=True):
    """The predictions of each objective for a text; for a user's text also what it fills in."""

    objectives: dict[str, ObjectiveCounts] = msgspec.field(default_factory=dict)
    second: str | None = None  # the second text of a pair
    is_match: bool | None = None  # the text belongs to its image, or is true of it
    drawn_answer: str | None = None  # the answer to be predicted by `image_qa`
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
    """Built as `Objective(sizes, config)`; the config is a subclass of `ObjectiveConfig`."""

    needs: ClassVar[tuple[Ability, ...]] = ()  # what the encoder must be able to do
    predicts_regions: ClassVar[bool] = False  # regions are masked for it
    reads_words: ClassVar[bool] = False  # it uses the word head, which all objectives share
    # the states of regions come to it through the `Transform` that all such objectives share
    transforms_regions: ClassVar[bool] = False

    answers: Sequence[str] = ()  # the list that it chooses from, which is saved with the model

    def __init__(self, sizes: Sizes, config: ObjectiveConfig):
        super().__init__()
        self.config = config

    def preprocessor(self, text_tokenizer: TextTokenizer) -> ObjectivePreprocessor:
        """What it does to texts in data workers."""
        return ObjectivePreprocessor(text_tokenizer)

    def check(self, info: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """Raises UserError if data (where they are known), detector or rule do not fit; nothing by default."""

    @abc.abstractmethod
    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """The weighted loss over all labelled items of the batch, and the predictions."""

    def class_names(self, output: ModelOutput, wordpieces: Sequence[str], rule: RegionMasking) -> Sequence[str] | None:
        """Names of the classes that it chooses from, for reports and answers; None: they have none.

        Args:
            wordpieces: the vocabulary, by wordpiece id.
            rule: with the position of the background among the classes of regions.
        """
        return None

    def answer(self, output: ModelOutput, logits: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
        """Fields of the `PretrainingPrediction` for a user's text, from the logits of this objective.

        Args:
            names: see `class_names`.
        """
        return {}

    def lines(self, prediction: PretrainingPrediction) -> list[str]:
        """That answer in words."""
        return []


def top_classes(probabilities: Float[Tensor, "rows columns"], names: Sequence[str]) -> list[Ranked]:
    """The names of the five best columns of each row with their probabilities, best first."""
    values, numbers = probabilities.topk(min(5, probabilities.shape[1]), dim=1)
    return [
        tuple((names[number], value) for number, value in zip(*row, strict=True))
        for row in zip(numbers.tolist(), values.tolist(), strict=True)
    ]


def listed(pairs: Ranked) -> str:
    """Names with their values as one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in pairs)
