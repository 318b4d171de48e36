"""Classes of objects that a detector found in the regions (LXMERT, section 3.1.2): what is in each region?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.errors import UserError
from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.converter import check_choice
from e2e_vl.hiding import HidingRule
from e2e_vl.samples import DataFacts
from e2e_vl.structures import Batch, EncoderOutput, RegionLabels, TextRegions, at_least_float32
from e2e_vl.targets import Targets
from e2e_vl.tasks.heads import start_head
from e2e_vl.tasks.objectives.base import Objective, ObjectiveConfig, ObjectiveOutput, Sizes, WordHead

OF_REGIONS = ("all", "masked")


@dataclasses.dataclass(frozen=True)
class ObjectLabelsConfig(ObjectiveConfig):
    """The defaults follow the official code, whose weight is 1 / 0.15; its name for this loss is Obj."""

    name = "object_labels"
    classes: int = 1600  # K, without a background; 1600 for Visual Genome's objects
    # "all": every region, masked or not (official code). "masked": those that are to be predicted (paper).
    regions: Literal["all", "masked"] = "all"
    confidence: bool = True  # the loss of a region counts as much as the detector was sure of its label

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.key("regions"), self.regions, OF_REGIONS)


class ObjectLabels(Objective):
    """A Linear on the transformed state of a region; cross entropy with what the detector found, mean over regions.

    The mean is over all real regions with `regions: all`, and over the masked ones with `regions: masked`.
    """

    predicts_regions = True
    transforms_regions = True
    kind: ClassVar[str] = "classes"  # for messages
    config: ObjectLabelsConfig

    def __init__(self, sizes: Sizes, config: ObjectLabelsConfig):
        super().__init__(sizes, config)
        self.output = nn.Linear(sizes.hidden_size, config.classes)
        start_head([self.output], "normal")

    def check(self, facts: DataFacts | None, detector: Detector, rule: HidingRule) -> None:
        """Raises ValueError unless a detector that labels regions has the objective's classes."""
        if rule.teacher != "file" and detector.num_classes != self.config.classes:
            raise UserError(
                f"{self.config.key('classes')} is {self.config.classes}, but the detector has {detector.num_classes} "
                "classes; make them agree."
            )

    def found(self, labels: RegionLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Labels of the candidate boxes, and how sure the detector was."""
        return labels.found_classes, labels.found_scores

    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: WordHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [regions, K]; none where a user hides regions, which nobody labels.

        Raises:
            ValueError: regions without labels, or with a class that the objective does not have.
        """
        is_used, truth, sure = self._labels(batch, regions)
        logits = at_least_float32(self.output(encoded.regions[is_used]))
        each = F.cross_entropy(logits, truth, reduction="none")
        if sure is not None:
            each = each * sure.to(each.dtype)
        loss = Loss(self.config.weight * each.sum(), each.new_tensor(float(len(each))))
        return ObjectiveOutput(loss, is_used.nonzero()[:, 0], logits.argmax(dim=1) == truth, logits)

    def _labels(
        self, batch: Batch, regions: TextRegions
    ) -> tuple[Bool[Tensor, "M R"], Int64[Tensor, " labelled_regions"], Float[Tensor, " labelled_regions"] | None]:
        is_used = regions.row >= 0
        if self.config.regions == "masked":
            is_used = is_used & regions.gather(batch.hidden.is_labelled, fill=False)
        classes, scores = self.found(batch.region_labels)
        if classes is None and batch.hide is not None:
            is_used = torch.zeros_like(is_used)
            return is_used, is_used.new_zeros(0, dtype=torch.int64), None
        if classes is None or (self.config.confidence and scores is None):
            raise UserError(
                f"The regions come without the {self.kind} that a detector found in them"
                f"{'' if classes is None else ', or without their scores'}; {self._remedy}, or set "
                f"{self.config.key('weight')} to 0."
            )
        truth = regions.gather(classes, fill=0)[is_used]
        if len(truth) and int(truth.max()) >= self.config.classes:
            raise UserError(
                f"A region has the label {int(truth.max())} among the {self.kind}, but {self.config.key('classes')} is "
                f"{self.config.classes}; make them agree."
            )
        return is_used, truth, regions.gather(scores, fill=0.0)[is_used] if self.config.confidence else None

    @property
    def _remedy(self) -> str:
        return f"use region features that were extracted with {self.kind}, or a detector that finds them"
