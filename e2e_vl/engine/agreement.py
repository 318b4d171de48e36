"""Before each step all processes of a run agree whether they all can make it."""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import distributed


class Standing(NamedTuple):
    """What every process knows of all.

    Attributes:
        first_failed: number of the first process that cannot get its batches; None: all have them.
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
        self._group = None  # the group of all processes, where it takes tensors of the host
        if self._number > 1 and distributed.get_backend() != "gloo":
            self._group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(minutes=max_wait_minutes))

    def reach(self, *, failed: bool, signal: int | None) -> Standing:
        """To be called on every process, once it has the batches of a step or cannot get them.

        Args:
            failed: this process cannot get its batches.
            signal: number of a signal that came to this process, if one did.
        """
        standing = torch.tensor([self._number - self._rank if failed else 0, signal or 0])
        if self._number > 1:
            distributed.all_reduce(standing, distributed.ReduceOp.MAX, group=self._group)
        from_behind, number = standing.tolist()
        return Standing(self._number - from_behind if from_behind else None, number or None)
