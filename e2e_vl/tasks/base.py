"""What every task is: a head on the encoder's output with its loss, its predictions and the metric that scores them."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn
from transformers import PreTrainedTokenizerBase

from detector.interface import Detector
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions

NewLayers = Literal["official", "normal"]
STD_OF_NEW_LAYERS = 0.02  # VL-BERT, section 4.1, as in BERT


def check_new_layers(kind: str) -> None:
    """Raises ValueError for a kind that `start_head` does not know."""
    if kind not in ("official", "normal"):
        raise ValueError(f'task.config.new_layers is "{kind}"; it must be "official" or "normal".')


def check_dropout(name: str, value: float) -> None:
    """Raises ValueError, naming the key `task.config.<name>`, unless the dropout is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"task.config.{name} is {value}; a dropout must be at least 0 and below 1.")


def start_head(linears: Iterable[nn.Linear], kind: NewLayers) -> None:
    """Start values of a fine-tuning head; all biases are zero.

    Args:
        linears: its layers.
        kind: "official": Xavier uniform weights, as in the official VL-BERT code. "normal": N(0, 0.02), which the paper
            says of all new layers.
    """
    for linear in linears:
        if kind == "official":
            nn.init.xavier_uniform_(linear.weight)
        else:
            nn.init.normal_(linear.weight, std=STD_OF_NEW_LAYERS)
        nn.init.zeros_(linear.bias)


class Task(nn.Module, abc.ABC):
    """batch + encoder output -> losses, predictions and their metric. Works with any encoder that gives what it reads.

    Each task is built as `Task(hidden_size, config)` with a config dataclass of its own, and documents which keys of
    `batch.targets` and `batch.records` it reads.
    """

    points_at_box: ClassVar[bool] = False  # `predict` answers a phrase with `box`, `score` and their candidates
    writes_submission: ClassVar[bool] = False  # there is a file that a server or the literature expects
    # `key=value` settings under which a second run predicts the other half of that file; None: one run is enough
    second_run: ClassVar[tuple[str, ...] | None] = None

    def prepare(self, batch: Batch, detector: Detector) -> Batch:
        """Change a batch before the detector sees it; nothing by default. Pre-training hides regions here."""
        return batch

    def prepare_asked(self, batch: Batch, detector: Detector) -> Batch:
        """As `prepare`, for one text of a user (`e2e_vl/data/asked.py`): nothing is drawn at random."""
        return batch

    def initialise(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Take starting values from the other parts; nothing by default.

        Called once when a model is built, after the starting weights of detector and encoder were loaded.
        """

    def check_data(self, dataset: Any, detector: Detector) -> None:
        """Check once, before training, that the data have what the task learns from; nothing by default.

        Args:
            dataset: the training data. A task may look at what data sets of its kind offer, if they have it.
            detector: that of the run.

        Raises:
            ValueError: an objective has nothing to learn from, or the two do not fit.
        """

    @abc.abstractmethod
    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Losses (where the batch has targets) and logits, the same in training and in evaluation.

        Args:
            batch: M texts with their targets.
            regions: the texts' regions, padded to [M, R].
            encoded: what the encoder made of them.
        """

    @abc.abstractmethod
    def predict(self, batch: Batch, output: ModelOutput) -> list[dict[str, Any]]:
        """One plain, JSON-able record per text: the batch's record plus the prediction; boxes in original pixels."""

    def answer(self, batch: Batch, output: ModelOutput, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The prediction for one text of a user, by default as in `predict`."""
        return self.predict(batch, output)[0]

    @abc.abstractmethod
    def correct(self, record: dict[str, Any]) -> float | None:
        """How right one prediction is, 0 to 1; what `metrics` averages and reports show. None: nobody knows."""

    @abc.abstractmethod
    def metrics(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """Score the records that `predict` returned for a whole split."""

    def write_submission(
        self, path: Path, records: list[dict[str, Any]], second: list[dict[str, Any]] | None = None
    ) -> None:
        """Write the predictions of a whole split in the format that the task's server or the literature expects.

        Args:
            path: the file.
            records: what `predict` returned, in the order of the data set.
            second: the same of the second run, for a task that has `second_run`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no submission file.")

    def joint_metrics(self, records: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, float]:
        """Scores that need both runs, where the split has labels; for a task that has `second_run`."""
        return {}

    def answer_lines(self, record: dict[str, Any]) -> list[str]:
        """One prediction for people, the answer first; nothing where the task answers no text."""
        return []
