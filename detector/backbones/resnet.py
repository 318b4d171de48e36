"""ResNet with Detectron2's module and parameter names, and the res5 of a C4 RoI head.

Stage s has RES2_OUT_CHANNELS * 2 ** (s - 2) channels. Feature maps use the channels-last memory format, which makes
convolutions on CPU much faster. Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from detector.backbones.base import Backbone, Block
from detector.backbones.layers import ConvNorm, Pooling, freeze
from detector.config import STAGES, DetectorConfig, ResNetConfig
from detector.structures import FeatureMap, FeatureMaps

BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
ROI_BLOCKS = 3  # blocks of res5 in a RoI head, at every depth
FROZEN_BRANCH_SCALE = 0.2  # initial scale of residual branches with FrozenBN, see `ResidualBlock`


class BasicStem(nn.Module):
    """7x7 convolution with stride 2, then an optional 3x3 max pool with stride 2."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.pool = config.stem_pool
        self.conv1 = ConvNorm(3, config.stem_out_channels, 7, norm=config.norm, stride=2, padding=3)

    def forward(self, x: Float[Tensor, "N 3 H W"]) -> FeatureMap:
        """Return a map of H/4 x W/4 cells, or H/2 x W/2 without the pool."""
        x = F.relu_(self.conv1(x))
        if self.pool == "none":
            return x
        if self.pool == "caffe_max":
            return F.max_pool2d(x, kernel_size=3, stride=2, padding=0, ceil_mode=True)
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)


class ResidualBlock(Block):
    """The shortcut of both block types.

    Blocks apply to x, or to `pool(x, 1)` if `pool` is given.

    With FrozenBN nothing normalises the activations of a randomly initialised network, so its residual branches start
    at a smaller scale, which loaded weights replace. To train from scratch, use another norm.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.shortcut = (
            ConvNorm(in_channels, out_channels, 1, norm=norm, stride=stride) if in_channels != out_channels else None
        )


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions (ResNet-18 and -34)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: str) -> None:
        super().__init__(in_channels, out_channels, stride=stride, norm=norm)
        self.conv1 = ConvNorm(in_channels, out_channels, 3, norm=norm, stride=stride, padding=1)
        self.conv2 = ConvNorm(out_channels, out_channels, 3, norm=norm, padding=1)
        if norm == "FrozenBN":
            self.conv2.norm.weight.fill_(FROZEN_BRANCH_SCALE)

    @override
    def forward(self, x: Tensor, pool: Pooling | None = None) -> Tensor:
        if pool is not None:
            x = pool(x, 1)
        out = self.conv2(F.relu_(self.conv1(x)))
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


class BottleneckBlock(ResidualBlock):
    """1x1, 3x3, 1x1 convolutions. The stride is in the first 1x1 (MSRA, Caffe) or in the 3x3 (torchvision)."""

    def __init__(
        self, in_channels: int, out_channels: int, config: ResNetConfig, *, width: int, stride: int, dilation: int
    ) -> None:
        """Create the layers; `width` is the number of channels between the 1x1 convolutions."""
        norm = config.norm
        super().__init__(in_channels, out_channels, stride=stride, norm=norm)
        stride_1x1, stride_3x3 = (stride, 1) if config.stride_in_1x1 else (1, stride)
        options = {"stride": stride_3x3, "padding": dilation, "dilation": dilation, "groups": config.num_groups}
        self.conv1 = ConvNorm(in_channels, width, 1, norm=norm, stride=stride_1x1)
        self.conv2 = ConvNorm(width, width, 3, norm=norm, **options)
        self.conv3 = ConvNorm(width, out_channels, 1, norm=norm)
        if norm == "FrozenBN":
            self.conv3.norm.weight.fill_(FROZEN_BRANCH_SCALE)

    @override
    def forward(self, x: Tensor, pool: Pooling | None = None) -> Tensor:
        """Apply the block; 1x1 convolutions before `pool`, which must be linear, see `ConvNorm.forward_pooled`."""
        out = self.conv1(x) if pool is None else self.conv1.forward_pooled(x, pool)
        out = self.conv2(F.relu_(out))
        out = self.conv3(F.relu_(out))
        if self.shortcut is None:
            out += x if pool is None else pool(x, 1)
        else:
            out += self.shortcut(x) if pool is None else self.shortcut.forward_pooled(x, pool)
        return F.relu_(out)


class ResNet(Backbone):
    """Stem and the stages from res2 to the last of OUT_FEATURES, see `ResNetConfig`.

    Stages up to FREEZE_AT get no gradient, and their batch norms become FrozenBN.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        resnet = config.resnet
        self.out_features = resnet.out_features
        self.stages = STAGES[: STAGES.index(resnet.out_features[-1]) + 1]
        self.stem = BasicStem(resnet)
        for name in self.stages:
            self.add_module(name, _make_stage(resnet, name))
        self.freeze_stages(resnet.freeze_at)

    @override
    def freeze_stages(self, count: int) -> None:
        for name in ("stem", *self.stages)[:count]:
            freeze(getattr(self, name))

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        x = self.stem(pixels)
        maps = {}
        for name in self.stages:
            x = maps[name] = getattr(self, name)(x)
        return {name: maps[name] for name in self.out_features}


class Res5(nn.Sequential):
    """The res5 stage in the RoI head of a C4 detector: three bottleneck blocks at every depth, as in Detectron2.

    With RES5_DILATION 2 the output is as large as the RoI map. FREEZE_AT 5 freezes res5.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(*_make_stage(config, "res5", is_roi_head=True))
        if config.freeze_at >= 5:
            freeze(self)

    @override
    def forward(
        self, x: Float[Tensor, "_maps _channels _h _w"], pool: Pooling | None = None
    ) -> Float[Tensor, "J D S S"]:
        """Apply res5 to RoI maps, or, with the linear pooling `pool`, to the feature maps of images."""
        first, *rest = self
        x = first(x, pool)
        for block in rest:
            x = block(x)
        return x


def _make_stage(config: ResNetConfig, name: str, is_roi_head: bool = False) -> nn.Sequential:
    """Make res2, res3, res4 or res5. The stage's stride is in its first block."""
    number = STAGES.index(name)
    out_channels = config.shapes[name].channels
    channels = config.stem_out_channels if number == 0 else out_channels // 2
    num_blocks = ROI_BLOCKS if is_roi_head else BLOCKS_PER_STAGE[config.depth][number]
    dilation = config.res5_dilation if name == "res5" else 1
    has_stride = number > 0 and dilation == 1
    stride = 2 if has_stride else 1
    width = config.num_groups * config.width_per_group * 2**number
    blocks = []
    for _ in range(num_blocks):
        if config.depth < 50 and not is_roi_head:
            block = BasicBlock(channels, out_channels, stride=stride, norm=config.norm)
        else:
            block = BottleneckBlock(channels, out_channels, config, width=width, stride=stride, dilation=dilation)
        blocks.append(block)
        channels = out_channels
        stride = 1
    return nn.Sequential(*blocks)
