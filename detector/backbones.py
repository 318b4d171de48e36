"""Backbones with Detectron2's module and parameter names: ResNet, feature pyramid, and res5 of a C4 RoI head.

Stage s has RES2_OUT_CHANNELS * 2 ** (s - 2) channels. Feature maps use the channels-last memory format, which makes
convolutions on CPU much faster. Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection.backbone_utils import BackboneWithFPN, mobilenet_backbone
from torchvision.ops.misc import FrozenBatchNorm2d

from detector.config import NORM_EPS, STAGES, DetectorConfig, ResNetConfig
from detector.errors import UserError
from detector.structures import FeatureMap, FeatureMaps

GROUPS = 32  # of GroupNorm (Wu & He, section 4.1)
BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)  # SyncBatchNorm below is a BatchNorm2d


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm with statistics over all processes, on any device.

    `torch.nn.SyncBatchNorm` supports neither CPU tensors nor CPU models in DistributedDataParallel.
    """

    def forward(self, x: Tensor) -> Tensor:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not self.training or not distributed or torch.distributed.get_world_size() == 1:
            return super().forward(x)
        values = x.float()
        count = values.new_tensor([values.numel() / values.shape[1]])
        total, count = all_reduce(torch.cat((values.sum(dim=(0, 2, 3)), count))).split((self.num_features, 1))
        mean = total / count
        centred = values - mean[:, None, None]
        variance = all_reduce(centred.square().sum(dim=(0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def make_norm(name: str, channels: int) -> nn.Module:
    """Make a normalisation layer for `channels` channels. `name`: FrozenBN (a fixed affine map), BN, SyncBN (statistics
    over all processes) or GN (32 groups; if 32 does not divide `channels`, their greatest common divisor, where
    Detectron2 raises an error).
    """
    if name == "FrozenBN":
        norm = FrozenBatchNorm2d(channels, eps=NORM_EPS)
        norm.running_var -= norm.eps  # the identity until statistics are loaded, as in Detectron2
        return norm
    if name == "BN":
        return nn.BatchNorm2d(channels)
    if name == "SyncBN":
        return SyncBatchNorm(channels)
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class BatchStatistics(nn.BatchNorm2d):
    """Batch norm that uses batch statistics in evaluation too and never updates its running statistics.

    In torch 1.x, setting `track_running_stats = False` on a layer had this effect.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


def freeze(module: nn.Module, norm: type[FrozenBatchNorm2d] | type[BatchStatistics] = FrozenBatchNorm2d) -> None:
    """Disable the gradients of a module and convert its batch norms to `norm`, like Detectron2's `freeze`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BATCH_NORMS):
                frozen = norm(child.num_features, eps=child.eps).to(child.weight.device)
                if not child.weight.is_meta:  # meta tensors have no values
                    frozen.load_state_dict(child.state_dict())
                setattr(parent, name, frozen)
    for parameter in module.parameters():
        parameter.requires_grad_(False)


BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
ROI_BLOCKS = 3  # blocks of res5 in a RoI head, at every depth
FROZEN_BRANCH_SCALE = 0.2  # initial scale of residual branches with FrozenBN, see `ResidualBlock`

# (feature maps of the images, stride on the RoI maps) -> RoI maps [J, channels, S, S]
Pooling = Callable[[Tensor, int], Tensor]


class FrozenAffine(NamedTuple):
    """A frozen batch norm as a map per channel, `x * scale + bias`, each float [channels]."""

    scale: Tensor
    bias: Tensor
    cast_bias: Tensor  # `bias` in the dtype of the convolution

    @classmethod
    def of_norm(cls, norm: FrozenBatchNorm2d, dtype: torch.dtype) -> FrozenAffine:
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        bias = norm.bias - norm.running_mean * scale
        return cls(scale, bias, bias.to(dtype))


class AffineCache:
    """The affine map of a frozen norm on a GPU, where computing it anew costs six kernel launches per convolution.

    The map is computed again when the norm's buffers or its epsilon are replaced or edited in place. Only in-place
    edits through `.data` leave no trace in PyTorch's version counters. The cache is not pickled or copied.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # aliases: while they live, no other buffer gets their address
        self._versions: list[int] = []
        self._eps = math.nan
        self._affine: FrozenAffine | None = None

    def __reduce__(self) -> tuple[type[AffineCache], tuple[()]]:
        return AffineCache, ()

    def affine(self, norm: FrozenBatchNorm2d, dtype: torch.dtype) -> FrozenAffine:
        """Return the map of `norm`, with `cast_bias` in `dtype`."""
        buffers = [norm.weight, norm.bias, norm.running_mean, norm.running_var]
        # tensors of inference mode have no version counters, and a map with a gradient serves one backward pass only
        if any(buffer.is_inference() or buffer.requires_grad for buffer in buffers):
            return FrozenAffine.of_norm(norm, dtype)
        versions = [buffer._version for buffer in buffers]
        try:
            addresses = [buffer.data_ptr() for buffer in buffers]
        except RuntimeError:  # the tensors of `torch.func` and fake tensors have no memory
            return FrozenAffine.of_norm(norm, dtype)
        is_known = (
            self._affine is not None
            and self._affine.cast_bias.dtype == dtype
            and self._eps == norm.eps
            and self._versions == versions
            and [buffer.data_ptr() for buffer in self._buffers] == addresses
        )
        if not is_known:
            with torch.inference_mode(False):  # the map serves training too
                self._affine = FrozenAffine.of_norm(norm, dtype)
            self._versions = versions
            self._eps = norm.eps
            self._buffers = [buffer.detach() for buffer in buffers]
        return self._affine


class ConvNorm(nn.Conv2d):
    """Convolution with a normalisation layer instead of a bias, or with a bias only.

    Keys are `weight`, `norm.weight`, ..., as in Detectron2.

    A frozen batch norm is an affine map per channel and is folded into the convolution, which saves two passes over the
    feature map. Gradients still flow to the weights.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, norm: str, **options: int) -> None:
        """`norm` is a name accepted by `make_norm`, or "" for a bias."""
        super().__init__(in_channels, out_channels, kernel_size, bias=not norm, **options)
        self.norm = make_norm(norm, out_channels) if norm else None
        self._affine_cache = AffineCache()
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return super().forward(x)
        if not isinstance(self.norm, FrozenBatchNorm2d):
            return self.norm(super().forward(x))
        weight, affine = self._fold_norm()
        return self._conv_forward(x, weight, affine.cast_bias)

    def _fold_norm(self) -> tuple[Tensor, FrozenAffine]:
        """Return the weight with the frozen norm folded in, and the norm's affine map."""
        device = self.weight.device
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else self.weight.dtype
        if device.type == "cpu" or torch.compiler.is_compiling():  # cheap, and fused by the compiler
            affine = FrozenAffine.of_norm(self.norm, dtype)
        else:
            affine = self._affine_cache.affine(self.norm, dtype)
        return self.weight * affine.scale[:, None, None, None], affine

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve, working around a bug in oneDNN (seen with torch 2.15).

        The backward pass of a strided 1x1 convolution on channels-last CPU tensors writes out of bounds if the number
        of channels is not a multiple of 16. Subsampling the input first gives the same values.
        """
        stride = self.stride[0]
        if self.kernel_size == (1, 1) and stride > 1 and (self.in_channels % 16 or self.out_channels % 16):
            return F.conv2d(x[:, :, ::stride, ::stride], weight, bias, groups=self.groups)
        return super()._conv_forward(x, weight, bias)

    def forward_pooled(self, x: Tensor, pool: Pooling) -> Tensor:
        """Compute `self(pool(x))` of a 1x1 convolution with the convolution applied before the pooling.

        The convolution is linear across channels and the pooling across cells, so they commute exactly. The feature map
        of an image has far fewer cells than the maps of many RoIs.
        """
        if not isinstance(self.norm, FrozenBatchNorm2d):
            return self.norm(pool(F.conv2d(x, self.weight), self.stride[0]))
        weight, affine = self._fold_norm()
        pooled, bias = pool(F.conv2d(x, weight), self.stride[0]), affine.bias[:, None, None]
        # an in-place addition to a view would make autograd copy the whole map
        return pooled + bias if pooled.requires_grad else pooled.add_(bias)


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


class ResidualBlock(nn.Module, abc.ABC):
    """Base class of both block types.

    With FrozenBN nothing normalises the activations of a randomly initialised network, so its residual branches start
    at a smaller scale, which loaded weights replace. To train from scratch, use another norm.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.shortcut = (
            ConvNorm(in_channels, out_channels, 1, norm=norm, stride=stride) if in_channels != out_channels else None
        )
        self.recompute = False  # see `recompute_activations`

    def forward(self, x: Tensor, pool: Pooling | None = None) -> Tensor:
        """Apply the block to x, or to `pool(x, 1)` if `pool` is given."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.residual, x, pool, use_reentrant=False)
        return self.residual(x, pool)

    @abc.abstractmethod
    def residual(self, x: Tensor, pool: Pooling | None) -> Tensor:
        """Compute `forward` without activation checkpointing."""


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions (ResNet-18 and -34)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: str) -> None:
        super().__init__(in_channels, out_channels, stride=stride, norm=norm)
        self.conv1 = ConvNorm(in_channels, out_channels, 3, norm=norm, stride=stride, padding=1)
        self.conv2 = ConvNorm(out_channels, out_channels, 3, norm=norm, padding=1)
        if norm == "FrozenBN":
            self.conv2.norm.weight.fill_(FROZEN_BRANCH_SCALE)

    def residual(self, x: Tensor, pool: Pooling | None) -> Tensor:
        x = x if pool is None else pool(x, 1)
        out = self.conv2(F.relu_(self.conv1(x)))
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


class BottleneckBlock(ResidualBlock):
    """1x1, 3x3, 1x1 convolutions. The stride is in the first 1x1 (MSRA, Caffe) or in the 3x3 (torchvision)."""

    def __init__(
        self, in_channels: int, out_channels: int, config: ResNetConfig, *, width: int, stride: int, dilation: int
    ) -> None:
        """`width` is the number of channels between the 1x1 convolutions."""
        norm = config.norm
        super().__init__(in_channels, out_channels, stride=stride, norm=norm)
        stride_1x1, stride_3x3 = (stride, 1) if config.stride_in_1x1 else (1, stride)
        options = {"stride": stride_3x3, "padding": dilation, "dilation": dilation, "groups": config.num_groups}
        self.conv1 = ConvNorm(in_channels, width, 1, norm=norm, stride=stride_1x1)
        self.conv2 = ConvNorm(width, width, 3, norm=norm, **options)
        self.conv3 = ConvNorm(width, out_channels, 1, norm=norm)
        if norm == "FrozenBN":
            self.conv3.norm.weight.fill_(FROZEN_BRANCH_SCALE)

    def residual(self, x: Tensor, pool: Pooling | None) -> Tensor:
        """With `pool`, which must be linear, apply the 1x1 convolutions before it, see `ConvNorm.forward_pooled`."""
        out = F.relu_(self.conv1(x) if pool is None else self.conv1.forward_pooled(x, pool))
        out = self.conv3(F.relu_(self.conv2(out)))
        if self.shortcut is None:
            out += x if pool is None else pool(x, 1)
        else:
            out += self.shortcut(x) if pool is None else self.shortcut.forward_pooled(x, pool)
        return F.relu_(out)


class ResNet(nn.Module):
    """Stem and the stages from res2 to the last of OUT_FEATURES, see `ResNetConfig`. Stages up to `freeze_at` get no
    gradient, and their batch norms become FrozenBN.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.out_features = config.out_features
        self.stages = STAGES[: STAGES.index(config.out_features[-1]) + 1]
        self.stem = BasicStem(config)
        for name in self.stages:
            self.add_module(name, _make_stage(config, name))
        for name in ("stem", *self.stages)[: config.freeze_at]:
            freeze(getattr(self, name))

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

    def forward(
        self, x: Float[Tensor, "_maps _channels _h _w"], pool: Pooling | None = None
    ) -> Float[Tensor, "J D S S"]:
        """Apply res5 to RoI maps, or, with the linear pooling `pool`, to the feature maps of images."""
        first, *rest = self
        x = first(x, pool)
        for block in rest:
            x = block(x)
        return x


def recompute_activations(module: nn.Module) -> None:
    """Enable activation checkpointing: store only each residual block's input and recompute the rest in backward."""
    for block in module.modules():
        if not isinstance(block, ResidualBlock):
            continue
        if any(isinstance(norm, nn.BatchNorm2d) for norm in block.modules()):
            raise UserError(
                "Activation checkpointing would update the running statistics of batch norms twice per batch; set "
                "MODEL.RESNETS.NORM to FrozenBN or GN, or disable train.activation_checkpointing."
            )
        block.recompute = True


def _make_stage(config: ResNetConfig, name: str, is_roi_head: bool = False) -> nn.Sequential:
    """Make res2, res3, res4 or res5. The stage's stride is in its first block."""
    number = STAGES.index(name)
    out_channels = config.shapes[name].channels
    channels = config.stem_out_channels if number == 0 else out_channels // 2
    num_blocks = ROI_BLOCKS if is_roi_head else BLOCKS_PER_STAGE[config.depth][number]
    dilation = config.res5_dilation if name == "res5" else 1
    stride = 1 if number == 0 or dilation == 2 else 2
    width = config.num_groups * config.width_per_group * 2**number
    blocks = []
    for _ in range(num_blocks):
        if config.depth < 50 and not is_roi_head:
            block = BasicBlock(channels, out_channels, stride=stride, norm=config.norm)
        else:
            block = BottleneckBlock(channels, out_channels, config, width=width, stride=stride, dilation=dilation)
        blocks.append(block)
        channels, stride = out_channels, 1
    return nn.Sequential(*blocks)


class FPN(nn.Module):
    """Feature pyramid network (Lin et al., CVPR 2017, section 3) on a ResNet: levels p2, p3, ..., and one more above
    them (p6), all with the same number of channels.

    Keys are `bottom_up.*`, `fpn_lateral2.*`, `fpn_output2.*`, ...; the number of a level is log2 of its stride.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.in_features = config.fpn.in_features
        self.is_average = config.fpn.fuse_type == "avg"
        self.out_features = tuple(config.map_shapes)  # one level more than `in_features`
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
        """Return all levels, finest first. H and W must be multiples of the stride of the last input map."""
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


def make_mobilenet(config: ResNetConfig) -> BackboneWithFPN:
    """Make torchvision's MobileNetV3 with a feature pyramid and random weights.

    Only `norm` ("FrozenBN" or "BN") and `freeze_at` (how many of torchvision's 6 stages are frozen) are used.
    """
    trunk = mobilenet_backbone(
        backbone_name="mobilenet_v3_large",
        weights=None,
        fpn=True,
        norm_layer={"FrozenBN": FrozenBatchNorm2d, "BN": nn.BatchNorm2d}[config.norm],
        trainable_layers=6 - config.freeze_at,
    )
    for block in trunk.body.children():
        if not any(parameter.requires_grad for parameter in block.parameters()):
            freeze(block)  # torchvision leaves trainable batch norms in frozen blocks
    return trunk
