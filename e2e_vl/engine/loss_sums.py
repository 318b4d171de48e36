"""Losses of a run: how they are weighted, and their means over a whole split."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from accelerate.utils import gather_object

from detector.errors import UserError
from detector.structures import Loss
from e2e_vl.config import RunConfig
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
