"""The exchange of gradients in a backward pass, in which a process that fails there still does its part.

DistributedDataParallel gathers gradients in buckets, and every process reduces them in the same order while the rest
of its backward pass goes on. A process that stopped in between would leave the others waiting. Here it reduces zeros
for the buckets that it has not come to, so that all get through the pass and can then agree that the step is not made.
"""

from __future__ import annotations

from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class GradientExchange:
    """Counts what a backward pass has exchanged; `finish` does what is left of it.

    Args:
        model: as it was prepared for training; without DistributedDataParallel nothing is exchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, DistributedDataParallel) else None
        self._buckets = 0  # that this process has begun to reduce in this backward pass
        self._unfinished: list[distributed.Work] = []
        if self._model is not None:
            self._model.register_comm_hook(None, self._reduce)  # it averages, as without a hook

    def _reduce(self, _, bucket):  # torch refuses annotations that are texts
        reduced = allreduce_hook(self._model.process_group, bucket)
        self._buckets += 1
        return reduced

    def begin(self) -> None:
        """A backward pass begins in which gradients are exchanged."""
        self._buckets = 0

    def finish(self) -> None:
        """Do what the backward pass, which ended early here, has left to exchange. Gradients are removed before.

        It does not wait for the others. The model can make no other step.
        """
        if self._model is None:
            return
        self._model.zero_grad(set_to_none=True)  # the zeros take as much memory
        group = self._model.process_group
        left = [bucket.buffer() for bucket in self._model.reducer._get_zeros_like_grad_buckets()[self._buckets :]]
        if left and self._model.find_unused_parameters:  # what every process has used follows the last bucket
            left.append(self._model.reducer._get_local_used_map())
        self._unfinished = [distributed.all_reduce(zeros, group=group, async_op=True) for zeros in left]
