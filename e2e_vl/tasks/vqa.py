"""Visual question answering (VQA v2): a class per possible answer, predicted at the [MASK] of the answer.

Reads `batch.texts.positions["mask"]`, and of `batch.records` "answers", the strings that people answered (none in
splits without annotations: then there is no loss). A data set that knows the scores of the task's answers itself may
give them as `batch.targets["answer_scores"]`, float32 [M, A], instead. The list of possible answers belongs to the task
and is saved with it.

Shape legend
    M   texts in the batch
    A   possible answers
    H   hidden size of the encoder
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.evaluation.vqa import (
    UNKNOWN,
    answer_accuracy,
    normalise_answer,
    soft_scores,
    vqa_metrics,
    write_submission,
)
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.tasks.base import NewLayers, Task, check_dropout, check_new_layers, start_head

MANY_UNKNOWN = 0.5  # share of questions that is worth a warning
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class VQAConfig:
    """The defaults are those of the official VL-BERT code.

    Attributes:
        answers: the possible answers, the position in the list is the class. In settings also a file, see
            `e2e_vl.data.vqa_files.read_answers`; None = `data.files.answers`, or else built from the annotations of
            the training split. Of an answer that is listed twice the first counts; `<unk>` is never a target and never
            predicted.
        min_answer_count: a list built from annotations holds what is the most frequent answer to at least so many
            questions; 9 gives the usual 3,129 answers of VQA v2's train and val.
        dropout: dropout before the last Linear.
        loss: "binary": a binary cross entropy per answer with soft targets, summed over the answers (official).
            "softmax": a cross entropy with the most frequent answer as truth (paper, section 4.2.2); texts without a
            known answer are left out.
        normalised_targets: count normalised human answers for the targets; False counts raw strings (official).
        initialise_from_words: each row of the last Linear starts as the mean word embedding of its answer's wordpieces
            (official).
        new_layers: start of the head's Linears, "official" (Xavier) or "normal" (paper), see
            `e2e_vl.tasks.base.start_head`.
        top_answers: how many of the best answers a prediction lists.
    """

    answers: list[str] | str | None = None
    min_answer_count: int = 9
    dropout: float = 0.1
    loss: Literal["binary", "softmax"] = "binary"
    normalised_targets: bool = False
    initialise_from_words: bool = True
    new_layers: NewLayers = "official"
    top_answers: int = 5

    def __post_init__(self) -> None:
        if self.loss not in ("binary", "softmax"):
            raise ValueError(f'The VQA loss is "{self.loss}"; it must be "binary" or "softmax".')
        check_new_layers(self.new_layers)
        check_dropout("dropout", self.dropout)
        if self.min_answer_count < 1 or self.top_answers < 1:
            raise ValueError("min_answer_count and top_answers must be at least 1.")


class AnswerHead(nn.Module):
    """Linear + GELU + LayerNorm (BERT's masked-word transform), dropout, Linear: [M, H] -> [M, A]."""

    def __init__(self, hidden_size: int, num_answers: int, dropout: float, new_layers: NewLayers = "official"):
        super().__init__()
        self.transform = nn.ModuleDict(
            {"dense": nn.Linear(hidden_size, hidden_size), "norm": nn.LayerNorm(hidden_size, eps=1e-12)}
        )
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_answers)
        start_head((self.transform["dense"], self.output), new_layers)

    def forward(self, states: Tensor) -> Tensor:
        states = self.transform["norm"](F.gelu(self.transform["dense"](states)))
        return self.output(self.dropout(states))


