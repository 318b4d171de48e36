"""What a task learns from: typed values of one text, and how the values of a batch are joined.

A task declares a dataclass whose fields say how they are joined:

    @dataclasses.dataclass
    class ReferringTargets(Targets):
        box: Float[Tensor, "M 4"] | Float[np.ndarray, " 4"] | None = stacked()

An instance for one text holds arrays or numbers, the instance for a batch that `join` returns holds tensors.

A text of joined data sets may have no target of the task at all, only phrases (`SampleText.may_lack_target`). It is
`known=False` and holds values of the usual shapes that mean nothing; losses look only at the rows that `with_target`
leaves.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from detector.errors import UserError
from detector.structures import Movable


@dataclasses.dataclass
class Ragged(Movable):
    """Lists of different lengths, joined: `values` holds all entries, `counts` how many belong to each list."""

    values: Shaped[Tensor, "entries ..."]  # entries: sum of counts
    counts: Int64[Tensor, " lists"]

    def split(self) -> tuple[Tensor, ...]:
        """The lists."""
        return self.values.split(self.counts.tolist())

    @property
    def owner(self) -> Int64[Tensor, " entries"]:
        """Which list an entry belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.counts), device=self.counts.device), self.counts)


@dataclasses.dataclass
class Targets(Movable):
    """Base class of a task's targets; subclasses are dataclasses with fields made by the functions below.

    Attributes:
        known: of a text False where it has no target of the task; of a batch False for these texts. None: no text
            lacks one.
    """

    known: bool | Bool[Tensor, " M"] | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def join(cls, texts: Sequence[Targets]) -> Targets:
        """The targets of M texts, in their order.

        Raises:
            UserError: a value that some texts have and others lack, or values of different shapes.
        """
        joined = {"known": _join_known([text.known for text in texts])}
        for field in dataclasses.fields(cls):
            if field.name == "known":
                continue
            values = [getattr(text, field.name) for text in texts]
            missing = [value is None for value in values]
            if any(missing) and not all(missing):
                raise UserError(
                    f"{cls.__name__}: {field.name} is known for some texts of a batch and unknown for others; use data "
                    "of one kind."
                )
            joined[field.name] = (
                None if all(missing) else field.metadata["join"](values, f"{cls.__name__}.{field.name}")
            )
        return cls(**joined)

    def with_target(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "known ..."]:
        """Of values per text of a batch those of the texts that have a target; without others the same tensor."""
        return values if self.known is None else values[self.known]

    def cut(self, index: Int64[Tensor, "M L"], attend: Bool[Tensor, "M L"]) -> Targets:
        """A copy for shortened texts; `index` holds the old position of each wordpiece that stays."""
        changes = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                changes[field.name] = {name: one.cut(index, attend) for name, one in value.items()}
            elif value is not None and "fill" in field.metadata:
                changes[field.name] = value.gather(1, index).masked_fill(~attend, field.metadata["fill"])
        return dataclasses.replace(self, **changes)

    def labelled_wordpieces(self, text: int) -> list[int]:
        """Positions of one text of a batch whose wordpieces have a label."""
        found: set[int] = set()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                found |= {position for one in value.values() for position in one.labelled_wordpieces(text)}
            elif value is not None and "fill" in field.metadata:
                found |= set((value[text] != field.metadata["fill"]).nonzero()[:, 0].tolist())
        return sorted(found)


def _join_known(known: Sequence[bool | None]) -> Bool[Tensor, " M"] | None:
    return torch.tensor([one is not False for one in known]) if False in known else None


def _field(join: Callable[[list[Any], str], Any], **more: Any) -> Any:
    return dataclasses.field(default=None, metadata={"join": join, **more})


def stacked() -> Any:
    """A field of one shape [...] per text; of a batch [M, ...]."""
    return _field(_stack)


def per_wordpiece(fill: int = -1) -> Any:
    """A field int64 [L] per text; of a batch [M, L], with `fill` at padding. It is cut with the text."""
    return _field(lambda values, name: _pad(values, fill), fill=fill)


def ragged() -> Any:
    """A field [n, ...] per text with another n in each; of a batch `Ragged` with a list per text."""
    return _field(_ragged)


def nested(*row: int) -> Any:
    """A field that is a list of arrays [n, ...] per text; of a batch, `Ragged` with a list per array, text by text.

    Args:
        row: the shape [...] of one entry, for batches without any array; they are then float32.
    """
    return _field(lambda values, name: _ragged([array for arrays in values for array in arrays], name, row))


def by_name() -> Any:
    """A field that is a dict of `Targets` per text; of a batch a dict of the joined ones."""
    return _field(lambda values, name: {key: type(values[0][key]).join([v[key] for v in values]) for key in values[0]})


def _stack(values: list[Any], name: str) -> Tensor:
    arrays = [np.asarray(value) for value in values]
    _require_one_shape({array.shape for array in arrays}, name)
    return torch.from_numpy(np.stack(arrays))


def _pad(values: list[Any], fill: int) -> Tensor:
    rows = [torch.from_numpy(np.asarray(value, dtype=np.int64)) for value in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def _ragged(values: list[Any], name: str, row: tuple[int, ...] = ()) -> Ragged:
    arrays = [np.asarray(value) for value in values]
    _require_one_shape({array.shape[1:] for array in arrays}, f"a row of {name}")
    joined = np.concatenate(arrays) if arrays else np.zeros((0, *row), dtype=np.float32)
    return Ragged(torch.from_numpy(joined), torch.tensor([len(array) for array in arrays], dtype=torch.int64))


def _require_one_shape(shapes: set[tuple[int, ...]], name: str) -> None:
    if len(shapes) > 1:
        raise UserError(f"{name} has different shapes in one batch: {sorted(shapes)}.")
