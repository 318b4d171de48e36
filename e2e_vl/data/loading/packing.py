"""A batch on its way from a worker: a few large tensors in the place of the many small ones of its images.

Every tensor that leaves a worker takes a file descriptor in both processes, and processes may have no more than 1024
of them in many places. With boxes, features and labels of 256 images in single tensors, the first batches were already
too many; torch's queue then waits for ever and says nothing.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

_Place = tuple[int, int, tuple[int, ...]]  # which of the joined tensors, first entry in it, shape


class PackedBatch(NamedTuple):
    """A batch (or any other picklable value) whose tensors stand apart."""

    content: bytes  # a pickle that names the tensors by their place
    joined: list[Tensor]  # the entries of the largest tensor, then those of all others, a flat tensor for each dtype


def pack(batch: Any) -> PackedBatch:
    """Take out all tensors of a batch and join those of one dtype.

    The largest tensor, which are the pixels, stays alone, because joining is copying.
    """
    tensors = _Collector()
    tensors.dump(batch)
    largest = max(tensors.found, key=lambda one: one.numel() * one.element_size(), default=None)
    joined: list[list[Tensor]] = [[]]  # the first holds the largest
    rows: dict[torch.dtype, int] = {}
    ends = [0]
    places: list[_Place] = []
    for one in tensors.found:
        row = 0 if one is largest else rows.setdefault(one.dtype, len(rows) + 1)
        if row == len(joined):
            joined.append([])
            ends.append(0)
        places.append((row, ends[row], tuple(one.shape)))
        joined[row].append(one.reshape(-1))
        ends[row] += one.numel()
    flat = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in joined if parts]
    return PackedBatch(pickle.dumps((places, tensors.stream.getvalue()), pickle.HIGHEST_PROTOCOL), flat)


def unpack(packed: PackedBatch) -> Any:
    """The batch again; its tensors are parts of the joined ones."""
    places, content = pickle.loads(packed.content)
    parts = [packed.joined[row][start : start + math.prod(shape)].view(shape) for row, start, shape in places]
    return _Filler(content, parts).load()


class _Collector(pickle.Pickler):
    """Pickles a value without its tensors, which it numbers; one that is there twice has one number."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.found: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        super().__init__(self.stream, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.found)
            self.found.append(value)
        return self._numbers[id(value)]


class _Filler(pickle.Unpickler):
    """The other way round; the content comes from a process of our own."""

    def __init__(self, content: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self.tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]
