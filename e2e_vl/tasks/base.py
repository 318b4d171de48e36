"""What every task is: a preprocessor of texts, a head with its loss, its predictions, metrics and picture."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.images import load_image
from detector.structures import Detector
from e2e_vl.drawing import draw_boxes
from e2e_vl.examples import Preprocessor
from e2e_vl.predictions import ONLY_PHRASES, Box, PhrasesOnly, Prediction, Ranked
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import DatasetInfo, Question, Sample
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.tasks.config import NewLayers
from e2e_vl.text import TextTokenizer

# The layers of heads on an encoder's states, and their initial values.

NEW_LAYERS_STD = 0.02  # VL-BERT, section 4.1, as in BERT


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the heads of a task or an objective must fit."""

    hidden_size: int  # E
    vocab_size: int  # V
    feature_dim: int = 0  # D
    num_classes: int = 0  # foreground classes of the detector
    summary_size: int | None = None  # X; None: E

    def __post_init__(self) -> None:
        if self.summary_size is None:
            object.__setattr__(self, "summary_size", self.hidden_size)


def init_head(linears: Iterable[nn.Linear], start: NewLayers | float) -> None:
    """Set the initial values of a head; all biases are zero.

    Args:
        start: "official": Xavier uniform weights, as in the official VL-BERT code. "normal": N(0, 0.02), which the
            paper says of all new layers. A number: N(0, number).
    """
    for linear in linears:
        if start == "official":
            nn.init.xavier_uniform_(linear.weight)
        else:
            nn.init.normal_(linear.weight, std=NEW_LAYERS_STD if start == "normal" else start)
        nn.init.zeros_(linear.bias)


