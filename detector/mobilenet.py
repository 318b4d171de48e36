"""Torchvision's MobileNetV3 with a feature pyramid, as the trunk of the built-in detector.

The network is torchvision's own (Howard et al., ICCV 2019; `mobilenet_backbone` in its `backbone_utils.py`), with its
names `backbone.body.*` and `backbone.fpn.*`. Its maps are called "0", "1" and "pool". The first two have the same
stride, 32, so that torchvision pools every RoI from map "0"; the proposals come from all three.
"""

from __future__ import annotations

from torch import nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN, mobilenet_backbone
from torchvision.ops import FrozenBatchNorm2d

from detector.config_groups import ResNetConfig
from detector.norms import freeze

STAGES = 6  # that torchvision counts; FREEZE_AT n freezes the first n, and trainable_backbone_layers is 6 - n
NORM_LAYERS = {"FrozenBN": FrozenBatchNorm2d, "BN": nn.BatchNorm2d}


def make_mobilenet(config: ResNetConfig) -> BackboneWithFPN:
    """The trunk with random weights. Of the settings, it reads `freeze_at` and `norm` ("FrozenBN" or "BN")."""
    trunk = mobilenet_backbone(
        backbone_name="mobilenet_v3_large",
        weights=None,
        fpn=True,
        norm_layer=NORM_LAYERS[config.norm],
        trainable_layers=STAGES - config.freeze_at,
    )
    for block in trunk.body.children():
        if not any(parameter.requires_grad for parameter in block.parameters()):
            freeze(block)  # torchvision leaves batch norms that learn in frozen blocks
    return trunk
