"""Batches from a data set, read in this process or in workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from e2e_vl.data.loading.grouping import GroupedBatchSampler
from e2e_vl.data.loading.requests import Request
from e2e_vl.examples import Example
from e2e_vl.structures import Batch

DATA_ERRORS = (ValueError, OSError)  # what readers raise about files and records


class BatchLoader:
    """Iterates over the batches of one epoch of the sampler.

    An error about the data is raised as the data set raised it, also when it happened in a worker. (`DataLoader` alone
    would put the worker's traceback into its message.)

    Args:
        dataset: answers `Request`s with `Example`s.
        sampler: whose batches, from its current epoch and start.
        collate: list of `Example` -> `Batch`.
        workers: processes that read; 0 reads in this process.
        keep_workers: the same workers go on in the next epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: GroupedBatchSampler,
        collate: Callable[[list[Example]], Batch],
        *,
        workers: int = 0,
        keep_workers: bool = False,
    ) -> None:
        self._loader = DataLoader(
            _Batches(dataset, collate),
            batch_sampler=sampler,
            collate_fn=unchanged,  # `_Batches` gives whole batches
            num_workers=workers,
            persistent_workers=keep_workers and workers > 0,
            # DataLoader draws a seed for its workers: not from the generator that dropout and RoI sampling use
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            if isinstance(batch, Exception):
                raise batch
            yield batch


@dataclasses.dataclass
class _Batches(Dataset):
    dataset: Dataset
    collate: Callable[[list[Example]], Batch]

    def __getitems__(self, requests: list[Request]) -> Batch | Exception:
        """An error travels from a worker in the place of a batch."""
        try:
            return self.collate([self.dataset[request] for request in requests])
        except DATA_ERRORS as error:
            return error


def unchanged(loaded: Any) -> Any:
    """A `collate_fn` for a data set that gives what the loader is to give."""
    return loaded
