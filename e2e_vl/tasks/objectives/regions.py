"""Objectives on regions: classes of masked regions, classes and attributes of all, and features of masked ones.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from detector.errors import UserError
from detector.structures import Detector, Loss
from e2e_vl.examples import Targets
from e2e_vl.predictions import MaskedRegion
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import DatasetInfo
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, RegionLabels, TextRegions, at_least_float32
from e2e_vl.tasks.base import Transform, init_head
from e2e_vl.tasks.config import AttributeLabelsConfig, MaskedRegionsConfig, ObjectLabelsConfig, RegionFeaturesConfig
from e2e_vl.tasks.objectives.base import (
    MLMHead,
    Objective,
    ObjectiveOutput,
    PretrainingPrediction,
    Sizes,
    classified,
    listed,
    top_classes,
)

# Masked RoI classification with linguistic clues (VL-BERT, section 3.3): what is in the masked regions?


class MaskedRegions(Objective):
    """Linear, GELU, Linear to the region classes; cross entropy with the teacher's classes, mean over labelled regions.

    Rows of class distributions that do not add up to 1 (by 0.1 or more) are ignored, as in the official code.
    """

    needs = (Ability.MASKED_REGIONS,)
    predicts_regions = True
    config: MaskedRegionsConfig

    def __init__(self, sizes: Sizes, config: MaskedRegionsConfig):
        super().__init__(sizes, config)
        self.transform = Transform(sizes.hidden_size)
        self.output = nn.Linear(sizes.hidden_size, config.classes)
        init_head((self.transform["dense"], self.output), "normal")

    def check(self, info: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        _check_classes(self.config, detector, rule, detector.num_classes + 1, "classes and the background")

    def classify(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*shape C"]:
        """States -> logits."""
        return at_least_float32(self.output(self.transform(states)))

    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [labelled regions, C]."""
        chosen = regions.gather(batch.masked_regions.is_labelled, fill=False)
        class_probs = batch.region_labels.class_probs
        if class_probs is None:
            class_probs = [rows.new_zeros(len(rows), self.config.classes) for rows in batch.boxes]
        probabilities = regions.gather(class_probs, fill=0.0)[chosen]
        if probabilities.shape[1] != self.config.classes:
            raise UserError(
                f"The class distributions have {probabilities.shape[1]} columns, but {self.config.key('classes')} is "
                f"{self.config.classes}; make them agree."
            )
        usable = (probabilities.sum(dim=1) - 1).abs() < 0.1
        chosen, probabilities = chosen.masked_scatter(chosen, usable), probabilities[usable]
        logits = self.classify(encoded.regions[chosen])
        best = probabilities.argmax(dim=1)
        losses = None
        if self.config.labels == "distribution":
            losses = -(probabilities.to(logits.dtype) * logits.log_softmax(dim=1)).sum(dim=1)
        return classified(self.config.weight, chosen, logits, best, losses)

    def class_names(self, output: ModelOutput, wordpieces: Sequence[str], rule: RegionMasking) -> Sequence[str]:
        """C names; the detector's classes are numbered from 0 where their names are unknown."""
        names, count = output.class_names, self.config.classes - 1
        if names is None or len(names) != count or rule.teacher == "file":
            names = [f"class {row}" for row in range(count)]
        return ["background", *names] if rule.background_first else [*names, "background"]

    def answer(self, output: ModelOutput, logits: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`masked_regions`, see `MaskedRegion`."""
        batch, regions = output.batch, output.text_regions
        is_masked = batch.masked_regions.is_masked[0]
        if int(regions.is_masked[0].sum()) < int(is_masked.sum()):
            raise UserError(
                "Text and regions together are longer than task.config.max_length, and a masked region is truncated; "
                "shorten the text, or mask fewer regions."
            )
        classes = top_classes(self.classify(output.encoded.regions[0, regions.is_masked[0]]).softmax(dim=1), names)
        boxes = (batch.boxes[0] / batch.images.scales[0].repeat(2))[is_masked].tolist()
        seen, class_probs = [None] * len(boxes), batch.region_labels.class_probs
        if class_probs is not None:
            seen = [row[0] for row in top_classes(class_probs[0][is_masked], names)]
        return {
            "masked_regions": [MaskedRegion(tuple(box), *row) for box, *row in zip(boxes, classes, seen, strict=True)]
        }

    def lines(self, prediction: PretrainingPrediction) -> list[str]:
        lines = []
        for number, region in enumerate(prediction.masked_regions, start=1):
            seen = "" if region.seen is None else f" (unmasked: {listed([region.seen])})"
            lines.append(f"masked region {number}: {listed(region.classes)}{seen}")
        return lines


def _check_classes(
    config: MaskedRegionsConfig | ObjectLabelsConfig, detector: Detector, rule: RegionMasking, number: int, what: str
) -> None:
    """Raise a UserError unless a detector that labels regions has the objective's classes."""
    if rule.teacher != "file" and number != config.classes:
        raise UserError(
            f"{config.key('classes')} is {config.classes}, but the detector has {detector.num_classes} {what}; make "
            "them agree."
        )


# Classes of objects that a detector found in the regions (LXMERT, section 3.1.2): what is in each region?


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
        init_head([self.output], "normal")

    def check(self, info: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        _check_classes(self.config, detector, rule, detector.num_classes, "classes")

    def found(self, labels: RegionLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Labels of the candidate boxes, and how sure the detector was."""
        return labels.detected_classes, labels.detected_scores

    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [regions, K]; none where a user masks regions, which have no labels."""
        is_used = regions.row >= 0
        if self.config.regions == "masked":
            is_used = is_used & regions.gather(batch.masked_regions.is_labelled, fill=False)
        classes, scores = self.found(batch.region_labels)
        if classes is None and batch.boxes_to_mask is not None:
            is_used = torch.zeros_like(is_used)
            classes = scores = [rows.new_zeros(len(rows), dtype=torch.int64) for rows in batch.boxes]
        if classes is None or (self.config.confidence and scores is None):
            raise UserError(
                f"The regions come without the {self.kind} that a detector found in them"
                f"{'' if classes is None else ', or without their scores'}; use region features that were extracted "
                f"with {self.kind}, or a detector that finds them, or set {self.config.key('weight')} to 0."
            )
        truth = regions.gather(classes, fill=0)[is_used]
        logits = at_least_float32(self.output(encoded.regions[is_used]))
        losses = F.cross_entropy(logits, truth, reduction="none")
        if self.config.confidence:
            losses = losses * regions.gather(scores, fill=0)[is_used].to(losses.dtype)
        return classified(self.config.weight, is_used, logits, truth, losses)


# Attributes that a detector found in the regions (LXMERT's official code): what is each region like?


class AttributeLabels(ObjectLabels):
    """As `ObjectLabels`, with the most probable attribute."""

    kind: ClassVar[str] = "attributes"
    config: AttributeLabelsConfig

    def check(self, info: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """A detector does not say how many attributes it has."""

    def found(self, labels: RegionLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        return labels.detected_attributes, labels.detected_attribute_scores


# Regression of the features of masked regions (LXMERT, section 3.1.2): what would the detector say of a region?


class RegionFeatureRegression(Objective):
    """A Linear on the transformed state of a masked region; the target is its feature as the detector sees it unmasked.

    A region counts as found if the prediction is nearer to its feature than zeros are.
    """

    predicts_regions = True
    transforms_regions = True
    config: RegionFeaturesConfig

    def __init__(self, sizes: Sizes, config: RegionFeaturesConfig):
        super().__init__(sizes, config)
        self.output = nn.Linear(sizes.hidden_size, sizes.feature_dim)
        init_head([self.output], "normal")

    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Its logits are the predicted features, float32 [masked regions, D]."""
        is_masked = regions.gather(batch.masked_regions.is_labelled, fill=False)
        logits = at_least_float32(self.output(encoded.regions[is_masked]))
        features = batch.region_labels.features
        if features is None:
            raise UserError(
                "There is no feature of the unmasked regions to learn; set task.config.teacher to frozen or current, "
                f"use saved features, or set {self.config.key('weight')} to 0."
            )
        truth = regions.gather(features, fill=0.0)[is_masked].detach().to(logits.dtype)
        error = F.smooth_l1_loss if self.config.loss == "smooth_l1" else F.mse_loss
        each = error(logits, truth, reduction="none").mean(dim=1)
        counted = is_masked if self.config.average == "masked" else regions.row >= 0
        loss = Loss(self.config.weight * each.sum(), counted.sum().to(each.dtype))
        is_near = (logits - truth).norm(dim=1) < truth.norm(dim=1)
        return ObjectiveOutput(loss, is_masked.nonzero()[:, 0], is_near, logits)
