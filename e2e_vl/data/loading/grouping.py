"""Batches of images with several of their texts, so that the detector runs once per image.

A *group* is one image with at most `texts_per_image` of its texts. Sampling groups instead of texts changes nothing but
the order in which texts are seen; `texts_per_image=1` is the sampling of the papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from detector.errors import UserError
from e2e_vl.data.loading.requests import Request


class ConsecutiveGroups(Sequence):
    """Groups whose texts are numbered one after the other, without a Python object for each of them.

    Args:
        counts: int [groups], texts of each group.
    """

    def __init__(self, counts: Sequence[int] | np.ndarray) -> None:
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def num_texts(self) -> int:
        """Texts of all groups."""
        return int(self.starts[-1])

    def of_text(self, text: int) -> int:
        """The group of a text."""
        return int(np.searchsorted(self.starts, text, side="right")) - 1

    def __getitem__(self, group: int | slice) -> range | list[range]:
        if isinstance(group, slice):
            return [self[index] for index in range(*group.indices(len(self)))]
        index = range(len(self))[group]  # IndexError outside, and negative numbers count from the end
        return range(int(self.starts[index]), int(self.starts[index + 1]))


class GroupedBatchSampler(Sampler[list[Request]]):
    """Yields the `Request`s of one process for each batch; made for `DataLoader(batch_sampler=...)`.

    Every text is seen once an epoch, and the batches do not depend on the number of processes.

    With `shuffle` (training), the texts of an image and the groups are in random order, which depends on (seed, epoch)
    only. Each rank takes its slice of every batch: the slices of ranks 0, 1, ... joined are the batch of one process.
    The end of an epoch is filled up from the start of its order: all batches have the same size, all ranks equal work,
    and all optimiser steps `accumulate` batches.

    Without (evaluation), groups keep their order, nothing is repeated, and the last batch may be smaller. Whole batches
    are dealt to the ranks in turn, because the features of a box depend a little on the padding, so on the other images
    of its batch. Ranks may differ by one batch.

    Args:
        groups: text indices of each image (`dataset.groups`).
        images_per_batch: groups in a batch; with `shuffle` over all processes, so a multiple of `world_size`.
        texts_per_image: most texts in a group; None = all texts of the image.
        accumulate: batches of one optimiser step; with `shuffle` an epoch has a multiple of it.

    Raises:
        ValueError: a number that does not fit, or nothing to sample from.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        images_per_batch: int,
        texts_per_image: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if images_per_batch < 1 or (shuffle and images_per_batch % world_size):
            raise UserError(
                f"images_per_batch is {images_per_batch}, which cannot be split evenly over {world_size} processes; "
                "choose a multiple of the number of processes"
            )
        if texts_per_image is not None and texts_per_image < 1:
            raise UserError(f"texts_per_image is {texts_per_image}; choose a positive number, or null for all texts")
        if accumulate < 1:
            raise UserError(f"accumulate is {accumulate}; choose a positive number of batches")
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank} does not exist among {world_size} processes")
        self._texts, starts = _flat(groups)
        if not len(self._texts):
            raise UserError("there are no texts to sample from; check the split and the annotation files")
        self.images_per_batch = images_per_batch
        self.texts_per_image = texts_per_image
        self.seed = seed
        self.shuffle = shuffle
        self.accumulate = accumulate if shuffle else 1
        self.rank = rank
        self.world_size = world_size
        counts = np.diff(starts)
        parts = np.minimum(counts, 1) if texts_per_image is None else -(-counts // texts_per_image)
        self.num_groups = int(parts.sum())
        self._starts = starts  # of the texts of each group in `_texts`
        # of each part of a group, the group and where its texts begin
        self._group_of = np.repeat(np.arange(len(counts)), parts)
        number_in_group = np.arange(self.num_groups) - np.repeat(np.cumsum(parts) - parts, parts)
        self._first = starts[self._group_of] + number_in_group * (texts_per_image or 0)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Go to an epoch, from its beginning or from batch `start_batch` (counted over all ranks), to resume there."""
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise UserError(f"cannot start at batch {start_batch}, an epoch has {self.batches_per_epoch} batches")
        self.epoch = epoch
        self.start_batch = start_batch

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, over all ranks."""
        per_step = self.images_per_batch * self.accumulate
        return -(-self.num_groups // per_step) * self.accumulate

    def __len__(self) -> int:
        """Batches this rank will yield: its own from `start_batch` to the end of the epoch."""
        return len(self._own_batches())

    def __iter__(self) -> Iterator[list[Request]]:
        order, texts = self._epoch_order()
        share = self.images_per_batch // self.world_size
        for batch in self._own_batches():
            first, last = batch * self.images_per_batch, (batch + 1) * self.images_per_batch
            if self.shuffle:
                first, last = first + self.rank * share, first + (self.rank + 1) * share
                numbers = order[np.arange(first, last) % len(order)]  # the end is filled up from the start
            else:
                numbers = order[first:last]
            yield [self._request(int(number), texts) for number in numbers]

    def _request(self, number: int, texts: np.ndarray) -> Request:
        """One part of a group, as an order that `_epoch_order` gave has its texts."""
        group, first = int(self._group_of[number]), int(self._first[number])
        last = int(self._starts[group + 1])
        if self.texts_per_image is not None:
            last = min(last, first + self.texts_per_image)
        return Request(group, tuple(texts[first:last].tolist()), self.epoch)

    def _own_batches(self) -> range:
        """Numbers of the batches this rank has a part in."""
        if self.shuffle:
            return range(self.start_batch, self.batches_per_epoch)
        first = self.start_batch + (self.rank - self.start_batch) % self.world_size
        return range(first, self.batches_per_epoch, self.world_size)

    def _epoch_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Order of the parts of groups, and all texts, in random order within each group."""
        if not self.shuffle:
            return np.arange(self.num_groups), self._texts
        generator = np.random.default_rng([self.seed, self.epoch])
        texts = self._texts.copy()
        for group in np.flatnonzero(np.diff(self._starts) > 1):  # one text needs no order and draws nothing
            first, last = self._starts[group], self._starts[group + 1]
            texts[first:last] = texts[first:last][generator.permutation(last - first)]
        return generator.permutation(self.num_groups), texts


def _flat(groups: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All texts int64 [texts], and where the texts of each group begin, int64 [groups + 1]."""
    if isinstance(groups, ConsecutiveGroups):
        return np.arange(groups.num_texts), groups.starts
    counts = np.fromiter((len(texts) for texts in groups), dtype=np.int64, count=len(groups))
    texts = np.fromiter((text for texts in groups for text in texts), dtype=np.int64, count=int(counts.sum()))
    return texts, np.concatenate([[0], np.cumsum(counts)])
