"""VCR: which of four answers, or of four rationales, is right?

The texts of a batch come in fours: the choices of one question. Reads `batch.targets["is_right"]`, float [M], 1 for the
right choice of each four, and `batch.region_targets["object_class"]`, N x int64 [R], classes of the candidate boxes
from 1 on. The encoder must have a pooler (`with_pooler`).

Shape legend
    M   texts in the batch, four per question
    Q   questions, M / 4
    R   regions of the text with the most regions
    H   hidden size of the encoder
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.evaluation.vcr import join_predictions, joint_metrics, write_submission
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextRegions
from e2e_vl.tasks.base import NewLayers, Task, check_dropout, check_new_layers, start_head

CHOICES = 4
NO_POOLER = "VCR reads the pooled state; set encoder.config.with_pooler to true."
LOSSES = ("sigmoid", "softmax")


@dataclasses.dataclass
class VCRConfig:
    """The defaults are those of the official VL-BERT code.

    Attributes:
        dropout: on the pooled state, before the Linear that scores a choice.
        loss: "sigmoid": a binary cross entropy per choice, mean over all choices (official). "softmax": a cross entropy
            over the four choices (paper, section 4.2.1).
        region_loss_weight: weight of the classification of regions; 0 leaves it out.
        num_classes: classes of regions, the whole image (class 0) included.
        region_dropout: dropout between the two Linears of that classification.
        initializer_range: standard deviation of their start values.
        new_layers: start of the Linear that scores a choice, "official" (Xavier) or "normal" (paper), see
            `e2e_vl.tasks.base.start_head`.
    """

    dropout: float = 0.1
    loss: str = "sigmoid"
    region_loss_weight: float = 1.0
    num_classes: int = 81
    region_dropout: float = 0.0
    initializer_range: float = 0.02
    new_layers: NewLayers = "official"

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"task.config.loss is {self.loss!r}; it must be one of {', '.join(LOSSES)}.")
        check_new_layers(self.new_layers)
        check_dropout("dropout", self.dropout)
        check_dropout("region_dropout", self.region_dropout)
        if self.region_loss_weight < 0:
            raise ValueError(f"task.config.region_loss_weight is {self.region_loss_weight}; it must not be negative.")


class ChoiceHead(nn.Module):
    """Dropout and a Linear: [M, H] -> [M]."""

    def __init__(self, hidden_size: int, dropout: float, new_layers: NewLayers = "official"):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, 1)
        start_head((self.output,), new_layers)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.output(self.dropout(pooled)).squeeze(-1)


class RegionClassifier(nn.Module):
    """Linear + GELU, dropout, Linear: [..., H] -> [..., classes]."""

    def __init__(self, hidden_size: int, num_classes: int, dropout: float, std: float):
        super().__init__()
        self.transform = nn.ModuleDict({"dense": nn.Linear(hidden_size, hidden_size)})
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_classes)
        for linear in (self.transform["dense"], self.output):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, regions: Tensor) -> Tensor:
        return self.output(self.dropout(F.gelu(self.transform["dense"](regions))))


class VCRTask(Task):
    """A score per choice from the pooled state; beside it, every region is classified from its output state."""

    writes_submission = True
    second_run = ("data.config.condition_on=each",)  # rationales, given each of the four answers

    def __init__(self, hidden_size: int, config: VCRConfig | None = None):
        super().__init__()
        self.config = config or VCRConfig()
        self.head = ChoiceHead(hidden_size, self.config.dropout, self.config.new_layers)
        self.region_classifier = None
        if self.config.region_loss_weight > 0:
            self.region_classifier = RegionClassifier(
                hidden_size, self.config.num_classes, self.config.region_dropout, self.config.initializer_range
            )

    def initialise(self, tokenizer: PreTrainedTokenizerBase, encoder: nn.Module, detector: Detector) -> None:
        """Raises ValueError if the encoder says that it has no pooler."""
        if not getattr(encoder.config, "with_pooler", True):
            raise ValueError(NO_POOLER)

    def check_data(self, dataset: Any, detector: Detector) -> None:
        """The data's options `class_names` and `mask_size` must fit the region classifier and the detector's maps."""
        options = getattr(dataset, "options", None)
        names, side = (getattr(options, name, None) for name in ("class_names", "mask_size"))
        if self.region_classifier is not None and names is not None and len(names) >= self.config.num_classes:
            raise ValueError(
                f"task.config.num_classes is {self.config.num_classes}, but the data have {len(names)} classes and the "
                f"whole image is one more; set it to {len(names) + 1}."
            )
        map_size = getattr(detector, "map_size", None)
        if side is not None and map_size is not None and side != map_size:
            raise ValueError(
                f"data.config.mask_size is {side}, but the detector's last RoI maps are {map_size} x {map_size}; set "
                f"data.config.mask_size={map_size}."
            )

    def forward(self, batch: Batch, regions: TextRegions, encoded: EncoderOutput) -> TaskOutput:
        """Score the four choices of Q questions.

        Returns:
            `logits` float32 [Q, 4]; the loss `choice` if the batch has labels (count: choices with "sigmoid", questions
            with "softmax"), and with it `region_class`, already weighted (count: regions of all texts).

        Raises:
            ValueError: an encoder without a pooler, texts that do not come in fours, or a class beyond `num_classes`.
        """
        if encoded.pooled is None:
            raise ValueError(NO_POOLER)
        if len(batch) % CHOICES:
            raise ValueError(f"VCR's texts come in fours, one per choice; this batch has {len(batch)} texts.")
        scores = self.head(encoded.pooled)
        logits = scores.to(torch.promote_types(scores.dtype, torch.float32)).view(-1, CHOICES)
        losses = {}
        if "is_right" in batch.targets:
            losses["choice"] = self._choice_loss(logits, batch.targets["is_right"].view(-1, CHOICES))
            if self.region_classifier is not None:
                losses["region_class"] = self._region_loss(batch, regions, encoded.regions)
        return TaskOutput(losses=losses, logits=logits)

    def _choice_loss(self, logits: Tensor, is_right: Tensor) -> Loss:
        if self.config.loss == "sigmoid":
            total = F.binary_cross_entropy_with_logits(logits, is_right.to(logits.dtype), reduction="sum")
            return Loss(total=total, count=total.new_tensor(float(logits.numel())).detach())
        total = F.cross_entropy(logits, is_right.argmax(dim=1), reduction="sum")
        return Loss(total=total, count=total.new_tensor(float(len(logits))).detach())

    def _region_loss(self, batch: Batch, regions: TextRegions, states: Tensor) -> Loss:
        """Every region of every text counts, the whole image as class 0."""
        kept = regions.attend
        classes = regions.gather(batch.region_targets["object_class"], fill=0)[kept]
        if len(classes) and int(classes.max()) >= self.config.num_classes:
            raise ValueError(
                f"A region has the class {int(classes.max())}, but task.config.num_classes is "
                f"{self.config.num_classes}, the whole image included; set it to the number of classes plus one."
            )
        scores = self.region_classifier(states[kept])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        total = F.cross_entropy(scores, classes, reduction="sum") * self.config.region_loss_weight
        return Loss(total=total, count=kept.sum().to(total.dtype))

    def predict(self, batch: Batch, output: ModelOutput) -> list[dict[str, Any]]:
        """One record per question: those of its texts plus `probabilities` (four, softmax) and `choice`.

        The softmax is that of the official code, whichever loss was trained.
        """
        probabilities = output.task.logits.softmax(dim=1).tolist()
        best = output.task.logits.argmax(dim=1).tolist()
        records = batch.records[::CHOICES] if batch.records else [{} for _ in best]
        return [
            {**record, "probabilities": shares, "choice": choice}
            for record, shares, choice in zip(records, probabilities, best, strict=True)
        ]

    def correct(self, record: dict[str, Any]) -> float | None:
        """1 if the right choice was made, 0 if not; None where the right one is unknown (test split)."""
        return None if record["label"] is None else float(record["choice"] == record["label"])

    def metrics(self, records: list[dict[str, Any]]) -> dict[str, float]:
        """`accuracy` over the questions with a label, `accuracy/<family>` where records have a family.

        Whether it is the accuracy of Q->A or of QA->R is the data's `question`. Without any label there is no accuracy.
        """
        labelled = [record for record in records if record["label"] is not None]
        scores: dict[str, list[float]] = defaultdict(list)
        for record in labelled:
            scores["accuracy"].append(self.correct(record))
            if "family" in record:
                scores[f"accuracy/{record['family']}"].append(self.correct(record))
        return {name: sum(values) / len(values) for name, values in sorted(scores.items())}

    def write_submission(
        self, path: Path, records: list[dict[str, Any]], second: list[dict[str, Any]] | None = None
    ) -> None:
        """The leaderboard's CSV of 21 columns: answers, and rationales given each answer (`second`)."""
        write_submission(path, join_predictions(records, second or []))

    def joint_metrics(self, records: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, float]:
        """ "Q->A", "QA->R" and "Q->AR"; empty without labels."""
        return {} if any(record["label"] is None for record in records) else joint_metrics(records, second)

    def answer_lines(self, record: dict[str, Any]) -> list[str]:
        """The choices with their probabilities, best first."""
        ranked = sorted(zip(record["probabilities"], record["choices"], strict=True), key=lambda pair: -pair[0])
        return [f"{probability:.3f}  {choice}" for probability, choice in ranked]
