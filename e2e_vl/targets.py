"""Targets: typed values of one text, and how they are joined into a batch.

Shape legend: see `e2e_vl/structures.py`. Boxes are xyxy float32 in pixels of the resized image.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from detector.structures import Movable


@dataclasses.dataclass
class Ragged(Movable):
    """Concatenated lists of different lengths: `values` holds all entries, `counts` the length of each list."""

    values: Shaped[Tensor, "entries ..."]  # entries: sum of counts
    counts: Int64[Tensor, " lists"]

    def split(self) -> tuple[Tensor, ...]:
        return self.values.split(self.counts.tolist())

    @property
    def owner(self) -> Int64[Tensor, " entries"]:
        """The index of the list of each entry."""
        lists = torch.arange(len(self.counts), device=self.counts.device)
        return torch.repeat_interleave(lists, self.counts, output_size=len(self.values))

    def regroup(self, lists: Ragged) -> Ragged:
        """Return the same values with a list per list of `lists`, each of whose entries owns a list of these."""
        counts = torch.zeros_like(lists.counts).index_add(0, lists.owner, self.counts)
        return Ragged(self.values, counts)


@dataclasses.dataclass
class NamedMasks(Movable):
    """Masks of objects that the texts of a batch name, in pixels of the resized image, padded to the largest one."""

    masks: Bool[Tensor, "masks H W"]
    boxes: Float[Tensor, "masks 4"]
    owner: Int64[Tensor, " masks"]  # the index of the text that names each of them

    @classmethod
    def join(cls, texts: Sequence[tuple[Bool[np.ndarray, "_n _h _w"], Float[np.ndarray, "_n 4"]] | None]) -> NamedMasks:
        """Join the masks and boxes of texts; None: a text without any."""
        masks: list[Tensor] = []
        boxes = [np.zeros((0, 4), dtype=np.float32)]
        owner: list[int] = []
        for number, text in enumerate(texts):
            if text is not None:
                masks += map(torch.from_numpy, text[0])
                boxes.append(text[1])
                owner += [number] * len(text[1])
        height = max((mask.shape[0] for mask in masks), default=1)
        width = max((mask.shape[1] for mask in masks), default=1)
        padded = torch.zeros(len(masks), height, width, dtype=torch.bool)
        for row, mask in zip(padded, masks, strict=True):
            row[: mask.shape[0], : mask.shape[1]] = mask
        return cls(padded, torch.from_numpy(np.concatenate(boxes)), torch.tensor(owner, dtype=torch.int64))


@dataclasses.dataclass
class Targets(Movable):
    """Base class of a task's targets; subclasses are dataclasses with fields made by the functions below."""

    # whether a text has a target of the task; in a batch, one value per text. None: all texts have one
    has_target: bool | Bool[Tensor, " M"] | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def join(cls, texts: Sequence[Targets]) -> Targets:
        joined: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(text, field.name) for text in texts]
            if field.name == "has_target":
                joined[field.name] = torch.tensor([value is not False for value in values]) if False in values else None
            elif all(value is None for value in values):
                joined[field.name] = None
            else:
                joined[field.name] = field.metadata["join"](values)
        return cls(**joined)

    def with_target(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "some ..."]:
        """Select the values of the texts that have a target."""
        return values if self.has_target is None else values[self.has_target]

    def named_boxes(self) -> Ragged | None:
        """Return the boxes [boxes, 4] that the texts of a batch name, a list per text; None: unknown, by default."""
        return None

    def named_masks(self) -> NamedMasks | None:
        """Return the masks of objects that the texts of a batch name; None: unknown, by default."""
        return None

    def truncate(self, index: Int64[Tensor, "M L"], attention_mask: Bool[Tensor, "M L"]) -> Targets:
        """Return a copy for truncated texts; `index` holds the old position of each kept wordpiece."""
        changes = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                changes[field.name] = {name: targets.truncate(index, attention_mask) for name, targets in value.items()}
            elif value is not None and "fill" in field.metadata:
                changes[field.name] = value.gather(1, index).masked_fill(~attention_mask, field.metadata["fill"])
        return dataclasses.replace(self, **changes)

    def labelled_wordpieces(self, text: int) -> list[int]:
        """Return the positions of the labelled wordpieces of one text in a batch."""
        positions: set[int] = set()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                for targets in value.values():
                    positions.update(targets.labelled_wordpieces(text))
            elif value is not None and "fill" in field.metadata:
                is_labelled = value[text] != field.metadata["fill"]
                positions.update(is_labelled.nonzero()[:, 0].tolist())
        return sorted(positions)


def _field(join: Callable[[list[Any]], Any], **more: Any) -> Any:
    return dataclasses.field(default=None, metadata={"join": join, **more})


def stacked() -> Any:
    """Return a field with the same shape [...] for every text; [M, ...] in a batch."""
    return _field(lambda values: torch.from_numpy(np.stack(values)))


def per_wordpiece(fill: int = -1) -> Any:
    """Return an int64 field [L] per text; [M, L] in a batch, padded with `fill`. It is truncated with the text."""

    def pad(values: list[Any]) -> Tensor:
        rows = [torch.from_numpy(np.asarray(value, dtype=np.int64)) for value in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    return _field(pad, fill=fill)


def ragged() -> Any:
    """Return a field [n, ...] per text, where n varies; in a batch, a `Ragged` with one list per text."""
    return _field(join_ragged)


def nested(*row: int) -> Any:
    """Return a field with a list of arrays [n, ...] per text; in a batch, a `Ragged` with one list per array.

    `row` is the shape [...] of one entry, for batches without any array (float32).
    """
    return _field(lambda values: join_ragged(list(itertools.chain.from_iterable(values)), row))


def padded_masks() -> Any:
    """Return a field with a pair of masks bool [n, h, w] and boxes [n, 4] per text, or None; `NamedMasks` in a batch.

    Masks and boxes are in pixels of the resized image, (h, w) in size.
    """
    return _field(NamedMasks.join)


def by_name() -> Any:
    """Return a field with a dict of `Targets` per text; in a batch, a dict of the joined targets."""
    return _field(lambda values: {key: type(values[0][key]).join([v[key] for v in values]) for key in values[0]})


def join_ragged(values: list[Any], row: tuple[int, ...] = ()) -> Ragged:
    arrays = [np.asarray(value) for value in values]
    joined = np.concatenate(arrays) if arrays else np.zeros((0, *row), dtype=np.float32)
    return Ragged(torch.from_numpy(joined), torch.tensor([len(array) for array in arrays], dtype=torch.int64))
