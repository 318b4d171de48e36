"""Optimiser with one parameter group each for detector, encoder and head, and the learning-rate schedule."""

from __future__ import annotations

import bisect

import torch
from torch import nn
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers import get_linear_schedule_with_warmup as get_linear

from e2e_vl.config import TrainSettings
from e2e_vl.model import VisionLanguageModel


def build_optimizer(model: VisionLanguageModel, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW or SGD over groups named detector, encoder, head (and `*_no_decay` if norms and biases are not decayed).

    Raises:
        ValueError: nothing is trainable.
    """
    parts = {
        "detector": (model.detector, settings.detector_lr),
        "encoder": (model.encoder, None),
        "head": (model.task, settings.head_lr),
    }
    groups = []
    for name, (module, lr) in parts.items():
        decayed, undecayed = _split_by_decay(module)
        if settings.decay_norm_and_bias:
            decayed, undecayed = decayed + undecayed, []
        rate = settings.lr if lr is None else lr
        if decayed:
            groups.append({"name": name, "params": decayed, "lr": rate, "weight_decay": settings.weight_decay})
        if undecayed:
            groups.append({"name": f"{name}_no_decay", "params": undecayed, "lr": rate, "weight_decay": 0.0})
    if not groups:
        raise ValueError("No parameter of detector, encoder or task is trainable.")
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum)
    return torch.optim.AdamW(groups, betas=tuple(settings.betas), eps=settings.eps)


def _split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters of a module: matrices and kernels | vectors (biases, scales of norms)."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() <= 1]


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainSettings, total_steps: int, *, steps_done: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then the chosen decay: to 0 at `total_steps` optimiser steps (not micro-batches), or in steps.

    Args:
        optimizer: its groups hold the highest rates.
        steps_done: where to go on. The rates are a function of the step, so nothing else needs to be saved.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    last = steps_done - 1  # building a schedule does one step
    if settings.schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, settings.warmup_steps, last_epoch=last)
    if settings.schedule == "steps":

        def factor(step: int) -> float:
            warmup = min(step / settings.warmup_steps, 1.0) if settings.warmup_steps else 1.0
            return warmup * settings.decay_factor ** bisect.bisect_right(settings.decay_steps, step)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=last)
    build = get_linear if settings.schedule == "linear" else get_cosine_schedule_with_warmup
    return build(optimizer, settings.warmup_steps, total_steps, last_epoch=last)
