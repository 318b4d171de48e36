"""An exponential moving average of the weights: training changes the weights, everything else uses their average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """An exponential moving average of the trained parameters, on their device.

    After each update of the weights, `average = d * average + (1 - d) * weight` (Polyak & Juditsky 1992; Tarvainen &
    Valpola 2017). In update n, from 0, d is the smaller one of `decay` and (1 + n) / (10 + n), as in TensorFlow, so
    that short runs do not average their initial weights. Frozen parameters and buffers are left out: batch statistics
    are the current ones.

    All processes compute the same average, as they have the same weights. `torch.optim.swa_utils.AveragedModel` is a
    second model, with copies of the frozen weights, of which evaluation and files would have to know.

    Attributes:
        averages: the average of each parameter, by its name in the model; while `applied`, its raw value.
        updates: updates of the weights so far.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        """Begin with the current weights of a model.

        Args:
            decay: see `train.ema_decay`; None: nothing is averaged, and evaluation and files have the weights.
        """
        self.decay = decay
        self.updates = 0
        self.weights: dict[str, Tensor] = {}
        if decay is not None:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self.weights[name] = parameter.detach()
        self.averages = {name: weight.clone() for name, weight in self.weights.items()}

    def update(self) -> None:
        """Include the current weights, after an optimiser step that changed them."""
        if self.decay is None:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        average = get_ema_multi_avg_fn(decay)
        average(list(self.averages.values()), list(self.weights.values()), self.updates)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model its averaged weights, in place, and then the raw ones again, without a third copy."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self.weights.items():
            average = self.averages[name]
            value = weight.clone()
            weight.copy_(average)
            average.copy_(value)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the averages and, under "updates", their number; checkpoints of before have them in a file."""
        self.updates = int(state["updates"])
        for name, average in self.averages.items():
            average.copy_(state[name])
