"""Normalisation layers, chosen by Detectron2's NORM settings of the ResNet, the FPN and the box head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torchvision.ops.misc import FrozenBatchNorm2d

from detector.config_groups import NORM_EPS
from detector.errors import UserError

GROUPS = 32  # of GroupNorm (Wu & He, section 4.1)
BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)  # SyncBatchNorm below is a BatchNorm2d


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm over the samples of all processes, on any device.

    (torch's class refuses CPU tensors, and DistributedDataParallel refuses CPU models that contain it.)
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
    """A normalisation layer of `channels` channels.

    Args:
        name: FrozenBN (fixed affine map), BN, SyncBN (statistics of all processes) or GN (32 groups, or the greatest
            common divisor of 32 and the channels where 32 does not divide them; Detectron2 refuses that).

    Raises:
        ValueError: a different name.
    """
    if name == "FrozenBN":
        norm = FrozenBatchNorm2d(channels, eps=NORM_EPS)
        norm.running_var -= norm.eps  # as in Detectron2: exactly the identity until statistics are loaded
        return norm
    if name == "BN":
        return nn.BatchNorm2d(channels)
    if name == "SyncBN":
        return SyncBatchNorm(channels)
    if name == "GN":
        return nn.GroupNorm(math.gcd(GROUPS, channels), channels)
    raise UserError(f"MODEL.RESNETS.NORM = {name!r} is not supported; use FrozenBN, BN, SyncBN or GN.")


class BatchStatistics(nn.BatchNorm2d):
    """Batch norm that normalises by the statistics of its batch in evaluation too, and keeps its own as they are.

    (What torch 1.x did with `track_running_stats` switched off after a model was built.)
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)


def freeze(module: nn.Module, norm: type[FrozenBatchNorm2d] | type[BatchStatistics] = FrozenBatchNorm2d) -> None:
    """Switch off all gradients of a module and turn its batch norms into FrozenBN, as Detectron2's `freeze`.

    Args:
        norm: what the batch norms become instead.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BATCH_NORMS):
                frozen = norm(child.num_features, eps=child.eps).to(child.weight.device)
                if not child.weight.is_meta:  # sizes alone are asked for: there is nothing to copy
                    frozen.load_state_dict(child.state_dict())
                setattr(parent, name, frozen)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
