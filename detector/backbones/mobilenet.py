"""torchvision's MobileNetV3 with a feature pyramid. Shape legend: see `detector/structures.py`."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import mobilenet_backbone
from typing_extensions import override

from detector.backbones.base import Backbone
from detector.backbones.layers import FrozenBatchNorm2d, freeze
from detector.config import DetectorConfig
from detector.structures import FeatureMaps

STAGES = 6  # that torchvision can freeze


class MobileNetFPN(Backbone):
    """torchvision's MobileNetV3 (large) with a feature pyramid and random weights.

    Of the settings, only `MODEL.RESNETS.NORM` (FrozenBN or BN) and FREEZE_AT (how many of torchvision's 6 stages are
    frozen) are used. Keys are `body.*` and `fpn.*`, as in torchvision. It has no `Block`.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        norms = {"FrozenBN": FrozenBatchNorm2d, "BN": nn.BatchNorm2d}
        trunk = mobilenet_backbone(
            backbone_name="mobilenet_v3_large",
            weights=None,
            fpn=True,
            norm_layer=norms[config.resnet.norm],
            trainable_layers=STAGES,
        )
        self.body = trunk.body
        self.fpn = trunk.fpn
        self.freeze_stages(config.resnet.freeze_at)

    @override
    def freeze_stages(self, count: int) -> None:
        blocks = list(self.body.children())
        # as in torchvision, a stage begins at a block that halves the map (`_is_cn`: it makes a map of the C's)
        starts = [0]
        for number, block in enumerate(blocks):
            if getattr(block, "_is_cn", False):
                starts.append(number)
        starts.append(len(blocks) - 1)
        for block in blocks[: starts[count]]:
            freeze(block)

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        """Return the maps 0, 1 and pool."""
        return self.fpn(self.body(pixels))
