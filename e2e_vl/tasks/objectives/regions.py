"""Masked RoI classification with linguistic clues (VL-BERT, section 3.3): what is in the hidden regions?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.structures import Detector, Loss
from e2e_vl.examples import Targets
from e2e_vl.predictions import HiddenRegion
from e2e_vl.region_masking import RegionMasking
from e2e_vl.samples import DatasetInfo
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, RegionLabels, TextRegions, at_least_float32
from e2e_vl.tasks.base import Transform, start_head
from e2e_vl.tasks.config import AttributeLabelsConfig, MaskedRegionsConfig, ObjectLabelsConfig, RegionFeaturesConfig
from e2e_vl.tasks.objectives.base import (
    Choice,
    Objective,
    ObjectiveOutput,
    PretrainingPrediction,
    Sizes,
    WordHead,
    best_columns,
    listed,
)


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
        start_head((self.transform["dense"], self.output), "normal")

    def check(self, facts: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """Raises ValueError unless a detector that labels regions has the objective's classes."""
        if rule.teacher != "file" and detector.num_classes + 1 != self.config.classes:
            raise UserError(
                f"task.config.objectives.masked_regions.classes is {self.config.classes}, but the detector has "
                f"{detector.num_classes} classes and the background; make them agree."
            )

    def classify(self, states: Float[Tensor, "*shape E"]) -> Float[Tensor, "*shape C"]:
        """States -> logits."""
        return at_least_float32(self.output(self.transform(states)))

    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: WordHead
    ) -> ObjectiveOutput:
        """Its logits are float32 [labelled regions, C].

        Raises:
            ValueError: class distributions of another width.
        """
        is_usable, probabilities = self._labels(batch, regions)
        logits = self.classify(encoded.regions[is_usable])
        best = probabilities.argmax(dim=1)
        if self.config.labels == "class":
            each = F.cross_entropy(logits, best, reduction="none")
        else:
            each = -(probabilities.to(logits.dtype) * logits.log_softmax(dim=1)).sum(dim=1)
        loss = Loss(self.config.weight * each.sum(), each.new_tensor(float(len(each))))
        return ObjectiveOutput(loss, is_usable.nonzero()[:, 0], logits.argmax(dim=1) == best, logits)

    def _labels(
        self, batch: Batch, regions: TextRegions
    ) -> tuple[Bool[Tensor, "M R"], Float[Tensor, "labelled_regions C"]]:
        """The labelled regions whose class distributions can be used, and these distributions.

        Raises:
            ValueError: class distributions of another width.
        """
        chosen = regions.gather(batch.masked_regions.is_labelled, fill=False)
        known = batch.region_labels.class_probs
        if known is None:
            known = [rows.new_zeros(len(rows), self.config.classes) for rows in batch.boxes]
        probabilities = regions.gather(known, fill=0.0)[chosen]
        if probabilities.shape[1] != self.config.classes:
            raise UserError(
                f"The class distributions have {probabilities.shape[1]} columns, but "
                f"task.config.objectives.masked_regions.classes is {self.config.classes}; make them agree."
            )
        usable = (probabilities.sum(dim=1) - 1).abs() < 0.1
        return chosen.masked_scatter(chosen, usable), probabilities[usable]

    def choices(
        self, targets: Targets, output: ModelOutput, logits: Tensor, wordpieces: Sequence[str], rule: RegionMasking
    ) -> list[tuple[int, Choice]]:
        is_usable, probabilities = self._labels(output.batch, output.text_regions)
        names = self._class_names(output.class_names, rule)
        rows = zip(
            is_usable.nonzero().tolist(),
            logits.argmax(dim=1).tolist(),
            probabilities.argmax(dim=1).tolist(),
            strict=True,
        )
        return [(text, Choice(place, names[best], names[truth])) for (text, place), best, truth in rows]

    def answer(
        self, output: ModelOutput, logits: Tensor, tokenizer: PreTrainedTokenizerBase, rule: RegionMasking
    ) -> dict[str, Any]:
        """`hidden`, see `HiddenRegion`; the detector sees the regions unless nobody labels them.

        Raises:
            ValueError: the sequence was cut before a hidden region.
        """
        batch, regions = output.batch, output.text_regions
        is_masked = batch.masked_regions.is_masked[0]
        if int(regions.is_masked[0].sum()) < int(is_masked.sum()):
            raise UserError(
                "Text and regions together are longer than task.config.max_length, and a hidden region is cut off; "
                "shorten the text, or hide fewer regions."
            )
        names = self._class_names(output.class_names, rule)
        said = best_columns(self.classify(output.encoded.regions[0, regions.is_masked[0]]).softmax(dim=1), names)
        scales = batch.images.scales[0]
        boxes = (batch.boxes[0] / torch.cat([scales, scales]))[is_masked].tolist()
        known = batch.region_labels.class_probs
        seen = [None] * len(boxes) if known is None else [row[0] for row in best_columns(known[0][is_masked], names)]
        rows = zip(boxes, said, seen, strict=True)
        return {"hidden": [HiddenRegion(tuple(box), tuple(classes), best) for box, classes, best in rows]}

    def _class_names(self, names: Sequence[str] | None, rule: RegionMasking) -> list[str]:
        """C names; the detector's classes are numbered from 0 where their names are unknown."""
        count = self.config.classes - 1
        if names is None or len(names) != count or rule.teacher == "file":
            names = [f"class {row}" for row in range(count)]
        return ["background", *names] if rule.background_first else [*names, "background"]

    def lines(self, prediction: PretrainingPrediction) -> list[str]:
        lines = []
        for number, region in enumerate(prediction.hidden, start=1):
            seen = "" if region.seen is None else f" (not hidden: {listed([region.seen])})"
            lines.append(f"hidden region {number}: {listed(region.classes)}{seen}")
        return lines


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
        start_head([self.output], "normal")

    def check(self, facts: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """Raises ValueError unless a detector that labels regions has the objective's classes."""
        if rule.teacher != "file" and detector.num_classes != self.config.classes:
            raise UserError(
                f"{self.config.key('classes')} is {self.config.classes}, but the detector has {detector.num_classes} "
                "classes; make them agree."
            )

    def found(self, labels: RegionLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Labels of the candidate boxes, and how sure the detector was."""
        return labels.detected_classes, labels.detected_scores

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
            is_used = is_used & regions.gather(batch.masked_regions.is_labelled, fill=False)
        classes, scores = self.found(batch.region_labels)
        if classes is None and batch.boxes_to_mask is not None:
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


# Attributes that a detector found in the regions (LXMERT's official code): what is each region like?


class AttributeLabels(ObjectLabels):
    """As `ObjectLabels`, with the most probable attribute."""

    kind: ClassVar[str] = "attributes"
    config: AttributeLabelsConfig

    def check(self, facts: DatasetInfo | None, detector: Detector, rule: RegionMasking) -> None:
        """What a detector's attribute head has shows in the first batch."""

    def found(self, labels: RegionLabels) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """See `ObjectLabels.found`."""
        return labels.detected_attributes, labels.detected_attribute_scores


# Regression of the features of masked regions (LXMERT, section 3.1.2): what would the detector say of a region?


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
        is_masked = regions.gather(batch.masked_regions.is_labelled, fill=False)
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
