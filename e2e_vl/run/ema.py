"""An exponential moving average of the weights: training changes the weights, everything else uses their average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """An exponential moving average of the trained parameters and of batch statistics, on their device.

    After each update of the weights, `average = d * average + (1 - d) * weight` (Polyak & Juditsky 1992; Tarvainen &
    Valpola 2017). After n updates d is the smaller one of `decay` and (1 + n) / (10 + n), as in TensorFlow, so that
    short runs do not average their initial weights. Batch statistics are averaged too, because those of the current
    weights do not fit the average. Frozen parameters and constants are left out.

    All processes compute the same average, as they have the same weights. `torch.optim.swa_utils.AveragedModel` would
    copy the frozen weights too, and is a second model, of which evaluation and files would have to know.

    Attributes:
        averages: the average of each tensor, by its name in the model; while `applied`, the raw tensor.
        updates: updates of the weights so far.
    """

    UPDATES = "updates"  # key of the state dict; names of tensors in the model have a dot

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        """Begin with the current weights of a model.

        Args:
            decay: see `train.ema_decay`; None: nothing is averaged, and evaluation and files have the weights.
        """
        self.decay = decay
        self.updates = 0
        self.tensors: dict[str, Tensor] = {}
        if decay is not None:
            self.tensors = find_averaged(model)
        self.averages = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def update(self) -> None:
        """Include the current weights, after an optimiser step that changed them."""
        if self.decay is None:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        average = get_ema_multi_avg_fn(decay)
        average(list(self.averages.values()), list(self.tensors.values()), self.updates)
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
        for name, tensor in self.tensors.items():
            average = self.averages[name]
            value = tensor.clone()
            tensor.copy_(average)
            average.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages and the number of updates."""
        return {**self.averages, self.UPDATES: torch.tensor(self.updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.updates = int(state[self.UPDATES])
        for name, average in self.averages.items():
            average.copy_(state[name])


def find_averaged(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters and the running batch statistics of a model, by name and without gradients."""
    tensors = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            tensors[f"{name}.running_mean"] = module.running_mean
            tensors[f"{name}.running_var"] = module.running_var
    return tensors
