"""Box head on RoI maps: convolutions, then fully connected layers, named as Detectron2's `FastRCNNConvFCHead`.

Shape legend
    J  RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    S  side of a RoI map
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from detector.config_groups import BoxHeadConfig
from detector.resnet import ConvNorm
from detector.roi_features import RoIFeatures


class BoxHead(nn.Module):
    """NUM_CONV 3x3 convolutions (with norm and ReLU), then NUM_FC fully connected layers (with ReLU)."""

    def __init__(self, config: BoxHeadConfig, in_channels: int, side: int) -> None:
        """
        Args:
            in_channels: of the RoI maps.
            side: S.
        """
        super().__init__()
        self.region_feature = config.region_feature
        self.convs = [f"conv{number}" for number in range(1, config.num_conv + 1)]
        self.fcs = [f"fc{number}" for number in range(1, config.num_fc + 1)]
        channels = in_channels
        for name in self.convs:
            self.add_module(name, ConvNorm(channels, config.conv_dim, 3, norm=config.norm, padding=1))
            channels = config.conv_dim
        width = channels * side**2
        for name in self.fcs:
            layer = nn.Linear(width, config.fc_dim)
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)
            self.add_module(name, layer)
            width = config.fc_dim
        self.predictor_dim = width

    def forward(self, maps: Float[Tensor, "J channels S S"]) -> RoIFeatures:
        """Features of RoIs from their pooled (and masked) maps."""
        x = maps
        if self.convs:
            x = x.contiguous(memory_format=torch.channels_last)
        for name in self.convs:
            x = F.relu(getattr(self, name)(x))
        x = x.flatten(1)
        outputs = []
        for name in self.fcs:
            x = F.relu(getattr(self, name)(x))
            outputs.append(x)
        if self.region_feature == "mean":
            return RoIFeatures(maps.mean(dim=(2, 3)), x)
        chosen = {"fc6": 0, "fc7": 1, "head": -1}[self.region_feature]
        return RoIFeatures(outputs[chosen] if outputs else x, x)
