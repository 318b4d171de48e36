"""Regression of the features of masked regions (LXMERT, section 3.1.2): what would the detector say of a region?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from detector.errors import UserError
from detector.structures import Loss
from e2e_vl.converter import check_choice
from e2e_vl.structures import Batch, EncoderOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets
from e2e_vl.tasks.heads import start_head
from e2e_vl.tasks.objectives.base import Objective, ObjectiveConfig, ObjectiveOutput, Sizes, WordHead


@dataclasses.dataclass(frozen=True)
class RegionFeaturesConfig(ObjectiveConfig):
    """The defaults follow the official code, whose weight is 1 / 0.15; its name for this loss is Feat."""

    name = "region_features"
    # mean over the D numbers of a feature. "smooth_l1": with beta 1 (official code). "l2": squared differences (paper).
    loss: Literal["smooth_l1", "l2"] = "smooth_l1"
    # what the sum over the masked regions is divided by. "all": the number of all regions (official code). "masked":
    # the number of masked ones.
    average: Literal["all", "masked"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.key("loss"), self.loss, ("smooth_l1", "l2"))
        check_choice(self.key("average"), self.average, ("all", "masked"))


class RegressedFeatures(Objective):
    """A Linear on the transformed state of a masked region; the target is its feature as the detector sees it unmasked.

    A region counts as found if the prediction is nearer to its feature than zeros are.
    """

    predicts_regions = True
    transforms_regions = True
    config: RegionFeaturesConfig

    def __init__(self, sizes: Sizes, config: RegionFeaturesConfig):
        super().__init__(sizes, config)
        self.output = nn.Linear(sizes.hidden_size, sizes.feature_dim)
        start_head([self.output], "normal")

    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: WordHead
    ) -> ObjectiveOutput:
        """Its logits are the predicted features, float32 [masked regions, D].

        Raises:
            ValueError: neither saved features nor a detector gives the target.
        """
        is_masked = regions.gather(batch.hidden.is_labelled, fill=False)
        logits = at_least_float32(self.output(encoded.regions[is_masked]))
        known = batch.region_labels.features
        if known is None:
            raise UserError(
                "There is no feature of the unmasked regions to learn; set task.config.teacher to frozen or current, "
                f"use saved features, or set {self.config.key('weight')} to 0."
            )
        truth = regions.gather(known, fill=0.0)[is_masked].detach().to(logits.dtype)
        error = F.smooth_l1_loss if self.config.loss == "smooth_l1" else F.mse_loss
        each = error(logits, truth, reduction="none").mean(dim=1)
        counted = is_masked if self.config.average == "masked" else regions.row >= 0
        loss = Loss(self.config.weight * each.sum(), counted.sum().to(each.dtype))
        return ObjectiveOutput(loss, is_masked.nonzero()[:, 0], self._is_near(logits, truth), logits)

    @staticmethod
    def _is_near(logits: Tensor, truth: Tensor) -> Tensor:
        return (logits - truth).norm(dim=1) < truth.norm(dim=1)
