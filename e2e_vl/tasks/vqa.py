"""Visual question answering (VQA v2): a class per possible answer, read from the encoder's summary of the question.

The list of possible answers belongs to the task and is saved with it; what people answered is the truth of a text.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.evaluation.vqa import (
    UNKNOWN,
    answer_accuracy,
    normalise_answer,
    soft_scores,
    strip_punctuation,
    vocabulary_answer,
    vqa_metrics,
    write_submission,
)
from e2e_vl.examples import ImageExample, TextExample
from e2e_vl.layout import TextWriter
from e2e_vl.samples import DataFacts, HumanAnswers, Question, Sample, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets, stacked
from e2e_vl.tasks.base import HeadStart, PredictionWords, Records, Task, check_choices, check_dropout
from e2e_vl.tasks.heads import Head, NewLayers, Sizes, Transform
from e2e_vl.text import mirror_words
from e2e_vl.wording import Draw, Wording

MANY_UNKNOWN = 0.5  # share of questions that is worth a warning
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class VQAConfig:
    """The official VL-BERT code has the same defaults."""

    # the possible answers, the position in the list is the class. In settings also a file, see
    # `e2e_vl.data.formats.answer_files.read_answers`; None: `data.files.answers`, or built from the annotations of the
    # training split. Of an answer that is listed twice the first counts; `<unk>` is never a target and never predicted.
    answers: list[str] | tuple[str, ...] | str | None = None
    # a list built from annotations holds what is the most frequent answer to at least this number of questions; 9 gives
    # the usual 3,129 answers of VQA v2's train and val
    min_answer_count: int = 9
    dropout: float = 0.1  # dropout before the last Linear
    head_width: int = 1  # width of the head's hidden layer, in widths of the summary; LXMERT's official code has 2
    # "binary": a binary cross entropy per answer with soft targets, summed over the answers (official). "softmax": a
    # cross entropy with the most frequent answer as truth (paper, section 4.2.2); texts without a known answer are left
    # out.
    loss: Literal["binary", "softmax"] = "binary"
    # count normalised human answers for the targets; False counts raw strings (official)
    normalised_targets: bool = False
    # each row of the last Linear starts as the mean word embedding of its answer's wordpieces (official)
    initialise_from_words: bool = True
    new_layers: NewLayers = "official"  # start of the head's Linears, see `e2e_vl.tasks.heads.start_head`
    top_answers: int = 5  # how many of the best answers a prediction lists

    def __post_init__(self) -> None:
        check_choices(self)
        check_dropout("dropout", self.dropout)
        if self.min_answer_count < 1 or self.top_answers < 1 or self.head_width < 1:
            raise ValueError("min_answer_count, top_answers and head_width must be at least 1.")


@dataclasses.dataclass
class VQATargets(Targets):
    """How good each answer is, and the best one."""

    scores: Float[np.ndarray, " Y"] | Float[Tensor, "M Y"] | None = stacked()  # soft targets
    # class of the most frequent answer; -1: none is known
    best: int | np.int64 | Int64[Tensor, " M"] | None = stacked()


@dataclasses.dataclass(frozen=True)
class VQAWording(Wording):
    """A question with a place for its answer; in a mirrored image "left" and "right" change places (official code)."""

    answers: AnswerList

    def word(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        [image] = images
        mirrored = image.placement.flipped
        laid = self.writer.question(self.writer.pieces(text.words, mirrored=mirrored))
        record = self.record(text, images, laid)
        targets = VQATargets()
        if isinstance(text.truth, HumanAnswers):
            given = text.truth.answers
            if mirrored:
                given = [" ".join(mirror_words(answer.split(" "))) for answer in given]
            record["answers"] = list(given)
            targets = VQATargets(self.answers.soft_targets(given), np.int64(self.answers.most_frequent(given)))
        yield TextExample(laid, text.looks_at, record, targets)


class AnswerList:
    """The possible answers, see `VQAConfig`; with `normalised`, normalised human answers are counted.

    Raises:
        ValueError: there is no answer but `<unk>`.
    """

    def __init__(self, answers: Sequence[str], *, normalised: bool = False) -> None:
        self.answers = [str(answer) for answer in answers]
        self.normalised = normalised
        self.class_of: dict[str, int] = {}
        for number, answer in enumerate(self.answers):
            if answer != UNKNOWN:
                self.class_of.setdefault(answer, number)
        if not self.class_of:
            raise ValueError("The list of possible answers is empty.")

    def __len__(self) -> int:
        return len(self.answers)

    def soft_targets(self, given: Sequence[str]) -> np.ndarray:
        """float32 [Y]: target of every possible answer from the human answers to one question.

        See `e2e_vl.evaluation.vqa.soft_scores`; answers that are not in the list are left out, so all may be zero.
        """
        targets = np.zeros(len(self), dtype=np.float32)
        for answer, score in soft_scores(given, normalised=self.normalised).items():
            if answer in self.class_of:
                targets[self.class_of[answer]] = score
        return targets

    def most_frequent(self, given: Sequence[str]) -> int:
        """Class of the most frequent known answer (of several the one given first); -1 if none is known."""
        if self.normalised:
            given = [normalise_answer(answer) for answer in given]
        known = Counter(self.class_of[answer] for answer in given if answer in self.class_of)
        return known.most_common(1)[0][0] if known else -1


class VQATask(Task):
    """A score per possible answer, from the summary of question and image; the highest is the answer.

    Raises:
        ValueError: `config.answers` is not a list (the engine reads files) or lists nothing but `<unk>`.
    """

    writes_submission = True
    chooses_answers = True
    blind_without_boxes = True  # the number of boxes answers "how many"
    # image question answering is a part of pre-training (LXMERT), or is not (VL-BERT)
    starts_from = HeadStart(
        copies={"image_qa.head.transform.": "head.transform."},
        answer_rows=("image_qa.head.output.", "head.output."),
        otherwise=HeadStart(copies={"word_head.transform.": "head.transform."}, random=("head.output.",)),
    )

    def __init__(self, summary_size: int, config: VQAConfig):
        super().__init__()
        if not isinstance(config.answers, Sequence) or isinstance(config.answers, str):
            raise ValueError("VQATask needs the list of possible answers in its config.")
        self.config = config
        self.answer_list = AnswerList(config.answers, normalised=config.normalised_targets)
        width = config.head_width * summary_size
        transform = Transform(summary_size, norm=True, width=width)
        self.head = Head(width, len(self.answers), config.dropout, config.new_layers, transform=transform)

    @classmethod
    def build(cls, sizes: Sizes, config: VQAConfig) -> Self:
        """The head reads the summary."""
        return cls(sizes.summary_size, config)

    @property
    def answers(self) -> list[str]:
        """The possible answers, in the order of their classes."""
        return self.answer_list.answers

    @property
    def needs(self) -> tuple[Ability, ...]:
        words = (Ability.WORD_TABLE,) if self.config.initialise_from_words else ()
        return (Ability.SUMMARY_OF_QUESTION, *words)

    @classmethod
    def upgrade(cls, task: dict[str, Any], data: dict[str, Any]) -> None:
        """How saved features are read was an option of the reader."""
        options = data.setdefault("config", {})
        data["mirror_precomputed"] = options.pop("mirror_precomputed", False)
        data["mean_image_feature"] = options.pop("mean_image_feature", True)

    @classmethod
    def spell_answer(cls, answer: str) -> str:
        """As BAN's tool for answer vocabularies."""
        return vocabulary_answer(answer)

    @classmethod
    def official_answer(cls, line: str) -> str:
        """Through the punctuation step of the official evaluation (official VL-BERT code)."""
        return line if line == UNKNOWN else strip_punctuation(line)

    def wording(self, writer: TextWriter) -> VQAWording:
        writer.require_room(writer.layout.question)
        return VQAWording(writer, self.answer_list)

    def question(self, question: Question) -> Sample:
        """A user's question about an image; without boxes the detector proposes them."""
        return question.plain_sample("A question of VQA")

    @torch.no_grad()
    def initialise(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Rows of the last Linear from the encoder's word embeddings; an answer without wordpieces keeps its row.

        Raises:
            ValueError: words and summary have different widths.
        """
        if not self.config.initialise_from_words:
            return
        table, width = encoder.get_input_embeddings().weight, self.head.output.in_features
        if table.shape[1] != width:
            raise ValueError(
                f"The encoder's words have the width {table.shape[1]} and the head {width}, so answers cannot start "
                "from words; set task.config.initialise_from_words to false."
            )
        for row, answer in enumerate(self.answers):
            pieces = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(answer))
            if pieces:
                self.head.output.weight[row] = table[pieces].mean(dim=0)

    def check_data(self, facts: DataFacts, detector: Detector) -> None:
        """Log how many questions have no answer that is in the list.

        They do not contribute to the softmax loss, and mean "none of these" to the binary one.

        Raises:
            ValueError: no question has one.
        """
        given = [truth.answers for truth in facts.truths() if isinstance(truth, HumanAnswers)]
        without = sum(self.answer_list.most_frequent(answers) < 0 for answers in given)
        if not without:
            return
        if without == len(given):
            raise ValueError(
                f"Not one of the {len(given)} training questions has an answer among the {len(self.answers)} possible "
                "ones; set task.config.answers to the list of these data, or leave it out to have one built."
            )
        share = without / len(given)
        logger.log(
            logging.WARNING if share > MANY_UNKNOWN else logging.INFO,
            "%d of %d training questions (%.1f %%) have no answer among the %d possible ones (task.config.answers).",
            *(without, len(given), 100 * share, len(self.answers)),
        )

    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the answers of M texts.

        Returns:
            `logits` float32 [M, Y], and the loss `vqa` if the answers are known. Its count is the number of texts
            ("binary") or of texts with a known answer ("softmax").
        """
        logits = at_least_float32(self.head(encoded.summary))
        losses = {}
        if batch.targets is not None and batch.targets.scores is not None:
            losses["vqa"] = self._loss(logits, batch.targets)
        return TaskOutput(losses=losses, logits=logits)

    def _loss(self, logits: Float[Tensor, "M Y"], targets: VQATargets) -> Loss:
        if self.config.loss == "binary":
            total = F.binary_cross_entropy_with_logits(logits, targets.scores.to(logits), reduction="sum")
            return Loss(total=total, count=logits.new_tensor(float(len(logits))))
        total = F.cross_entropy(logits, targets.best, ignore_index=-1, reduction="sum")
        return Loss(total=total, count=(targets.best >= 0).sum().to(logits.dtype))

    def predict(self, batch: Batch, output: ModelOutput) -> Records:
        """Add to each record `answer`, its `score` and `top_answers` [[answer, score], ...], best first.

        Scores are sigmoids of the logits; with the softmax loss shares among all answers.
        """
        logits = output.task.logits
        shares = logits.sigmoid() if self.config.loss == "binary" else logits.softmax(dim=1)
        unknown = torch.tensor([answer == UNKNOWN for answer in self.answers], device=logits.device)
        number = min(self.config.top_answers, len(self.answers) - int(unknown.sum()))
        best = logits.masked_fill(unknown, -torch.inf).topk(number, dim=1).indices
        predictions = []
        for record, *found in zip(batch.records, best.tolist(), shares.gather(1, best).tolist(), strict=True):
            top = [[self.answers[answer], score] for answer, score in zip(*found, strict=True)]
            predictions.append(record | {"answer": top[0][0], "score": top[0][1], "top_answers": top})
        return predictions

    def correct(self, record: dict[str, Any]) -> float | None:
        """The official accuracy of one prediction, 0 to 1; None for a question without human answers."""
        if record.get("answers") is None:
            return None
        return answer_accuracy(record["answer"], record["answers"])

    def metrics(self, records: Records) -> dict[str, float]:
        """The official accuracy, over all and by type of answer and question; see `e2e_vl.evaluation.vqa`."""
        return vqa_metrics(records)

    def describe(self, record: dict[str, Any]) -> PredictionWords:
        """The question with its type, the best answer, and what people said, the most frequent answer first."""
        said = Counter(record.get("answers") or ())
        return PredictionWords(
            record["question"],
            record["answer"],
            record["score"],
            record.get("multiple_choice_answer") or next(iter(said), ""),
            "people said: " + ", ".join(f"{answer} ({count})" for answer, count in said.most_common()) if said else "",
            record.get("question_type") or "",
        )

    def write_submission(self, path: Path, records: Records, second: Records | None = None) -> None:
        """The result file of the VQA server: a JSON list of {"question_id", "answer"}."""
        write_submission(path, records)

    def ranked(self, record: dict[str, Any]) -> list[tuple[str, float]]:
        """The best `top_answers` answers with their scores."""
        return [(answer, score) for answer, score in record["top_answers"]]