class Transform(nn.ModuleDict):
    """Linear and GELU; with `norm` also the LayerNorm of BERT's masked-word transform.

    `width` is the width of the result; None: the width of the states.
    """

    def __init__(self, hidden_size: int, *, norm: bool = False, width: int | None = None):
        width = hidden_size if width is None else width
        super().__init__({"dense": nn.Linear(hidden_size, width)})
        if norm:
            self["norm"] = nn.LayerNorm(width, eps=1e-12)

    def forward(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*shape width"]:
        states = F.gelu(self["dense"](states))
        return self["norm"](states) if "norm" in self else states


class Head(nn.Module):
    """The transform if there is one, dropout, Linear. With `outputs` None: one score per state, no axis of its own."""

    def __init__(
        self,
        hidden_size: int,
        outputs: int | None,
        dropout: float,
        start: NewLayers | float,
        *,
        transform: Transform | None = None,
    ):
        super().__init__()
        self.transform = transform
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, outputs or 1)
        self.is_score = outputs is None
        init_head([self.output] if transform is None else [transform["dense"], self.output], start)

    def forward(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*scores"]:
        if self.transform is not None:
            states = self.transform(states)
        scores = self.output(self.dropout(states))
        return scores.squeeze(-1) if self.is_score else scores


def candidate_regions(
    regions: TextRegions, *, whole_image_can_win: bool, may_be_empty: bool = False
) -> Bool[Tensor, "M R"]:
    """Regions that may be the answer.

    Args:
        whole_image_can_win: the box of the whole image is a candidate like every other. False: it is one only for texts
            without another region, and with `may_be_empty` never.
    """
    if whole_image_can_win:
        return regions.attention_mask
    others = regions.attention_mask & ~regions.is_whole_image
    if may_be_empty:
        return others
    return torch.where(others.any(dim=1, keepdim=True), others, regions.attention_mask)


@dataclasses.dataclass(frozen=True)
class PredictionSummary:
    """A prediction in words, for reports."""

    question: str  # the text of the data set
    answer: str  # what was chosen
    score: float | None = None  # of that answer; None: it has none
    truth: str = ""  # what would have been right; "" where it is unknown
    note: str = ""  # what else helps to see why the answer is right or wrong
    group: str = ""  # family of the text or type of the question; "" where the data have none
    # pairs of a truth and a wrong answer, for the list of frequent mistakes; None: `truth` and `answer`
    mistakes: tuple[tuple[str, str], ...] | None = None


@dataclasses.dataclass(frozen=True)
class HeadInit:
    """How a head is initialised from the weights of other heads. All names are prefixes of parameter names."""

    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in the other head -> in this one
    # (in the other head, in this one): row 1 minus row 0 of a classifier of two classes becomes a score
    difference: tuple[str, str] | None = None
    random: tuple[str, ...] = ()  # of this head, may keep its random initial values
    # (in the other head, in this one): a classifier of answers takes the rows of the same answers from another list;
    # rows of answers that this list lacks become zero
    answer_rows: tuple[str, str] | None = None
    otherwise: HeadInit | None = None  # the rule for a head that has nothing of what this one takes
    # of this head, with a row per region class; `task.config.has_background_last`: the last one is the background
    region_classes: tuple[str, ...] = ()

    @property
    def takes(self) -> tuple[str, ...]:
        """What it reads of the other head."""
        return (*self.copies, *(self.difference or ())[:1], *(self.answer_rows or ())[:1])

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts of this head."""
        return (
            *(*self.copies.values(), *(self.difference or ())[1:], *(self.answer_rows or ())[1:], *self.random),
            *(self.otherwise.parts if self.otherwise is not None else ()),
        )

    def for_weights(self, names: Iterable[str]) -> HeadInit:
        """This rule, or the one for a head with other parameters."""
        names = tuple(names)
        if self.otherwise is None or any(name.startswith(self.takes) for name in names):
            return self
        return self.otherwise.for_weights(names)


def phrase_boxes(prediction: Prediction, first: int = 0) -> tuple[list[Box], list[str], list[bool]]:
    """Boxes and labels of the grounded phrases of a prediction, for its picture, and which of them are unsure.

    Phrases that fit several regions about equally well are left out. Only where the answer is wrong, the second and
    later ones, such as the landmark of a relation, are shown as unsure, because they may explain it. A "?" follows the
    words of wrong phrases.

    Args:
        first: number of the first phrase that may be shown.
    """
    boxes, labels, unsure = [], [], []
    for number, one in enumerate(prediction.grounded):
        may_explain = number > 0 and prediction.correct == 0
        if number < first or one.box is None or not (one.is_clear or may_explain):
            continue
        boxes.append(one.box)
        mark = "?" if one.correct is False else ""
        labels.append(f"{one.text}{mark}" + ("" if one.is_clear else f" {one.score:.2f}, unsure"))
        unsure.append(not one.is_clear)
    return boxes, labels, unsure


class Task(nn.Module, abc.ABC):
    """From a batch and the output of any encoder to losses, predictions and metrics; `build` makes it from settings."""

    predicts_box: ClassVar[bool] = False  # its predictions have a `box` with a `score`, chosen from candidates
    # writes the predictions of a whole split, in the order of the data set, as a server or the literature expects them;
    # of a task that has `second_run` the predictions of both runs. None: there is no such file.
    write_submission: ClassVar[Callable[..., None] | None] = None
    # `key=value` settings under which a second run predicts the other half of that file; None: one run is enough
    second_run: ClassVar[tuple[str, ...] | None] = None
    second_run_option: ClassVar[str] = ""  # how users give that run
    predicts_classes: ClassVar[bool] = False  # its metrics compare classes of the detector with the data's
    answers_questions: ClassVar[bool] = True  # a user may ask about an image
    # arguments of `e2e_vl.load(run).ask` that fit the task, for model cards
    example_call: ClassVar[str] = '"photo.jpg", "what is in the picture"'
    batches_questions: ClassVar[bool] = True  # ... and one batch may hold several questions
    # its config has `answers`, a list that may be built from the data with its `min_answer_count`
    chooses_answers: ClassVar[bool] = False
    sums_objectives: ClassVar[bool] = False  # its config has `objectives`, which are built for it
    blind_without_boxes: ClassVar[bool] = False  # the control without image sees no candidate boxes either
    starts_from: ClassVar[HeadInit | None] = None  # how its head starts from another task's; None: not at all
    transferable: ClassVar[tuple[str, ...]] = ()  # prefixes of its parameters from which heads of other tasks may start
    # a second text segment starts as a copy of the first, which alone was trained before (official VL-BERT code)
    copies_first_segment: ClassVar[bool] = False
    prediction_class: ClassVar[type[Prediction]] = Prediction  # what `predict` returns
    # properties where they follow from the config
    needs: tuple[Ability, ...] = ()  # what the encoder must be able to do
    answers: Sequence[str] = ()  # the list that a part of it chooses from; it is saved with the model
    region_masking: RegionMasking | None = None  # how regions are masked; None: none is
    reads_attention: bool = False  # its predictions of a split need the encoder's attention maps
    mask_size: int | None = None  # side of the instance masks on the RoI maps; None: the task uses none
    mask_at: str = "corners"  # where the masks' cells are sampled: at their "corners" or "centres"

    @classmethod
    def build(cls, sizes: Sizes, config: Any) -> Self:
        """The task with heads that fit; one that `sums_objectives` gets them by name as a third argument."""
        return cls(sizes.hidden_size, config)

    @classmethod
    def extra_words(cls, config: Any) -> Iterable[str]:
        """Words that the preprocessor adds to those of the data, for a vocabulary that is built from the data."""
        return ()

    @classmethod
    def canonical_answer(cls, answer: str) -> str:
        """The spelling of an annotated answer in a list of answers that is built from the data."""
        return answer

    @classmethod
    def parse_official_answer(cls, line: str) -> str:
        """The answer in a line, stripped and in lower case, of an official text file of answers."""
        return line

    @abc.abstractmethod
    def preprocessor(self, text_tokenizer: TextTokenizer) -> Preprocessor:
        """The preprocessor of the data's texts, which runs in data workers."""

    def question(self, question: Question) -> Sample:
        """The sample of a user's question; raises UserError for what the task cannot use, by default every question."""
        raise UserError("This run answers no questions; see what its detector finds with `regions`.")

    def initialise(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Take initial values from the other parts; nothing by default.

        Called once when a model is built, after the starting weights of detector and encoder were loaded.
        """

    def check_data(self, info: DatasetInfo, detector: Detector) -> None:
        """Check once, before training, that the data have what the task learns from; nothing by default."""

    @abc.abstractmethod
    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Losses (where the batch has targets) and logits of M texts, the same in training and in evaluation."""

    @abc.abstractmethod
    def predict(self, batch: Batch, output: ModelOutput) -> list[Prediction]:
        """One prediction per text, made by `prediction`; boxes in pixels of the original image."""

    def prediction(self, record: Mapping[str, Any], **answer: Any) -> Prediction:
        """The prediction for a text of the batch, of the task's own class; of a text without a target its phrases."""
        if record.get(ONLY_PHRASES):
            return PhrasesOnly.of({name: value for name, value in record.items() if name != ONLY_PHRASES})
        return self.prediction_class.of(record, **answer)

    def replies(self, output: ModelOutput) -> list[Prediction]:
        """The predictions for users' questions, by default as in `predict`."""
        return self.predict(output.batch, output)

    @abc.abstractmethod
    def correct(self, prediction: Prediction) -> float | None:
        """How right one prediction is, 0 to 1; what `metrics` averages and reports show. None: the truth is unknown."""

    @abc.abstractmethod
    def metrics(self, predictions: list[Prediction]) -> dict[str, float]:
        """Score the predictions for a whole split."""

    def joint_metrics(self, predictions: list[Prediction], second: list[Prediction]) -> dict[str, float]:
        """Scores that need both runs, where the split has labels; for a task that has `second_run`."""
        return {}

    def ranked(self, prediction: Prediction) -> Ranked:
        """The best answers with their scores, best first; none where an answer is not a text."""
        return ()

    def answer_lines(self, prediction: Prediction) -> list[str]:
        """One prediction in words, the answer first; by default the ranked answers."""
        return [f"{score:.3f}  {answer}" for answer, score in self.ranked(prediction)]

    def answer_boxes(self, prediction: Prediction) -> list[tuple[str, Box]]:
        """Boxes that answer a text, with labels; by default the one box of a task that `predicts_box`."""
        if not self.predicts_box or prediction.box is None:
            return []
        return [(f"{prediction.detected_class or ''} {prediction.score:.2f}".strip(), prediction.box)]

    def draw(self, prediction: Prediction) -> np.ndarray | None:
        """uint8 RGB picture [height, width, 3] of one prediction with the truth; by default the image with its phrases.

        None: the text has no image.
        """
        if prediction.file_name is None:
            return None
        boxes, labels, unsure = phrase_boxes(prediction)
        return draw_boxes(load_image(prediction.file_name, "RGB"), boxes, labels, dashed=unsure)

    def describe(self, prediction: Prediction) -> PredictionSummary:
        """The question, the answer and the truth in words."""
        answer = next(iter(self.answer_lines(prediction)), "")
        return PredictionSummary(prediction.text, answer, group=prediction.family or "")
