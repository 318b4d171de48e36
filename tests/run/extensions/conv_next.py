"""A backbone: a small ConvNeXt of torchvision (three stages, layer norms) under a feature pyramid, p2 .. p5."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.convnext import CNBlock, CNBlockConfig, ConvNeXt
from typing_extensions import override

from detector.backbones.base import Backbone, Block
from detector.backbones.fpn import FPN
from detector.backbones.layers import freeze
from detector.config import DetectorConfig, FPNSpec, MapShape
from detector.structures import FeatureMaps

MAPS = {"res2": MapShape(8, 4), "res3": MapShape(16, 8), "res4": MapShape(32, 16)}


class ConvNeXtFPNSpec(FPNSpec):
    """The stem, with res2, and the stages after it: four that FREEZE_AT can freeze. There are no batch norms."""

    max_freeze_at = 4
    norms = ("FrozenBN",)  # the default: the setting is not read

    @override
    def bottom_up_maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        return MAPS


class ConvNeXtBlock(Block, CNBlock):
    """torchvision's block, which can be compiled and recomputed."""


class SmallConvNeXt(Backbone):
    """A stem, and res2 .. res4, each of them but the first with a convolution that halves the map."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
        network = ConvNeXt(settings, layer_scale=1.0, num_classes=1, block=ConvNeXtBlock)
        self.stem, self.res2, halving3, stage3, halving4, stage4 = network.features
        self.res3 = nn.Sequential(halving3, stage3)
        self.res4 = nn.Sequential(halving4, stage4)
        self.freeze_stages(config.resnet.freeze_at)

    @override
    def freeze_stages(self, count: int) -> None:
        for name in ("stem", *MAPS)[:count]:
            freeze(getattr(self, name))

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        maps = {}
        x = self.stem(pixels)
        for name in MAPS:
            x = maps[name] = getattr(self, name)(x)
        return maps


class ConvNeXtFPN(FPN):
    """A feature pyramid on the small ConvNeXt."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config, SmallConvNeXt(config), MAPS)
