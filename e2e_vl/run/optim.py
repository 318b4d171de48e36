"""The optimiser, with parameter groups for detector, encoder and head, and the learning-rate schedule."""

from __future__ import annotations

import bisect
import itertools
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
from typing_extensions import override

from e2e_vl.config import RunConfig, TrainConfig
from e2e_vl.model import VisionLanguageModel


class OfficialAdam(torch.optim.AdamW, ABC):
    """Base of the Adam variants in official code, computed by torch's AdamW with converted `lr`, decay and epsilon.

    Updates are counted per parameter: a parameter without a gradient is skipped, and parameters with the same count are
    updated together.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # parameter -> its updates: a GPU has the fused optimiser's counts, and the host would wait for each of them
        self._updates: dict[Tensor, int] = {}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updates = {}  # loaded counts are read when they are needed

    @abstractmethod
    def convert_options(
        self, rate: float, decay: float, eps: float, corrections: tuple[float, float]
    ) -> dict[str, float]:
        """Return the `lr`, `weight_decay` and `eps` for torch's AdamW.

        Args:
            corrections: the bias corrections `1 - beta1**t` and `1 - beta2**t` of update t.
        """

    def compute_rate(self, group: dict[str, Any], updates: int) -> float:
        """Return the learning rate of parameters after this number of updates."""
        return group["lr"]

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        self.param_groups = list(itertools.chain.from_iterable(map(self._split_by_updates, groups)))
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._updates[parameter] += 1
        self.param_groups = groups
        return loss

    def _split_by_updates(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Split a group by number of updates, with converted options for torch's AdamW."""
        beta1, beta2 = group["betas"]
        by_updates = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter not in self._updates:
                state = self.state[parameter]
                self._updates[parameter] = int(state["step"]) if state else 0
            by_updates[self._updates[parameter]].append(parameter)
        for updates, parameters in by_updates.items():
            corrections = (1 - beta1 ** (updates + 1), 1 - beta2 ** (updates + 1))
            rate = self.compute_rate(group, updates)
            changed = self.convert_options(rate, group["weight_decay"], group["eps"], corrections)
            yield {**group, **changed, "params": parameters}


class OfficialAdamW(OfficialAdam):
    """AdamW of old transformers versions, used by the official VL-BERT code.

    Unlike `torch.optim.AdamW`, it adds epsilon before the bias correction, `sqrt(v) + eps`, and subtracts the decay,
    `lr * weight_decay * weight`, after the update.
    """

    @override
    def convert_options(
        self, rate: float, decay: float, eps: float, corrections: tuple[float, float]
    ) -> dict[str, float]:
        shrinkage = 1 - rate * decay  # decay after the update also shrinks the update
        return {"lr": rate * shrinkage, "weight_decay": decay / shrinkage, "eps": eps / math.sqrt(corrections[1])}


class BertAdam(OfficialAdam):
    """Adam without bias correction, used by the official VisualBERT and LXMERT code.

    `weight -= rate * (m / (sqrt(v) + eps) + weight_decay * weight)`, with m and v including the new gradient. The
    schedule of a parameter does not advance while it has no gradient. `max_grad_norm_per_tensor`: clip the gradient of
    each parameter to this norm; None: no clipping.
    """

    # number of updates of a parameter -> its share of the peak learning rate; None: the group's `lr` is used
    factor: Callable[[int], float] | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        max_grad_norm_per_tensor: float | None = None,
        fused: bool | None = None,
    ):
        super().__init__(groups, betas=betas, eps=eps, fused=fused)
        self.max_grad_norm_per_tensor = max_grad_norm_per_tensor

    @override
    def convert_options(
        self, rate: float, decay: float, eps: float, corrections: tuple[float, float]
    ) -> dict[str, float]:
        scale = corrections[0] / math.sqrt(corrections[1])  # undoes the bias correction
        return {"lr": rate * scale, "weight_decay": decay / scale, "eps": eps / math.sqrt(corrections[1])}

    @override
    def compute_rate(self, group: dict[str, Any], updates: int) -> float:
        if self.factor is None:
            return group["lr"]
        return group["initial_lr"] * self.factor(updates)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if self.max_grad_norm_per_tensor is not None:
            gradients = []
            for group in self.param_groups:
                gradients += [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients))
            factors = (self.max_grad_norm_per_tensor / (norms + 1e-6)).clamp(max=1.0)  # as torch's `clip_grad_norm_`
            # As numbers, all are multiplied in a few launches. The host waits only for the norms: a training step has
            # just waited for everything else.
            torch._foreach_mul_(gradients, factors.tolist())
        return super().step(closure)