class VQATask(Task):
    """A score per possible answer, from the output state of [MASK]; the highest is the answer.

    Raises:
        ValueError: `config.answers` is not a list (the engine reads files) or lists nothing but `<unk>`.
    """

    writes_submission = True

    def __init__(self, hidden_size: int, config: VQAConfig):
        super().__init__()
        if not isinstance(config.answers, Sequence) or isinstance(config.answers, str):
            raise ValueError("VQATask needs the list of possible answers in its config.")
        self.config = config
        self.answers = [str(answer) for answer in config.answers]
        self.class_of: dict[str, int] = {}
        for number, answer in enumerate(self.answers):
            if answer != UNKNOWN:
                self.class_of.setdefault(answer, number)
        if not self.class_of:
            raise ValueError("The list of possible answers is empty.")
        self.head = AnswerHead(hidden_size, len(self.answers), config.dropout, config.new_layers)

    @torch.no_grad()
    def initialise(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Rows of the last Linear from the encoder's word embeddings; an answer without wordpieces keeps its row."""
        if not self.config.initialise_from_words:
            return
        table = encoder.get_input_embeddings().weight
        for row, answer in enumerate(self.answers):
            pieces = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(answer))
            if pieces:
                self.head.output.weight[row] = table[pieces].mean(dim=0)

    def check_data(self, dataset: Any, detector: Detector) -> None:
        """Log how many of `dataset.questions` have no answer (`answers`) that is in the list.

        They teach nothing with the softmax loss and "none of these" with the binary one.

        Raises:
            ValueError: none has.
        """
        given = [getattr(question, "answers", None) for question in getattr(dataset, "questions", [])]
        given = [answers for answers in given if answers is not None]
        without = sum(self._most_frequent(answers) < 0 for answers in given)
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
            `logits` float32 [M, A], and the loss `vqa` if the records have answers. Its count is the number of texts
            ("binary") or of texts with a known answer ("softmax").

        Raises:
            ValueError: some records of the batch have answers and others have not.
        """
        mask = batch.texts.positions["mask"]
        states = encoded.text[torch.arange(len(mask), device=mask.device), mask]
        logits = self.head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # losses never in half precision
        losses = {}
        if "answer_scores" in batch.targets:
            scores = batch.targets["answer_scores"].to(logits)
            losses["vqa"] = self._loss(logits, scores, scores.argmax(dim=1).masked_fill(scores.amax(dim=1) <= 0, -1))
        elif (answers := self._human_answers(batch)) is not None:
            truth = torch.tensor([self._most_frequent(given) for given in answers], device=logits.device)
            losses["vqa"] = self._loss(logits, self.soft_targets(answers).to(logits), truth)
        return TaskOutput(losses=losses, logits=logits)

    def _loss(self, logits: Tensor, scores: Tensor, truth: Tensor) -> Loss:
        """Of soft targets [M, A] or of one right class each, int64 [M] (-1 = none), as configured."""
        if self.config.loss == "binary":
            total = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum")
            return Loss(total=total, count=logits.new_tensor(float(len(logits))))
        total = F.cross_entropy(logits, truth, ignore_index=-1, reduction="sum")
        return Loss(total=total, count=(truth >= 0).sum().to(logits.dtype))

    @staticmethod
    def _human_answers(batch: Batch) -> list[Sequence[str]] | None:
        answers = [record.get("answers") for record in batch.records]
        if all(given is None for given in answers):
            return None
        if any(given is None for given in answers):
            raise ValueError("A batch cannot mix questions with and without answers; use splits of one kind.")
        return answers

    def soft_targets(self, answers: Sequence[Sequence[str]]) -> Tensor:
        """Target of every possible answer from the human answers to M questions, float32 [M, A] on the CPU.

        See `e2e_vl.evaluation.vqa.soft_scores`; answers that are not in the list are left out, so a row may be zero.
        """
        targets = torch.zeros(len(answers), len(self.answers))
        for row, given in enumerate(answers):
            for answer, score in soft_scores(given, normalised=self.config.normalised_targets).items():
                if answer in self.class_of:
                    targets[row, self.class_of[answer]] = score
        return targets

    def _most_frequent(self, answers: Sequence[str]) -> int:
        """Class of the most frequent known answer (of several the one given first); -1 if none is known."""
        if self.config.normalised_targets:
            answers = [normalise_answer(answer) for answer in answers]
        known = Counter(self.class_of[answer] for answer in answers if answer in self.class_of)
        return known.most_common(1)[0][0] if known else -1

    def predict(self, batch: Batch, output: ModelOutput) -> list[dict[str, Any]]:
        """Add to each record `answer`, its `score` and `top_answers` [[answer, score], ...], best first.

        Scores are sigmoids of the logits; with the softmax loss shares among all answers.
        """
        logits = output.task.logits
        shares = logits.sigmoid() if self.config.loss == "binary" else logits.softmax(dim=1)
        unknown = torch.tensor([answer == UNKNOWN for answer in self.answers], device=logits.device)
        number = min(self.config.top_answers, len(self.answers) - int(unknown.sum()))
        best = logits.masked_fill(unknown, -torch.inf).topk(number, dim=1).indices
        predictions = []
        for row, (classes, scores) in enumerate(zip(best.tolist(), shares.gather(1, best).tolist(), strict=True)):
            top = [[self.answers[answer], score] for answer, score in zip(classes, scores, strict=True)]
            answer = {"answer": top[0][0], "score": top[0][1], "top_answers": top}
            predictions.append({**(batch.records[row] if batch.records else {}), **answer})
        return predictions

    def correct(self, record: dict[str, Any]) -> float | None:
        """The official accuracy of one prediction, 0 to 1; None for a question without human answers."""
        if record.get("answers") is None:
            return None
        return answer_accuracy(record["answer"], record["answers"])

    def metrics(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """The official accuracy, over all and by type of answer and question; see `e2e_vl.evaluation.vqa`."""
        return vqa_metrics(records)

    def write_submission(
        self, path: Path, records: list[dict[str, Any]], second: list[dict[str, Any]] | None = None
    ) -> None:
        """The result file of the VQA server: a JSON list of {"question_id", "answer"}."""
        write_submission(path, records)

    def answer_lines(self, record: dict[str, Any]) -> list[str]:
        """The best answers with their scores."""
        return [f"{score:.3f}  {answer}" for answer, score in record["top_answers"]]
