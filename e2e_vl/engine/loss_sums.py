"""Losses of a run: how they are weighted, their sum in a step, and their means over a whole split."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from detector.errors import UserError
from detector.structures import Loss
from e2e_vl.config import RunConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.tasks.phrase_head import TAGS

LOSS = "loss"  # metric of an evaluation that sums the losses, of which less is better


def task_weights(config: RunConfig, names: Iterable[str]) -> dict[str, float]:
    """The weights of losses of the task, which are 1, and of phrases."""
    phrases = config.phrases
    weights = {"phrases": phrases.weight, TAGS: phrases.weight * phrases.tag_weight}
    return {name: weights.get(name, 1.0) for name in names}


def detection_weights(config: RunConfig, names: Collection[str]) -> dict[str, float]:
    """The weights of losses of the detector.

    Raises:
        ValueError: the settings weigh a loss that this detector lacks.
    """
    settings = config.detector
    unknown = sorted(set(settings.loss_weights) - set(names)) if names else []
    if unknown:
        raise UserError(
            f"detector.loss_weights names '{unknown[0]}'; the losses of this detector are {', '.join(names)}."
        )
    return {name: settings.loss_weight * settings.loss_weights.get(name, 1.0) for name in names}


def total_loss(
    accelerator: Accelerator,
    config: RunConfig,
    model: VisionLanguageModel,
    losses: tuple[dict[str, Loss], dict[str, Loss]],
    logged: dict[str, Tensor],
    micro_batches: int,
) -> Tensor:
    """Weighted sum of all losses, each divided by the number of its items on *all* processes.

    Args:
        losses: of the task and of the detector, for one micro-batch of this process.
        logged: gets the losses, added up over the micro-batches of a step.
        micro_batches: of each step.
    """
    task_losses, detection_losses = losses
    every = {**task_losses, **detection_losses}
    weights = task_weights(config, task_losses) | detection_weights(config, detection_losses)
    names = sorted(every)
    sums = torch.stack([torch.stack([every[name].total.detach().float(), every[name].count.float()]) for name in names])
    everywhere = accelerator.reduce(sums, reduction="sum")
    if model.phrase_head is not None:
        model.phrase_head.learned_from(dict(zip(names, everywhere[:, 1], strict=True)))
    total = torch.zeros((), device=sums.device)
    for name, (loss_sum, count) in zip(names, everywhere, strict=True):
        divisor = count.clamp(min=1) * micro_batches
        # DDP averages gradients over processes, hence the factor
        total = total + weights[name] * every[name].total * accelerator.num_processes / divisor
        logged[name] = logged.get(name, 0) + loss_sum / divisor
        logged["loss"] = logged.get("loss", 0) + weights[name] * loss_sum / divisor
    return total


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
        weights = task_weights(config, means)
        return {LOSS: sum(weights[name] * mean for name, mean in sorted(means.items()))} if means else {}
