"""Masked RoI classification with linguistic clues (VL-BERT, section 3.3): what is in the hidden regions?

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.errors import UserError
from detector.interface import Detector
from detector.structures import Loss
from e2e_vl.hiding import HidingRule
from e2e_vl.samples import DataFacts
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets
from e2e_vl.tasks.heads import Transform, start_head
from e2e_vl.tasks.objectives.base import (
    Choice,
    Objective,
    ObjectiveConfig,
    ObjectiveOutput,
    Sizes,
    WordHead,
    best_columns,
    listed,
)


@dataclasses.dataclass(frozen=True)
class MaskedRegionsConfig(ObjectiveConfig):
    """The defaults follow the official code."""

    name = "masked_regions"
    weight: float = 1.0
    classes: int = 1601  # C; 1601 for Visual Genome's
    # "distribution": the whole class distribution (official code). "class": its best class (paper).
    labels: Literal["distribution", "class"] = "distribution"


class MaskedRegions(Objective):
    """Linear, GELU, Linear to the region classes; cross entropy with the teacher's classes, mean over labelled regions.

    Rows of class distributions that do not add up to 1 (by 0.1 or more) are ignored, as in the official code.
    """

    needs = (Ability.HIDDEN_REGIONS,)
    predicts_regions = True
    config: MaskedRegionsConfig

    def __init__(self, sizes: Sizes, config: MaskedRegionsConfig):
        super().__init__(sizes, config)
        self.transform = Transform(sizes.hidden_size)
        self.output = nn.Linear(sizes.hidden_size, config.classes)
        start_head((self.transform["dense"], self.output), "normal")

    def check(self, facts: DataFacts | None, detector: Detector, rule: HidingRule) -> None:
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
        chosen = regions.gather(batch.hidden.is_labelled, fill=False)
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
        self, targets: Targets, output: ModelOutput, logits: Tensor, wordpieces: Sequence[str], rule: HidingRule
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
        self, output: ModelOutput, logits: Tensor, tokenizer: PreTrainedTokenizerBase, rule: HidingRule
    ) -> dict[str, Any]:
        """`hidden`: a dict per hidden region with its `box` (xyxy, pixels of the original image), `classes`
        [[name, probability], ...], best first, and `seen`, the same pair from the detector that sees it (None: no
        detector does).

        Raises:
            ValueError: the sequence was cut before a hidden region.
        """
        batch, regions = output.batch, output.text_regions
        is_hidden = batch.hidden.is_hidden[0]
        if int(regions.is_hidden[0].sum()) < int(is_hidden.sum()):
            raise UserError(
                "Text and regions together are longer than task.config.max_length, and a hidden region is cut off; "
                "shorten the text, or hide fewer regions."
            )
        shares = self.classify(output.encoded.regions[0, regions.is_hidden[0]]).softmax(dim=1)
        scales = batch.images.scales[0]
        boxes = (batch.boxes[0] / torch.cat([scales, scales]))[is_hidden].tolist()
        known = batch.region_labels.class_probs
        names = self._class_names(output.class_names, rule)

        def best_classes(rows: Tensor) -> list[list[list[Any]]]:
            return [[[names[number], share] for number, share in row] for row in best_columns(rows)]

        seen = [None] * len(boxes) if known is None else [best for best, *_ in best_classes(known[0][is_hidden])]
        return {
            "hidden": [
                {"box": box, "classes": classes, "seen": whole}
                for box, classes, whole in zip(boxes, best_classes(shares), seen, strict=True)
            ]
        }

    def _class_names(self, names: Sequence[str] | None, rule: HidingRule) -> list[str]:
        """C names; the detector's classes are numbered from 0 where their names are unknown."""
        count = self.config.classes - 1
        if names is None or len(names) != count or rule.teacher == "file":
            names = [f"class {row}" for row in range(count)]
        return ["background", *names] if rule.background_first else [*names, "background"]

    def lines(self, record: dict[str, Any]) -> list[str]:
        lines = []
        for number, region in enumerate(record["hidden"], start=1):
            seen = "" if region["seen"] is None else f" (not hidden: {listed([region['seen']])})"
            lines.append(f"hidden region {number}: {listed(region['classes'])}{seen}")
        return lines
