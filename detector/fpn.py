"""Feature pyramid network (Lin et al., CVPR 2017, section 3), with Detectron2's names and arithmetic.

Shape legend
    N     images in the batch
    H, W  height and width of the padded batch, pixels of the network input
    h, w  height and width of a feature map, cells
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN, mobilenet_backbone
from torchvision.ops import FrozenBatchNorm2d

from detector.config import DetectorConfig, ResNetConfig
from detector.resnet import ConvNorm, ResNet, freeze
from detector.structures import FeatureMaps


class FPN(nn.Module):
    """Levels p2, p3, ... of equal width on top of a ResNet, and one more level above them (p6).

    Names are `bottom_up.*`, `fpn_lateral2`, `fpn_output2`, ...; the number of a level is log2 of its stride.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.in_features = config.fpn.in_features
        self.is_average = config.fpn.fuse_type == "avg"
        self.out_features = tuple(config.map_shapes)  # one more than `in_features`
        self.levels = self.out_features[:-1]  # those with a lateral convolution
        self.bottom_up = ResNet(config.resnet)
        width, norm = config.fpn.out_channels, config.fpn.norm
        for level, name in zip(self.levels, self.in_features, strict=True):
            lateral = ConvNorm(config.resnet.shapes[name].channels, width, 1, norm=norm)
            output = ConvNorm(width, width, 3, norm=norm, padding=1)
            for conv in (lateral, output):
                nn.init.kaiming_uniform_(conv.weight, a=1)
            self.add_module(f"fpn_lateral{level[1:]}", lateral)
            self.add_module(f"fpn_output{level[1:]}", output)

    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        """All levels, finest first. H and W are multiples of the stride of the last input map."""
        bottom_up = self.bottom_up(pixels)
        maps = {}
        x = None
        for level, name in reversed(list(zip(self.levels, self.in_features, strict=True))):
            lateral = getattr(self, f"fpn_lateral{level[1:]}")(bottom_up[name])
            if x is None:
                x = lateral
            else:
                x = lateral + F.interpolate(x, scale_factor=2.0, mode="nearest")
                x = x / 2 if self.is_average else x
            maps[level] = getattr(self, f"fpn_output{level[1:]}")(x)
        maps[self.out_features[-1]] = F.max_pool2d(maps[self.levels[-1]], kernel_size=1, stride=2)
        return {level: maps[level] for level in self.out_features}


# Torchvision's MobileNetV3 with a feature pyramid, as the trunk of the built-in detector.


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
