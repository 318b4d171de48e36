"""Objectives on regions: masked region classification, object and attribute labels, and feature regression.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from detector.errors import UserError
from detector.structures import Detector, Loss
from e2e_vl.predictions import MaskedRegion
from e2e_vl.samples import DatasetInfo
from e2e_vl.structures import Ability, Batch, DetectedLabels, EncoderOutput, ModelOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets
from e2e_vl.tasks.base import Transform, init_head
from e2e_vl.tasks.config import (
    AttributeLabelsConfig,
    MaskedRegionsConfig,
    ObjectLabelsConfig,
    PretrainingConfig,
    RegionFeaturesConfig,
)
from e2e_vl.tasks.objectives.base import (
    MLMHead,
    Objective,
    ObjectiveOutput,
    PretrainingPrediction,
    Sizes,
    classified,
    format_ranked,
    top_classes,
)

# Masked RoI classification with linguistic clues (VL-BERT, section 3.3)


class MaskedRegions(Objective):
    """Classifies the masked regions; cross entropy with the teacher's classes, averaged over the labelled regions.

    The head is Linear, GELU, Linear. Class distributions whose sum differs from 1 by 0.1 or more are ignored, as in the
    official code.
    """

    needs = (Ability.MASKED_REGIONS,)
    predicts_regions = True
    config: MaskedRegionsConfig

    def __init__(self, sizes: Sizes, config: MaskedRegionsConfig):
        super().__init__(sizes, config)
        self.transform = Transform(sizes.hidden_size)
        self.output = nn.Linear(sizes.hidden_size, config.classes)
        init_head((self.transform["dense"], self.output), "normal")

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        _check_classes(self.config, detector, masking, detector.num_classes + 1, "classes and the background")

    def classify(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*shape C"]:
        """Return the float32 logits of the classes for states of regions."""
        return at_least_float32(self.output(self.transform(states)))

    @override
    def forward(
        self, targets: Targets, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Classify the labelled regions with a usable distribution; the logits are float32 [labelled regions, C]."""
        is_labelled = text_regions.gather(batch.masking.masked_regions.is_labelled, fill=False)
        class_probs = batch.region_labels.class_probs
        if class_probs is None:
            class_probs = [rows.new_zeros(len(rows), self.config.classes) for rows in batch.boxes]
        probabilities = text_regions.gather(class_probs, fill=0.0)
        if probabilities.shape[2] != self.config.classes:
            raise UserError(
                f"The class distributions have {probabilities.shape[2]} columns, but {self.config.key('classes')} is "
                f"{self.config.classes}; make them agree."
            )
        is_usable = (probabilities.sum(dim=2) - 1).abs() < 0.1
        index = (is_labelled & is_usable).nonzero(as_tuple=True)
        probabilities = probabilities[index]
        logits = self.classify(encoded.regions[index])
        best = probabilities.argmax(dim=1)
        losses = None
        if self.config.labels == "distribution":
            losses = -(probabilities.to(logits.dtype) * logits.log_softmax(dim=1)).sum(dim=1)
        return classified(self.config.weight, index, logits, best, losses)

    @override
    def class_names(self, output: ModelOutput, wordpieces: Sequence[str], masking: PretrainingConfig) -> Sequence[str]:
        """Return C names; without known names, the classes are numbered from 0."""
        names = output.class_names
        num_classes = self.config.classes - 1  # without the background
        if names is None or len(names) != num_classes or masking.teacher == "file":
            names = [f"class {number}" for number in range(num_classes)]
        if masking.has_background_last:
            return [*names, "background"]
        return ["background", *names]

    @override
    def answer(self, output: ModelOutput, logits: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `masked_regions`: the boxes that the user masked, with the best classes of each.

        `seen` is the teacher's best class of the unmasked region.
        """
        batch = output.batch
        text_regions = output.text_regions
        is_masked = batch.masking.masked_regions.is_masked[0]
        if int(text_regions.is_masked[0].sum()) < int(is_masked.sum()):
            raise UserError(
                "Text and regions together are longer than task.config.max_length, and a masked region is truncated; "
                "shorten the text, or mask fewer regions."
            )
        masked_states = output.encoded.regions[0, text_regions.is_masked[0]]
        classes = top_classes(self.classify(masked_states).softmax(dim=1), names)
        original_boxes = batch.boxes[0] / batch.images.scales[0].repeat(2).to(is_masked.device)
        boxes = original_boxes[is_masked].tolist()
        seen_classes = [None] * len(boxes)
        class_probs = batch.region_labels.class_probs
        if class_probs is not None:
            seen_classes = [ranked[0] for ranked in top_classes(class_probs[0][is_masked], names)]
        masked_regions = []
        for box, ranked, seen in zip(boxes, classes, seen_classes, strict=True):
            masked_regions.append(MaskedRegion(tuple(box), ranked, seen))
        return {"masked_regions": masked_regions}

    @override
    def answer_lines(self, prediction: PretrainingPrediction) -> list[str]:
        lines = []
        for number, region in enumerate(prediction.masked_regions, start=1):
            seen = "" if region.seen is None else f" (unmasked: {format_ranked([region.seen])})"
            lines.append(f"masked region {number}: {format_ranked(region.classes)}{seen}")
        return lines


def _check_classes(
    config: MaskedRegionsConfig | ObjectLabelsConfig,
    detector: Detector,
    masking: PretrainingConfig,
    number: int,
    what: str,
) -> None:
    """Raise a UserError if a detector labels the regions with another number of classes than the objective has."""
    if masking.teacher != "file" and number != config.classes:
        raise UserError(
            f"{config.key('classes')} is {config.classes}, the detector has {detector.num_classes} {what}; change one."
        )


# Detected-label classification (LXMERT, section 3.1.2)


class ObjectLabels(Objective):
    """Predicts the detector's class of each region with a Linear on the transformed region states.

    The cross entropy is averaged over all candidate boxes with `regions: all`, and over the masked ones with
    `regions: masked`.
    """

    predicts_regions = True
    transforms_regions = True
    kind: ClassVar[str] = "classes"  # for error messages
    config: ObjectLabelsConfig

    def __init__(self, sizes: Sizes, config: ObjectLabelsConfig):
        super().__init__(sizes, config)
        self.output = nn.Linear(sizes.hidden_size, config.classes)
        init_head([self.output], "normal")

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        _check_classes(self.config, detector, masking, detector.num_classes, "classes")

    def labels_and_scores(self, detected: DetectedLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Return the detector's labels of the candidate boxes, and their confidence."""
        return detected.classes, detected.scores

    @override
    def forward(
        self, targets: Targets, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Classify the regions; the logits are float32 [regions, K].

        Where a user masks regions there are none, because these have no labels.
        """
        is_used = text_regions.row >= 0
        if self.config.regions == "masked":
            is_used = is_used & text_regions.gather(batch.masking.masked_regions.is_labelled, fill=False)
        classes, scores = self.labels_and_scores(batch.region_labels.detected)
        if classes is None and batch.masking.boxes_to_mask is not None:
            is_used = torch.zeros_like(is_used)
            classes = scores = [rows.new_zeros(len(rows), dtype=torch.int64) for rows in batch.boxes]
        if classes is None or (self.config.confidence and scores is None):
            with_scores = "" if classes is None else " with scores"
            raise UserError(
                f"The regions have no detected {self.kind}{with_scores}; use region "
                f"features that were extracted with {self.kind}, or a detector that predicts them, or set "
                f"{self.config.key('weight')} to 0."
            )
        index = is_used.nonzero(as_tuple=True)
        truth = text_regions.gather(classes, fill=0)[index]
        logits = at_least_float32(self.output(encoded.regions[index]))
        losses = F.cross_entropy(logits, truth, reduction="none")
        if self.config.confidence:
            losses = losses * text_regions.gather(scores, fill=0)[index].to(losses.dtype)
        return classified(self.config.weight, index, logits, truth, losses)


# Attribute classification (LXMERT's official code)


class AttributeLabels(ObjectLabels):
    """As `ObjectLabels`, for the most probable attribute of each region."""

    kind: ClassVar[str] = "attributes"
    config: AttributeLabelsConfig

    @override
    def check(self, info: DatasetInfo | None, detector: Detector, masking: PretrainingConfig) -> None:
        """Do not check the number of attributes, because it is not part of the detector's interface."""

    @override
    def labels_and_scores(self, detected: DetectedLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        return detected.attributes, detected.attribute_scores


# RoI-feature regression (LXMERT, section 3.1.2)


class RegionFeatureRegression(Objective):
    """Predicts the features of masked regions with a Linear on the transformed region states.

    The targets are the detector's features of the unmasked regions. A prediction counts as right if it is closer to the
    target than the zero vector is.
    """

    predicts_regions = True
    transforms_regions = True
    config: RegionFeaturesConfig

    def __init__(self, sizes: Sizes, config: RegionFeaturesConfig):
        super().__init__(sizes, config)
        self.output = nn.Linear(sizes.hidden_size, sizes.feature_dim)
        init_head([self.output], "normal")

    @override
    def forward(
        self, targets: Targets, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Predict the features of the masked regions: `logits`, float32 [masked regions, D]."""
        is_masked = text_regions.gather(batch.masking.masked_regions.is_labelled, fill=False)
        index = is_masked.nonzero(as_tuple=True)
        logits = at_least_float32(self.output(encoded.regions[index]))
        features = batch.region_labels.features
        if features is None:
            raise UserError(
                "There are no features of unmasked regions to predict; set task.config.teacher to frozen or current, "
                f"use saved features, or set {self.config.key('weight')} to 0."
            )
        truth = text_regions.gather(features, fill=0.0)[index].detach().to(logits.dtype)
        if self.config.loss == "smooth_l1":
            losses = F.smooth_l1_loss(logits, truth, reduction="none").mean(dim=1)
        else:
            losses = F.mse_loss(logits, truth, reduction="none").mean(dim=1)
        is_counted = is_masked if self.config.average == "masked" else text_regions.row >= 0
        loss = Loss(self.config.weight * losses.sum(), is_counted.sum().to(losses.dtype))
        is_near = (logits - truth).norm(dim=1) < truth.norm(dim=1)
        return ObjectiveOutput(loss, index[0], is_near, logits)
