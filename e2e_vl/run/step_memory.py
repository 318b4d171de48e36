"""A step for which a process has too little memory: it is undone, and all processes save the last one.

Weights and the optimiser change at the end of a step only. Before that a step changes random states, buffers (such as
the statistics of batch norms) and gradients, so these are what has to be put back.

Several processes agree after each forward pass and after the last backward pass of a step, in which they exchange
gradients (`gradient_exchange.py`). A model whose batch norms exchange statistics has no such moments. Where memory ends
there, the process ends at once, and the others cannot save without it.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from detector.resnet import SyncBatchNorm
from e2e_vl.run.agreement import Agreement
from e2e_vl.run.stopping import is_out_of_memory

PATIENCE = 300.0  # seconds that a process which failed waits for the others to come so far


class StepStart:
    """What a step changes before it changes weights, as it was before the step.

    Args:
        model: whose buffers are kept.
        device: of the run.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}  # torch copies those of one type together
        for buffer in model.buffers():
            self._buffers.setdefault(buffer.dtype, []).append(buffer)
        self._kept = {kind: [buffer.detach().clone() for buffer in own] for kind, own in self._buffers.items()}
        self._device = None if device.type == "cpu" else device
        self._states: dict[str, Any] = {}

    @property
    def random_state(self) -> torch.Tensor:
        """Of the CPU, before the step."""
        return self._states["cpu"]

    def take(self) -> None:
        """A step begins."""
        for kind, buffers in self._buffers.items():
            torch._foreach_copy_(self._kept[kind], buffers)
        self._states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if self._device is not None:
            self._states["device"] = torch.get_device_module(self._device).get_rng_state(self._device)

    def put_back(self) -> None:
        """The step is not made."""
        with torch.no_grad():
            for kind, buffers in self._buffers.items():
                torch._foreach_copy_(buffers, self._kept[kind])
        random.setstate(self._states["python"])
        np.random.set_state(self._states["numpy"])
        torch.set_rng_state(self._states["cpu"])
        if self._device is not None:
            module = torch.get_device_module(self._device)
            module.set_rng_state(self._states["device"], self._device)
            module.empty_cache()  # what saving takes is not always taken from torch's own store


class StepUndoneError(Exception):
    """A process of the run has too little memory for the step; raised on every process.

    Attributes:
        error: what this process is to say; None: another one says it.
    """

    def __init__(self, error: BaseException | None) -> None:
        super().__init__("a process has too little memory for this step")
        self.error = error


class MemoryGuard:
    """As a context it catches that memory ends; `agree` then tells all processes.

    Args:
        agreement: of the run.
        model: that is trained.
    """

    def __init__(self, accelerator: Accelerator, agreement: Agreement, model: nn.Module) -> None:
        self._rank, self._agreement = accelerator.process_index, agreement
        is_alone = accelerator.num_processes == 1
        # where processes meet within the forward pass, who fails there cannot tell the others
        self._can_agree = is_alone or not any(isinstance(part, SyncBatchNorm) for part in model.modules())
        self.error: BaseException | None = None

    def __enter__(self) -> MemoryGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not self._can_agree or not is_out_of_memory(error):
            return False
        # a traceback has all that the step holds in memory
        self.error = error.with_traceback(None)
        self.error.__cause__ = self.error.__context__ = None
        return True

    def agree(self) -> None:
        """To be called on every process at the same place of a step.

        Raises:
            StepUndoneError: a process has too little memory.
        """
        if not self._can_agree:
            return
        failed, self.error = self.error, None
        try:
            standing = self._agreement.reach(
                failed=failed is not None, signal=None, patience=None if failed is None else PATIENCE
            )
        except RuntimeError:
            if failed is not None:  # the others wait somewhere else; what this one has to say is said
                raise failed from None
            raise
        if standing.first_failed is not None:
            raise StepUndoneError(failed if standing.first_failed == self._rank else None)
