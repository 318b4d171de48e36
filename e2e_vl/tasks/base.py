"""Base class of the tasks and building blocks of their heads. Shape legend: see `e2e_vl/structures.py`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.images import load_image
from detector.structures import Detector
from e2e_vl.drawing import draw_boxes
from e2e_vl.parquet import image_of_name
from e2e_vl.predictions import ONLY_PHRASES, Box, PhrasesOnly, Prediction, Ranked
from e2e_vl.preprocessing import Preprocessor
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import DatasetInfo, Question, Sample
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.tasks.answers import AnswerVocabulary
from e2e_vl.tasks.config import InitScheme, MaskAt
from e2e_vl.tasks.submission import Submission
from e2e_vl.text import TextTokenizer

# The layers of task heads, and their initialisation

NEW_LAYERS_STD = 0.02  # VL-BERT, section 4.1, as in BERT


@dataclasses.dataclass
class Sizes:
    """Sizes that the heads of a task or an objective depend on."""

    hidden_size: int  # E
    vocab_size: int  # V
    feature_dim: int = 0  # D
    num_classes: int = 0  # foreground classes of the detector
    summary_size: int | None = None  # X; None: E

    def __post_init__(self) -> None:
        if self.summary_size is None:
            self.summary_size = self.hidden_size


def init_head(linears: Iterable[nn.Linear], init: InitScheme | float) -> None:
    """Initialise the Linears of a head; all biases become zero.

    Args:
        init: "official": Xavier uniform weights, as in the official VL-BERT code. "normal": N(0, 0.02), as in the
            paper for all new layers. A number: N(0, number).
    """
    for linear in linears:
        if init == "official":
            nn.init.xavier_uniform_(linear.weight)
        elif init == "normal":
            nn.init.normal_(linear.weight, std=NEW_LAYERS_STD)
        else:
            nn.init.normal_(linear.weight, std=init)
        nn.init.zeros_(linear.bias)


class Transform(nn.ModuleDict):
    """Linear and GELU; with `norm` also LayerNorm, as in BERT's masked-language-modelling head.

    `width` is the output width; None: `hidden_size`.
    """

    def __init__(self, hidden_size: int, *, norm: bool = False, width: int | None = None):
        if width is None:
            width = hidden_size
        super().__init__({"dense": nn.Linear(hidden_size, width)})
        if norm:
            self["norm"] = nn.LayerNorm(width, eps=1e-12)

    def forward(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*shape width"]:
        states = F.gelu(self["dense"](states))
        return self["norm"](states) if "norm" in self else states


class Head(nn.Module):
    """An optional transform, dropout, Linear. With `outputs` None: one score per state, without an output axis."""

    def __init__(
        self,
        hidden_size: int,
        outputs: int | None,
        dropout: float,
        init: InitScheme | float,
        *,
        transform: Transform | None = None,
    ):
        super().__init__()
        self.transform = transform
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs or 1)
        self.is_score = outputs is None
        if transform is not None:
            init_head([transform["dense"]], init)
        init_head([self.output], init)

    def forward(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*scores"]:
        if self.transform is not None:
            states = self.transform(states)
        scores = self.output(self.dropout(states))
        return scores.squeeze(-1) if self.is_score else scores


def candidate_regions(
    text_regions: TextRegions, *, whole_image_can_win: bool, may_be_empty: bool = False
) -> Bool[Tensor, "M R"]:
    """Return the regions that may be the answer.

    Args:
        whole_image_can_win: the box of the whole image is a candidate like any other. False: only for texts without
            other regions.
        may_be_empty: without other regions, there are no candidates either.
    """
    if whole_image_can_win:
        return text_regions.attention_mask
    others = text_regions.attention_mask & ~text_regions.is_whole_image
    if may_be_empty:
        return others
    return torch.where(others.any(dim=1, keepdim=True), others, text_regions.attention_mask)


@dataclasses.dataclass(frozen=True)
class PredictionSummary:
    """A prediction as text for reports."""

    question: str  # the text of the data set
    answer: str  # the predicted answer
    score: float | None = None  # score of that answer; None: it has no score
    truth: str = ""  # the right answer; "" if unknown
    note: str = ""  # details
    group: str = ""  # family of the text or type of the question; "" if there is none
    # (truth, wrong answer) pairs for the list of frequent mistakes; None: `truth` and `answer`
    mistakes: tuple[tuple[str, str], ...] | None = None


@dataclasses.dataclass(frozen=True)
class HeadInit:
    """How a head is initialised from another head. All names are prefixes of parameter names."""

    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the other head's -> this head's
    # (the other head's, this head's): row 1 minus row 0 of a two-class classifier becomes a score
    difference: tuple[str, str] | None = None
    random: tuple[str, ...] = ()  # this head's; may keep their random initialisation
    # (the other head's, this head's): an answer classifier copies the rows of the answers that both vocabularies have;
    # all other rows become zero
    answer_rows: tuple[str, str] | None = None
    otherwise: HeadInit | None = None  # the rule for a head with none of these parameters
    # modules of this head that the other one lacks keep their random initialisation
    allows_new_modules: bool = False
    # this head's, with a row per region class; `task.config.has_background_last`: the last class is the background
    region_classes: tuple[str, ...] = ()

    @property
    def source_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the other head's parameters that this rule reads."""
        prefixes = list(self.copies)
        if self.difference is not None:
            prefixes.append(self.difference[0])
        if self.answer_rows is not None:
            prefixes.append(self.answer_rows[0])
        return tuple(prefixes)

    @property
    def target_prefixes(self) -> tuple[str, ...]:
        """Prefixes of this head's parameters that this rule or `otherwise` is about."""
        prefixes = list(self.copies.values())
        if self.difference is not None:
            prefixes.append(self.difference[1])
        if self.answer_rows is not None:
            prefixes.append(self.answer_rows[1])
        prefixes += self.random
        if self.otherwise is not None:
            prefixes += self.otherwise.target_prefixes
        return tuple(prefixes)

    def for_weights(self, names: Iterable[str]) -> HeadInit:
        """Return this rule, or `otherwise` for a head with other parameters."""
        names = tuple(names)
        if self.otherwise is None or any(name.startswith(self.source_prefixes) for name in names):
            return self
        return self.otherwise.for_weights(names)


