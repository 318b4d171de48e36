"""Optimiser with one parameter group each for detector, encoder and head, and the learning-rate schedule."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers import get_linear_schedule_with_warmup as get_linear

from detector.errors import UserError
from detector.structures import Loss
from e2e_vl.config import RunConfig, TrainSettings
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch
from e2e_vl.tasks.phrase_head import TAGS


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


# Losses of a run: what a training step gets, how losses are weighted, and their means over a whole split.


LOSS = "loss"  # metric of an evaluation that sums the losses, of which less is better


class LossesOnly(nn.Module):
    """The model as DistributedDataParallel may see it: it returns nothing but what gradients come from.

    (From the parameters behind any other output it would wait for gradients that never come.)
    """

    def __init__(self, model: VisionLanguageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[dict[str, Loss], dict[str, Loss]]:
        """Task losses (with those of phrases) and detection losses, unweighted."""
        output = self.model(batch)
        return output.task_losses, output.regions.losses


def loss_weights(
    config: RunConfig, task_losses: Iterable[str], detection_losses: Collection[str] = ()
) -> dict[str, float]:
    """The weights of losses of the task, which are 1, of phrases, and of the detector, by name.

    Raises:
        UserError: the settings weigh a loss that this detector lacks.
    """
    phrases, detector = config.phrases, config.detector
    unknown = sorted(set(detector.loss_weights) - set(detection_losses)) if detection_losses else []
    if unknown:
        raise UserError(
            f"detector.loss_weights names '{unknown[0]}'; the losses of this detector are "
            f"{', '.join(detection_losses)}."
        )
    of_phrases = {"phrases": phrases.weight, TAGS: phrases.weight * phrases.tag_weight}
    weights = {name: of_phrases.get(name, 1.0) for name in task_losses}
    return weights | {name: detector.loss_weight * detector.loss_weights.get(name, 1.0) for name in detection_losses}


class LossSums:
    """Sums the losses of batches, each process those of its own."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}  # of each loss, and the number of its items

    def add(self, losses: Mapping[str, Loss]) -> None:
        for name, loss in losses.items():
            total, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + float(loss.total), count + float(loss.count)

    def means(self) -> dict[str, float]:
        """The mean of each loss over the items of all processes, the same on each; without those that have no item."""
        sums: dict[str, tuple[float, float]] = {}
        for name, total, count in gather_object([(name, *own) for name, own in self._sums.items()]):
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
        return {name: total / count for name, (total, count) in sums.items() if count}

    def score(self, config: RunConfig) -> dict[str, float]:
        """The weighted sum of all means as the metric `LOSS`; nothing where no loss has an item."""
        means = self.means()
        weights = loss_weights(config, means)
        return {LOSS: sum(weights[name] * mean for name, mean in sorted(means.items()))} if means else {}
