"""Feature pyramids with Detectron2's module and parameter names. Shape legend: see `detector/structures.py`."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from detector.backbones.base import Backbone, check_maps
from detector.backbones.layers import ConvNorm
from detector.backbones.resnet import ResNet
from detector.checkpoint import LoadReport
from detector.config import DetectorConfig, MapShape
from detector.structures import FeatureMaps


class Pyramid(Backbone):
    """A feature pyramid, whose stages and published weights are those of the network below it."""

    bottom_up: Backbone

    @override
    def freeze_stages(self, count: int) -> None:
        self.bottom_up.freeze_stages(count)

    @override
    def load_published_weights(self) -> LoadReport | None:
        return self.bottom_up.load_published_weights()


class FPN(Pyramid):
    """Feature pyramid network (Lin et al., CVPR 2017, section 3): levels p2, p3, ..., and one more above them (p6).

    All levels have the same number of channels. FREEZE_AT counts the stages of the bottom-up network.

    Keys are `bottom_up.*`, `fpn_lateral2.*`, `fpn_output2.*`, ...; the number of a level is log2 of its stride.
    """

    def __init__(self, config: DetectorConfig, bottom_up: Backbone, bottom_up_maps: dict[str, MapShape]) -> None:
        """Put levels on the maps of `bottom_up`, at least MODEL.FPN.IN_FEATURES; their shapes: `bottom_up_maps`."""
        super().__init__()
        self.in_features = config.fpn.in_features
        self.is_average = config.fpn.fuse_type == "avg"
        self.out_features = tuple(config.map_shapes)  # one level more than `in_features`
        self.levels = self.out_features[:-1]  # those with a lateral convolution
        self.bottom_up = bottom_up
        self.bottom_up_maps = {name: bottom_up_maps[name] for name in self.in_features}
        self.backbone_name = config.backbone
        width = config.fpn.out_channels
        norm = config.fpn.norm
        for level, name in zip(self.levels, self.in_features, strict=True):
            lateral = ConvNorm(bottom_up_maps[name].channels, width, 1, norm=norm)
            output = ConvNorm(width, width, 3, norm=norm, padding=1)
            for conv in (lateral, output):
                nn.init.kaiming_uniform_(conv.weight, a=1)
            self.add_module(f"fpn_lateral{level[1:]}", lateral)
            self.add_module(f"fpn_output{level[1:]}", output)

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        """Return all levels, finest first. H and W must be multiples of the stride of the last input map."""
        bottom_up = self.bottom_up(pixels)
        check_maps(bottom_up, self.bottom_up_maps, pixels, self.backbone_name)
        maps = {}
        x = None
        for level, name in reversed(list(zip(self.levels, self.in_features, strict=True))):
            lateral = getattr(self, f"fpn_lateral{level[1:]}")(bottom_up[name])
            if x is None:
                x = lateral
            else:
                x = lateral + F.interpolate(x, scale_factor=2.0, mode="nearest")
                if self.is_average:
                    x = x / 2
            maps[level] = getattr(self, f"fpn_output{level[1:]}")(x)
        maps[self.out_features[-1]] = F.max_pool2d(maps[self.levels[-1]], kernel_size=1, stride=2)
        return {level: maps[level] for level in self.out_features}


class ResNetFPN(FPN):
    """A feature pyramid on a ResNet."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config, ResNet(config), config.resnet.shapes)