def load_predicted_image(prediction: Prediction) -> np.ndarray:
    """Read the image of a prediction, uint8 RGB [height, width, 3], as it was annotated."""
    image = image_of_name(prediction.file_name)
    return load_image(image, "RGB", prediction.image_size, prediction.file_name)


def phrase_boxes(prediction: Prediction, first: int = 0) -> tuple[list[Box], list[str], list[bool]]:
    """Return boxes and labels of the grounded phrases, for pictures, and whether each is unsure.

    Unsure phrases, which match several regions about equally well, are omitted. If the answer is wrong, all but the
    first are shown, because they may explain it (the landmark of a relation). Labels of wrong phrases end with "?".
    `first` is the first phrase to show.
    """
    boxes = []
    labels = []
    unsure = []
    for number, phrase in enumerate(prediction.grounded):
        may_explain = number > 0 and prediction.correct == 0
        if number < first or phrase.box is None or not (phrase.is_clear or may_explain):
            continue
        label = phrase.text
        if phrase.correct is False:
            label += "?"
        if not phrase.is_clear:
            label += f" {phrase.score:.2f}, unsure"
        boxes.append(phrase.box)
        labels.append(label)
        unsure.append(not phrase.is_clear)
    return boxes, labels, unsure


@dataclasses.dataclass(frozen=True)
class InstanceMasks:
    """The instance masks of candidate boxes that a detector reads on its RoI maps."""

    size: int  # cells along a side
    at: MaskAt  # where the cells are sampled: at their "corners" or "centres"

    @classmethod
    def from_settings(cls, size: int | None, at: MaskAt) -> InstanceMasks | None:
        """Return None, which means no masks, for the size None."""
        return None if size is None else cls(size, at)


