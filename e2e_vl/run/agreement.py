"""Before each step, and within it, all processes of a run agree whether they all can make it."""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import distributed


class Standing(NamedTuple):
    """What every process knows of all.

    Attributes:
        first_failed: number of the first process that cannot go on; None: all can.
        signal: number of a signal that came to any process; None: none did.
    """

    first_failed: int | None
    signal: int | None


class Agreement:
    """Tells every process how the others stand; no device is waited for, since two numbers travel between the hosts.

    Args:
        accelerator: of the run.
        max_wait_minutes: how long a process waits for the others.
    """

    def __init__(self, accelerator: Accelerator, max_wait_minutes: float) -> None:
        self._rank, self._number = accelerator.process_index, accelerator.num_processes
        self._longest = datetime.timedelta(minutes=max_wait_minutes)
        self._group = None  # of its own: where a process fails, others may be about to exchange something else
        if self._number > 1:
            self._group = distributed.new_group(backend="gloo", timeout=self._longest)

    def reach(self, *, failed: bool, signal: int | None, patience: float | None = None) -> Standing:
        """To be called on every process, once it has the batches of a step or cannot get them.

        Args:
            failed: this process cannot go on.
            signal: number of a signal that came to this process, if one did.
            patience: seconds to wait for the others; None: as long as may be.

        Raises:
            RuntimeError: a process is gone, or did not come in time.
        """
        standing = torch.tensor([self._number - self._rank if failed else 0, signal or 0])
        if self._number > 1:
            waiting = distributed.all_reduce(standing, distributed.ReduceOp.MAX, group=self._group, async_op=True)
            waiting.wait(self._longest if patience is None else datetime.timedelta(seconds=patience))
        from_behind, number = standing.tolist()
        return Standing(self._number - from_behind if from_behind else None, number or None)