def build_optimizer(model: VisionLanguageModel, settings: TrainConfig) -> torch.optim.Optimizer:
    """Build an optimiser with the groups detector, encoder and head, and `*_no_decay` for norms and biases.

    AdamW is torch's fused one: it takes a third of the time on a CPU, and few launches on a GPU. In fp16 it is not: it
    would skip an update on the GPU if gradients overflowed, unseen by the host, which counts updates.
    """
    heads = [module for name, module in model.named_children() if name not in ("detector", "encoder", "teacher")]
    modules = {  # name -> module, its own learning rate
        "detector": (model.detector, settings.detector_lr),
        "encoder": (model.encoder, None),
        "head": (nn.ModuleList(heads), settings.head_lr),
    }
    groups = []
    for name, (module, lr) in modules.items():
        decayed_scales: set[int] = set()
        if settings.decay_bn_scales:
            norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
            decayed_scales = {id(norm.weight) for norm in norms}
        decayed = []  # matrices and kernels
        undecayed = []  # vectors: biases, scales of norms
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dim() > 1 or id(parameter) in decayed_scales:
                decayed.append(parameter)
            else:
                undecayed.append(parameter)
        if settings.decay_norm_and_bias:
            decayed += undecayed
            undecayed = []
        rate = settings.lr if lr is None else lr
        if decayed:
            groups.append({"name": name, "params": decayed, "lr": rate, "weight_decay": settings.weight_decay})
        if undecayed:
            groups.append({"name": f"{name}_no_decay", "params": undecayed, "lr": rate, "weight_decay": 0.0})
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum)
    is_fused = settings.mixed_precision != "fp16"
    options = {"betas": tuple(settings.betas), "eps": settings.eps, "fused": is_fused or None}
    if settings.optimizer == "bert_adam":
        return BertAdam(groups, max_grad_norm_per_tensor=settings.max_grad_norm_per_tensor, **options)
    if settings.optimizer == "adamw_official":
        return OfficialAdamW(groups, **options)
    return torch.optim.AdamW(groups, **options)


def schedule_span(settings: TrainConfig, total_steps: int) -> tuple[int, int]:
    """Return the first step and the length of the schedule of a run, see `train.schedule_fraction`."""
    start, end = settings.schedule_fraction
    length = round(total_steps / (end - start))
    return round(start * length), length


def objective_weights(config: RunConfig, total_steps: int, step: int) -> dict[str, float]:
    """Return the weight of each pre-training objective in the update after `step` steps; 0 before it begins."""
    skipped, length = schedule_span(config.train, total_steps)
    weights = {}
    for name, objective in getattr(config.task.config, "objectives", {}).items():
        if objective.weight:
            has_begun = skipped + step >= objective.start_fraction * length
            weights[name] = objective.weight * has_begun
    return weights


def preview(config: RunConfig, total_steps: int, points: int = 1000) -> Iterator[dict[str, Any]]:
    """Yield the learning rates and weights of objectives over the steps of a run, as lines of its log."""
    settings = config.train
    peaks = {"lr_detector": settings.detector_lr, "lr_encoder": settings.lr, "lr_head": settings.head_lr}
    for step in range(0, total_steps, math.ceil(total_steps / points)):
        optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
        [factor] = build_schedule(optimizer, settings, total_steps, steps_done=step).get_last_lr()
        line: dict[str, Any] = {"step": step, "kind": "train"}
        for name, peak in peaks.items():
            line[name] = factor * (settings.lr if peak is None else peak)
        for name, weight in objective_weights(config, total_steps, step).items():
            line[f"weight_{name}"] = weight
        yield line


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: TrainConfig, total_steps: int, *, steps_done: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Build a schedule: linear warm-up, then decay over `total_steps` optimiser steps, or a part of that.

    Update u (from 0) has the learning rate of step u; with `schedule_skips_zero`, as in the official VL-BERT code, that
    of step u + 1: the learning rate of the first update is not 0, and that of the last one is. `BertAdam` evaluates the
    schedule per parameter. The groups of the optimiser have the peak learning rates.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    skipped, total_steps = schedule_span(settings, total_steps)
    first = skipped + int(settings.schedule_skips_zero)
    last = steps_done - 1 + first  # the constructor of a schedule makes one step
    warmup = settings.warmup_steps
    if settings.warmup_ratio is not None:
        warmup = settings.warmup_ratio * total_steps
    if settings.schedule == "constant":
        schedule = get_constant_schedule_with_warmup(optimizer, warmup, last_epoch=last)
    elif settings.schedule == "steps":
        decays = [round(share * total_steps) for share in settings.milestones]

        def factor_of(step: int) -> float:
            warm = min(step / warmup, 1.0) if warmup else 1.0
            return warm * settings.gamma ** bisect.bisect_right(decays, step)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of, last_epoch=last)
    else:
        build = get_cosine_schedule_with_warmup if settings.schedule == "cosine" else get_linear
        schedule = build(optimizer, warmup, total_steps, last_epoch=last)
    if isinstance(optimizer, BertAdam):
        [factor, *_] = schedule.lr_lambdas  # the same for all groups
        optimizer.factor = lambda updates: factor(updates + first)
    return schedule