class Task(nn.Module, abc.ABC):
    """Computes losses, predictions and metrics from a batch and an encoder's output; `build` creates a task."""

    predicts_box: ClassVar[bool] = False  # predictions have a `box` with a `score`, chosen from the candidates
    chooses_region: ClassVar[bool] = False  # has `chosen_regions`, and targets that know masks, see `NamedMasks`
    names_boxes: ClassVar[bool] = False  # its targets know the boxes that a text names, see `Targets.named_boxes`
    submission: ClassVar[Submission | None] = None  # its submission file; None: there is no such format
    predicts_classes: ClassVar[bool] = False  # its metrics compare the detector's classes with the data set's
    answers_questions: ClassVar[bool] = True  # answers users' questions about an image
    # example arguments of `e2e_vl.load(run).ask`, for model cards
    example_call: ClassVar[str] = '"photo.jpg", "what is in the picture"'
    hub_task: ClassVar[str] = "visual-question-answering"  # what the Hugging Face hub calls the task, for model cards
    batches_questions: ClassVar[bool] = True  # answers several questions in one batch
    # of a task whose config has `answers`, a vocabulary that may be built from the data with `min_answer_count`
    vocabulary_class: ClassVar[type[AnswerVocabulary] | None] = None
    blind_without_boxes: ClassVar[bool] = False  # the image-blind control gets no candidate boxes either
    init_from: ClassVar[HeadInit | None] = None  # initialisation of its head from another task's; None: impossible
    transferable: ClassVar[tuple[str, ...]] = ()  # parameter prefixes that may initialise other tasks' heads
    # the embedding of the second text segment is initialised from the first, the only one that was pre-trained
    # (official VL-BERT code)
    copies_first_segment: ClassVar[bool] = False
    prediction_class: ClassVar[type[Prediction]] = Prediction  # what `predict` returns
    # the following may be properties that depend on the config
    needs: tuple[Ability, ...] = ()  # abilities that the encoder must have
    answer_vocabulary: AnswerVocabulary | None = None  # None: it chooses from no list of answers
    region_masking: RegionMasking | None = None  # how regions are masked and truncated; None: not at all
    instance_masks: InstanceMasks | None = None  # None: no masks
    reads_attention: bool = False  # predictions need the encoder's attention maps

    @classmethod
    def build(cls, sizes: Sizes, config: Any) -> Self:
        """Build the task from its settings, in which lists of answers have been read."""
        return cls(sizes.hidden_size, config)

    @classmethod
    def extra_words(cls, config: Any) -> Iterable[str]:
        """Return the words that the preprocessor adds to texts, for a vocabulary built from the data."""
        return ()

    @abc.abstractmethod
    def preprocessor(self, text_tokenizer: TextTokenizer) -> Preprocessor:
        """Make the text preprocessor, which runs in data workers."""

    def question(self, question: Question) -> Sample:
        """Make the sample of a user's question; raise a UserError for unsupported inputs, by default for all."""
        raise UserError("This run does not answer questions; get its detections with `regions`.")

    def init_weights(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Initialise from the other parts; do nothing by default.

        Called once when a model is built, after the initial weights of detector and encoder are loaded.
        """

    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        """Check before training that the data have the task's labels; do nothing by default."""

    @abc.abstractmethod
    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Compute the logits of M texts, and the losses if the batch has targets."""

    def chosen_regions(self, output: TaskOutput, text_regions: TextRegions) -> Int64[Tensor, " M"]:
        """Return the row of the region that is the answer to each text, -1 = none; for tasks with `chooses_region`."""
        raise NotImplementedError(f"{type(self).__name__} chooses no region.")

    @abc.abstractmethod
    def predict(self, output: ModelOutput) -> list[Prediction]:
        """Return one prediction per text, with boxes in pixels of the original image."""

    def prediction(self, record: Mapping[str, Any], **answer: Any) -> Prediction:
        """Create the prediction for a text of the batch; `PhrasesOnly` for a text without a target."""
        if record.get(ONLY_PHRASES):
            fields = {name: value for name, value in record.items() if name != ONLY_PHRASES}
            return PhrasesOnly.from_record(fields)
        return self.prediction_class.from_record(record, **answer)

    def predict_answers(self, output: ModelOutput, top_k: int | None = None) -> list[Prediction]:
        """Return the predictions for users' questions; by default those of `predict`.

        `top_k`: how many answers of a list are ranked, for a task that ranks a list; None: as in `predict`.
        """
        return self.predict(output)

    @abc.abstractmethod
    def correctness(self, prediction: Prediction) -> float | None:
        """Return how right a prediction is, 0 to 1, for reports; None: the truth is unknown."""

    @abc.abstractmethod
    def metrics(self, predictions: list[Prediction]) -> dict[str, float]:
        """Compute the metrics of the predictions for a whole split."""

    def ranked(self, prediction: Prediction) -> Ranked:
        """Return the best answers with their scores, best first; empty if answers are not texts."""
        return ()

    def score_of(self, prediction: Prediction) -> float | None:
        """Return the score of the answer; None: it has several scores, or none."""
        if hasattr(prediction, "score"):
            return prediction.score
        ranked = self.ranked(prediction)
        return ranked[0][1] if ranked else None

    def certainty(self, prediction: Prediction) -> float | None:
        """Return how certain the answer is, 0 to 1, by default its score; None: it is never called unsure.

        Validation determines from which certainty on an answer is sure, see `e2e_vl/metrics/sureness.py`.
        """
        return self.score_of(prediction)

    def answer_lines(self, prediction: Prediction) -> list[str]:
        """Return a prediction as lines of text, the answer first; by default the ranked answers."""
        return [f"{score:.3f}  {answer}" for answer, score in self.ranked(prediction)]

    def answer_boxes(self, prediction: Prediction) -> list[tuple[str, Box]]:
        """Return the predicted boxes with labels; by default the one box of a task that `predicts_box`."""
        if not self.predicts_box or prediction.box is None:
            return []
        unsure = ", unsure" if prediction.is_unsure else ""
        return [(f"{prediction.detected_class or ''} {prediction.score:.2f}{unsure}".strip(), prediction.box)]

    def draw(self, prediction: Prediction) -> np.ndarray | None:
        """Draw a prediction and the ground truth; by default the image with phrases.

        Returns uint8 RGB [height, width, 3]; None if the text has no image.
        """
        if prediction.file_name is None:
            return None
        boxes, labels, unsure = phrase_boxes(prediction)
        return draw_boxes(load_predicted_image(prediction), boxes, labels, dashed=unsure)

    def describe(self, prediction: Prediction) -> PredictionSummary:
        """Return the question, the answer and the truth as text."""
        answer = next(iter(self.answer_lines(prediction)), "")
        return PredictionSummary(prediction.text, answer, group=prediction.family or "")
