"""Batches from a data set, read in this process or in workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from e2e_vl.data.loading.grouping import GroupedBatchSampler
from e2e_vl.data.loading.packing import PackedBatch, pack, unpack
from e2e_vl.data.loading.requests import Request
from e2e_vl.examples import Example
from e2e_vl.samples import BrokenImageError
from e2e_vl.structures import Batch

DATA_ERRORS = (ValueError, OSError)  # what readers raise about files and records


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A request that an evaluation could not fulfil, because an image is missing or cannot be read."""

    images: tuple[str, ...]  # ids of the images of the request
    texts: tuple[int, ...]  # text indices that have no prediction
    reason: str


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
        unreadable: images that are missing or cannot be read are left out and added to it, so a batch may have fewer
            images; None: they are errors, or what `dataset` makes of them.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: GroupedBatchSampler,
        collate: Callable[[list[Example]], Batch],
        *,
        workers: int = 0,
        keep_workers: bool = False,
        unreadable: list[Unreadable] | None = None,
    ) -> None:
        self._unreadable = unreadable
        self._loader = DataLoader(
            _Batches(dataset, collate, leaves_out=unreadable is not None),
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
            if self._unreadable is not None:
                batch, unreadable = batch
                self._unreadable += unreadable
                if batch is None:  # nothing of it is left
                    continue
            yield unpack(batch) if isinstance(batch, PackedBatch) else batch


@dataclasses.dataclass
class _Batches(Dataset):
    dataset: Dataset
    collate: Callable[[list[Example]], Batch]
    leaves_out: bool = False

    def __getitems__(
        self, requests: list[Request]
    ) -> Batch | PackedBatch | tuple[Batch | PackedBatch | None, list[Unreadable]] | Exception:
        """A worker packs its batch. An error travels in its place; with `leaves_out`, what is left out beside it."""
        try:
            if not self.leaves_out:
                return packed(self.collate([self.dataset[request] for request in requests]))
            examples, unreadable = [], []
            for request in requests:
                try:
                    examples.append(self.dataset.read(request))
                except BrokenImageError as error:
                    ids = self.dataset.image_ids_of(request.texts)
                    unreadable.append(Unreadable(ids, request.texts, str(error.__cause__)))
            return (packed(self.collate(examples)) if examples else None), unreadable
        except DATA_ERRORS as error:
            return error


def packed(batch: Batch) -> Batch | PackedBatch:
    """What travels from a worker to the main process: few storages, not one for each tensor of each image."""
    return batch if get_worker_info() is None else pack(batch)


def unchanged(loaded: Any) -> Any:
    """A `collate_fn` for a data set that gives what the loader is to give."""
    return loaded
