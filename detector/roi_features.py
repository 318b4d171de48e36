"""Features of RoIs: what describes a region to a vision-and-language encoder, and what the box predictor reads.

Shape legend
    J  RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    D  width of a region feature
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class RoIFeatures(NamedTuple):
    """Two features of each RoI; they are one tensor wherever the region feature is the predictor's input."""

    region: Float[Tensor, "J D"]
    predictor: Float[Tensor, "J head_dim"]  # input of the box predictor

    def apply(self, function: Callable[[Tensor], Tensor]) -> RoIFeatures:
        """The same function on both; computed once where both are one tensor."""
        region = function(self.region)
        return RoIFeatures(region, region if self.predictor is self.region else function(self.predictor))

    def split(self, counts: list[int]) -> list[RoIFeatures]:
        """The rows in parts of `counts` rows."""
        regions = self.region.split(counts)
        predictors = regions if self.predictor is self.region else self.predictor.split(counts)
        return [RoIFeatures(*pair) for pair in zip(regions, predictors, strict=True)]

    @staticmethod
    def join(parts: Sequence[RoIFeatures]) -> RoIFeatures:
        """The rows of all parts."""
        region = torch.cat([part.region for part in parts])
        if all(part.predictor is part.region for part in parts):
            return RoIFeatures(region, region)
        return RoIFeatures(region, torch.cat([part.predictor for part in parts]))
