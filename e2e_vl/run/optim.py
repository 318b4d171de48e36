"""Optimiser with one parameter group each for detector, encoder and head, and the learning-rate schedule."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers import get_linear_schedule_with_warmup as get_linear

from e2e_vl.config import TrainSettings
from e2e_vl.model import VisionLanguageModel


class OfficialAdam(torch.optim.AdamW, ABC):
    """An Adam of the official code, computed by torch's AdamW with a rate, a decay and an epsilon of its own.

    Every group brings its own `lr` and `weight_decay`. Each parameter counts its own updates: one without a gradient is
    left alone, and parameters with the same count are updated together.
    """

    @abstractmethod
    def converted(self, rate: float, decay: float, eps: float, corrections: tuple[float, float]) -> dict[str, float]:
        """The `lr`, `weight_decay` and `eps` with which torch's AdamW makes this update.

        Args:
            corrections: `1 - beta1**t` and `1 - beta2**t` of update t, by which torch's AdamW divides m and v.
        """

    def rate_of(self, group: dict[str, Any], updates: int) -> float:
        """The learning rate of parameters that have had this number of updates."""
        return group["lr"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        self.param_groups = [part for group in groups for part in self._parts(group)]
        super().step()
        self.param_groups = groups
        return loss

    def _parts(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The group, split by the number of updates so far, as torch's AdamW is to see it."""
        beta1, beta2 = group["betas"]
        by_updates = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                by_updates[int(state["step"]) if state else 0].append(parameter)  # torch keeps the count on the CPU
        for updates, parameters in by_updates.items():
            corrections = 1 - beta1 ** (updates + 1), 1 - beta2 ** (updates + 1)
            rate = self.rate_of(group, updates)
            changed = self.converted(rate, group["weight_decay"], group["eps"], corrections)
            yield {**group, **changed, "params": parameters}


class OfficialAdamW(OfficialAdam):
    """AdamW of the old transformers, with which the official VL-BERT code trains.

    Against `torch.optim.AdamW`: the epsilon is added before the bias correction, `sqrt(v) + eps`, and the decay,
    `lr * weight_decay * weight`, is taken off after the update.
    """

    def converted(self, rate: float, decay: float, eps: float, corrections: tuple[float, float]) -> dict[str, float]:
        kept = 1 - rate * decay  # decay after the update also shrinks the update
        return {"lr": rate * kept, "weight_decay": decay / kept, "eps": eps / math.sqrt(corrections[1])}


class BertAdam(OfficialAdam):
    """Adam without bias correction, whose decay is a part of the scheduled update: VisualBERT's and LXMERT's code.

    `weight -= rate * (m / (sqrt(v) + eps) + weight_decay * weight)`, with m and v of the new gradient. The schedule of
    a parameter without a gradient waits.

    Args:
        clip_tensor_norm: the gradient of each parameter is cut to this norm first; None: it is left as it is.
    """

    # of the highest rate, from the number of updates that a parameter has had; None: `lr` of the group as it is
    factor: Callable[[int], float] | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        clip_tensor_norm: float | None = None,
        fused: bool | None = None,
    ):
        super().__init__(groups, betas=betas, eps=eps, fused=fused)
        self.clip_tensor_norm = clip_tensor_norm

    def converted(self, rate: float, decay: float, eps: float, corrections: tuple[float, float]) -> dict[str, float]:
        scale = corrections[0] / math.sqrt(corrections[1])  # undoes the bias correction
        return {"lr": rate * scale, "weight_decay": decay / scale, "eps": eps / math.sqrt(corrections[1])}

    def rate_of(self, group: dict[str, Any], updates: int) -> float:
        return group["lr"] if self.factor is None else group["initial_lr"] * self.factor(updates)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if self.clip_tensor_norm is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
            factors = (self.clip_tensor_norm / (norms + 1e-6)).clamp(max=1.0)  # as torch's `clip_grad_norm_`
            for gradient, factor in zip(gradients, factors, strict=True):
                gradient.mul_(factor)
        return super().step(closure)


