"""Batches of images with several of their texts, so that the detector runs once per image.

A *group* is one image with at most `texts_per_image` of its texts. Sampling groups instead of texts changes nothing but
the order in which texts are seen; `texts_per_image=1` is the sampling of the papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from e2e_vl.data.examples import Request


class GroupedBatchSampler(Sampler[list[Request]]):
    """Yields the `Request`s of one process for each batch; made for `DataLoader(batch_sampler=...)`.

    Every text is seen once an epoch, and the batches do not depend on the number of processes.

    With `shuffle` (training), the texts of an image and the groups are in random order, which depends on (seed, epoch)
    only. Each rank takes its slice of every batch: the slices of ranks 0, 1, ... joined are the batch of one process.
    The end of an epoch is filled up from the start of its order: all batches have the same size, all ranks equal work,
    and all optimiser steps `accumulate` batches.

    Without (evaluation), the order is that of `groups`, nothing is repeated, and the last batch may be smaller. Whole
    batches are dealt to the ranks in turn, because the features of a box depend a little on the padding, so on the
    other images of its batch. Ranks may differ by one batch.

    Args:
        groups: text indices of each image (`dataset.groups`).
        images_per_batch: groups in a batch; with `shuffle` over all processes, so a multiple of `world_size`.
        texts_per_image: most texts in a group; None = all texts of the image.
        seed: of the order.
        shuffle: True in training.
        accumulate: batches of one optimiser step; with `shuffle` an epoch has a multiple of it.
        rank: index of this process.
        world_size: number of processes.
        start_batch: batches (counted over all ranks) to leave out at the start of the current epoch, to resume in its
            middle.
        epoch: the current epoch.

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
        start_batch: int = 0,
        epoch: int = 0,
    ) -> None:
        if images_per_batch < 1 or (shuffle and images_per_batch % world_size):
            raise ValueError(
                f"images_per_batch is {images_per_batch}, which cannot be split evenly over {world_size} processes; "
                "choose a multiple of the number of processes"
            )
        if texts_per_image is not None and texts_per_image < 1:
            raise ValueError(f"texts_per_image is {texts_per_image}; choose a positive number, or null for all texts")
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}; choose a positive number of batches")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist among {world_size} processes")
        self.groups = [tuple(texts) for texts in groups if len(texts)]
        if not self.groups:
            raise ValueError("there are no texts to sample from; check the split and the annotation files")
        self.images_per_batch = images_per_batch
        self.texts_per_image = texts_per_image
        self.seed = seed
        self.shuffle = shuffle
        self.accumulate = accumulate if shuffle else 1
        self.rank = rank
        self.world_size = world_size
        self.num_groups = sum(-(-len(texts) // (texts_per_image or len(texts))) for texts in self.groups)
        self._group_index = [index for index, texts in enumerate(groups) if len(texts)]
        self.set_epoch(epoch, start_batch)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Go to an epoch, from its beginning or from batch `start_batch`."""
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise ValueError(f"cannot start at batch {start_batch}, an epoch has {self.batches_per_epoch} batches")
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
        order = self._epoch_order()
        share = self.images_per_batch // self.world_size
        for batch in self._own_batches():
            requests = order[batch * self.images_per_batch : (batch + 1) * self.images_per_batch]
            yield requests[self.rank * share : (self.rank + 1) * share] if self.shuffle else requests

    def _own_batches(self) -> range:
        """Numbers of the batches this rank has a part in."""
        if self.shuffle:
            return range(self.start_batch, self.batches_per_epoch)
        first = self.start_batch + (self.rank - self.start_batch) % self.world_size
        return range(first, self.batches_per_epoch, self.world_size)

    def _epoch_order(self) -> list[Request]:
        generator = np.random.default_rng([self.seed, self.epoch])
        order = []
        for group, texts in zip(self._group_index, self.groups, strict=True):
            size = self.texts_per_image or len(texts)
            texts = [texts[i] for i in generator.permutation(len(texts))] if self.shuffle else texts
            order += [Request(group, tuple(texts[i : i + size]), self.epoch) for i in range(0, len(texts), size)]
        if self.shuffle:
            order = [order[i] for i in generator.permutation(len(order))]
            missing = self.batches_per_epoch * self.images_per_batch - len(order)
            order += [order[i % len(order)] for i in range(missing)]
        return order
