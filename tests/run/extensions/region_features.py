"""Region feature regression: which feature did the detector give a hidden region when it saw the whole image?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from detector.structures import Loss
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TextRegions, at_least_float32
from e2e_vl.targets import Targets
from e2e_vl.tasks.base import init_head
from e2e_vl.tasks.config import ObjectiveConfig
from e2e_vl.tasks.objectives.base import MLMHead, Objective, ObjectiveOutput, PretrainingPrediction, Sizes


class RegionFeaturesConfig(ObjectiveConfig, frozen=True):
    """The weight is 0 unless a run asks for it, so that other runs stay as they are."""

    near: float = 10.0  # squared distance below which a feature counts as found


class RegionFeatures(Objective):
    """A Linear and the squared distance, mean over the labelled regions."""

    needs = (Ability.MASKED_REGIONS,)
    predicts_regions = True
    config: RegionFeaturesConfig

    def __init__(self, sizes: Sizes, config: RegionFeaturesConfig):
        super().__init__(sizes, config)
        self.output = nn.Linear(sizes.hidden_size, sizes.feature_dim)
        init_head([self.output], "normal")

    @override
    def forward(
        self, targets: Targets, batch: Batch, regions: TextRegions, encoded: EncoderOutput, word_head: MLMHead
    ) -> ObjectiveOutput:
        """Its logits are the features, float32 [labelled regions, width of a feature]."""
        chosen = regions.gather(batch.masking.masked_regions.is_labelled, fill=False)
        truth = regions.gather(batch.region_labels.features, fill=0.0)[chosen]
        found = at_least_float32(self.output(encoded.regions[chosen]))
        each = (found - truth).square().mean(dim=1)
        loss = Loss(self.config.weight * each.sum(), each.new_tensor(float(len(each))))
        return ObjectiveOutput(loss, chosen.nonzero()[:, 0], each < self.config.near, found)

    @override
    def answer(self, output: ModelOutput, logits: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
        return {"feature_norms": logits.norm(dim=1).tolist()}

    @override
    def answer_lines(self, prediction: PretrainingPrediction) -> list[str]:
        return [f"length of the hidden feature: {value:.3f}" for value in prediction.metadata["feature_norms"]]