def build_optimizer(
    model: VisionLanguageModel, settings: TrainSettings, *, on_cpu: bool = False
) -> torch.optim.Optimizer:
    """Groups named detector, encoder, head (and `*_no_decay` if norms and biases are not decayed).

    Args:
        on_cpu: the model will be trained there, where AdamW takes a third of the time if it updates each parameter in
            one go. (On a GPU torch updates many parameters at once by default.)
    """
    parts = {
        "detector": (model.detector, settings.detector_lr),
        "encoder": (model.encoder, None),
        "head": (nn.ModuleList(filter(None, (model.task, model.phrase_head))), settings.head_lr),
    }
    groups = []
    for name, (module, lr) in parts.items():
        decayed, undecayed = _split_by_decay(module, decay_bn_scales=settings.decay_bn_scales)
        if settings.decay_norm_and_bias:
            decayed, undecayed = decayed + undecayed, []
        rate = settings.lr if lr is None else lr
        if decayed:
            groups.append({"name": name, "params": decayed, "lr": rate, "weight_decay": settings.weight_decay})
        if undecayed:
            groups.append({"name": f"{name}_no_decay", "params": undecayed, "lr": rate, "weight_decay": 0.0})
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum)
    options = {"betas": tuple(settings.betas), "eps": settings.eps, "fused": on_cpu or None}
    if settings.optimizer == "bert_adam":
        return BertAdam(groups, clip_tensor_norm=settings.clip_tensor_norm, **options)
    return (OfficialAdamW if settings.optimizer == "adamw_official" else torch.optim.AdamW)(groups, **options)


def _split_by_decay(module: nn.Module, *, decay_bn_scales: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters of a module: matrices and kernels | vectors (biases, scales of norms).

    With `decay_bn_scales` scales of batch norms are among the first.
    """
    norms = [one for one in module.modules() if isinstance(one, _BatchNorm)] if decay_bn_scales else []
    scales = {id(norm.weight) for norm in norms}
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    is_decayed = [parameter.dim() > 1 or id(parameter) in scales for parameter in trainable]
    return (
        [parameter for parameter, decayed in zip(trainable, is_decayed, strict=True) if decayed],
        [parameter for parameter, decayed in zip(trainable, is_decayed, strict=True) if not decayed],
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainSettings, total_steps: int, *, steps_done: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then the chosen decay: to 0 at `total_steps` optimiser steps (not micro-batches), or in steps.

    Update u (from 0) has the rate of step u; with `schedule_first`, as in the official VL-BERT code, of step u + 1, so
    that the first update already moves and the last one has rate 0. `BertAdam` asks the schedule itself, with the
    number of updates that each parameter has had.

    Args:
        optimizer: its groups hold the highest rates.
        steps_done: where to go on. The rates are a function of the step, so nothing else needs to be saved.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    first = int(settings.schedule_first)
    last = steps_done - 1 + first  # building a schedule does one step
    warmup = settings.warmup_steps if settings.warmup_share is None else settings.warmup_share * total_steps
    if settings.schedule == "constant":
        schedule = get_constant_schedule_with_warmup(optimizer, warmup, last_epoch=last)
    elif settings.schedule == "steps":

        def factor_of(step: int) -> float:
            warm = min(step / warmup, 1.0) if warmup else 1.0
            return warm * settings.decay_factor ** bisect.bisect_right(settings.decay_steps, step)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of, last_epoch=last)
    else:
        build = get_cosine_schedule_with_warmup if settings.schedule == "cosine" else get_linear
        schedule = build(optimizer, warmup, total_steps, last_epoch=last)
    if isinstance(optimizer, BertAdam):
        [factor, *_] = schedule.lr_lambdas  # the same for all groups
        optimizer.factor = lambda updates: factor(updates + first)
    return schedule
