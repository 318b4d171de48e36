"""Optimiser with one parameter group each for detector, encoder and head, and the learning-rate schedule."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers import get_linear_schedule_with_warmup as get_linear

from detector.errors import UserError
from e2e_vl.config import TrainSettings
from e2e_vl.engine.bert_adam import BertAdam
from e2e_vl.model import VisionLanguageModel


class OfficialAdamW(torch.optim.Optimizer):
    """AdamW of the old transformers, which the official VL-BERT code trains with.

    Against `torch.optim.AdamW`: the epsilon is added before the bias correction, `sqrt(v) + eps`, and the decay,
    `lr * weight_decay * weight`, is taken off after the update. Every group brings its own `lr` and `weight_decay`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float):
        super().__init__(groups, {"betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"] * correction)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return loss


def build_optimizer(
    model: VisionLanguageModel, settings: TrainSettings, *, on_cpu: bool = False
) -> torch.optim.Optimizer:
    """Groups named detector, encoder, head (and `*_no_decay` if norms and biases are not decayed).

    Args:
        on_cpu: the model will be trained there, where AdamW takes a third of the time if it updates each parameter in
            one go. (On a GPU torch updates many parameters at once by default.)

    Raises:
        ValueError: nothing is trainable.
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
    if not groups:
        raise UserError("No parameter of detector, encoder or task is trainable.")
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum)
    betas = tuple(settings.betas)
    if settings.optimizer == "bert_adam":
        return BertAdam(groups, betas, settings.eps, settings.clip_tensor_norm)
    if settings.optimizer == "adamw_official":
        return OfficialAdamW(groups, betas=betas, eps=settings.eps)
    return torch.optim.AdamW(groups, betas=betas, eps=settings.eps, fused=on_cpu or None)


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
    schedule = _schedule(optimizer, settings, total_steps, steps_done - 1 + first)  # building a schedule does one step
    if isinstance(optimizer, BertAdam):
        [factor, *_] = schedule.lr_lambdas  # the same for all groups
        optimizer.factor = lambda updates: factor(updates + first)
    return schedule


def _schedule(
    optimizer: torch.optim.Optimizer, settings: TrainSettings, total_steps: int, last: int
) -> torch.optim.lr_scheduler.LambdaLR:
    warmup = settings.warmup_steps if settings.warmup_share is None else settings.warmup_share * total_steps
    if settings.schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup, last_epoch=last)
    if settings.schedule == "steps":

        def factor(step: int) -> float:
            warm = min(step / warmup, 1.0) if warmup else 1.0
            return warm * settings.decay_factor ** bisect.bisect_right(settings.decay_steps, step)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=last)
    build = get_cosine_schedule_with_warmup if settings.schedule == "cosine" else get_linear
    return build(optimizer, warmup, total_steps, last_epoch=last)
