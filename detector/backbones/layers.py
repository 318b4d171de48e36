"""Normalisation layers, and convolutions with Detectron2's parameter names. Shape legend: `detector/structures.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.nn.functional import all_reduce
from typing_extensions import override

from detector.config import NORM_EPS

GROUPS = 32  # of GroupNorm (Wu & He, section 4.1)
LAYER_NORM_EPS = 1e-6  # as in Detectron2
BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)  # `SyncBatchNorm` of this module is a BatchNorm2d


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm with statistics over all processes, on any device: on a GPU, `torch.nn.SyncBatchNorm`.

    That class supports neither CPU tensors nor CPU models in DistributedDataParallel, so it cannot be the base class.
    """

    process_group = None  # `nn.SyncBatchNorm.forward` reads these two: the group of all processes
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @override
    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            return nn.SyncBatchNorm.forward(self, x)
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


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with fixed statistics, weights and biases, all of them buffers, as in torchvision and Detectron2."""

    def __init__(self, num_features: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    @override
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + bias[:, None, None]

    @override
    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # of a batch norm that was trained
        super()._load_from_state_dict(state_dict, prefix, *args)


def make_norm(name: str, channels: int) -> nn.Module:
    """Make a normalisation layer for `channels` channels.

    `name`: FrozenBN (a fixed affine map), BN, SyncBN (statistics over all processes), LN (over the channels of each
    cell) or GN (32 groups; if 32 does not divide `channels`, their greatest common divisor, where Detectron2 raises an
    error).
    """
    if name == "FrozenBN":
        norm = FrozenBatchNorm2d(channels, eps=NORM_EPS)
        norm.running_var -= norm.eps  # the identity until statistics are loaded, as in Detectron2
        return norm
    if name == "BN":
        return nn.BatchNorm2d(channels)
    if name == "SyncBN":
        return SyncBatchNorm(channels)
    if name == "LN":
        from torchvision.models.convnext import LayerNorm2d  # late: torchvision imports the compiler

        return LayerNorm2d(channels, eps=LAYER_NORM_EPS)
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class BatchStatistics(nn.BatchNorm2d):
    """Batch norm that uses batch statistics in evaluation too and never updates its running statistics.

    In torch 1.x, setting `track_running_stats = False` on a layer had this effect.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


def freeze(module: nn.Module, norm: type[FrozenBatchNorm2d] | type[BatchStatistics] = FrozenBatchNorm2d) -> None:
    """Disable the gradients of a module and convert its batch norms to `norm`, like Detectron2's `freeze`."""
    freeze_norms(module, norm)
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def freeze_norms(module: nn.Module, norm: type[FrozenBatchNorm2d] | type[BatchStatistics] = FrozenBatchNorm2d) -> None:
    """Convert the batch norms in a module to `norm`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BATCH_NORMS):
                frozen = norm(child.num_features, eps=child.eps).to(child.weight.device)
                if not child.weight.is_meta:  # meta tensors have no values
                    frozen.load_state_dict(child.state_dict())
                setattr(parent, name, frozen)


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


class FoldAndCast(torch.autograd.Function):
    """`(weight * scale).to(dtype)` by one kernel, and its gradient by another; autograd alone launches two for each."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, weight: Float[Tensor, "out _in _h _w"], scale: Float[Tensor, "out 1 1 1"], dtype: torch.dtype
    ) -> Float[Tensor, "out _in _h _w"]:
        ctx.save_for_backward(scale)
        folded = torch.empty_like(weight, dtype=dtype)
        return torch.mul(weight, scale, out=folded)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None, None


class ConvNorm(nn.Conv2d):
    """Convolution with a normalisation layer instead of a bias, or with a bias only.

    Keys are `weight`, `norm.weight`, ..., as in Detectron2.

    A frozen batch norm is an affine map per channel and is folded into the convolution, which saves two passes over the
    feature map. Gradients still flow to the weights.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, norm: str, **options: int) -> None:
        """Create the layer; `norm` is a name accepted by `make_norm`, or "" for a bias."""
        super().__init__(in_channels, out_channels, kernel_size, bias=not norm, **options)
        self.norm = make_norm(norm, out_channels) if norm else None
        self._affine_cache = AffineCache()
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @override
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
            if is_autocast and not affine.scale.requires_grad:
                return FoldAndCast.apply(self.weight, affine.scale[:, None, None, None], dtype), affine
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
        pooled = pool(F.conv2d(x, weight), self.stride[0])
        bias = affine.bias[:, None, None]
        # an in-place addition to a view would make autograd copy the whole map
        return pooled + bias if pooled.requires_grad else pooled.add_(bias)
