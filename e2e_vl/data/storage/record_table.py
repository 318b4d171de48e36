"""Many small records in a few flat arrays.

A list of a million records is millions of Python objects, and a forked worker that looks at one of them writes into its
count of references. So, page by page, every worker gets a copy of the whole list. In flat arrays there is nothing to
write, all workers share the same pages, and a record takes about a quarter of the memory.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import itertools
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

Record = TypeVar("Record")


class _Records(Sequence, Generic[Record], abc.ABC):
    """What makes a sequence of `_at`."""

    @abc.abstractmethod
    def _at(self, row: int) -> Record:
        """The record of a row from 0 on."""

    def __getitem__(self, row: int | slice) -> Record | list[Record]:
        """A record (IndexError outside, and negative numbers count from the end), or a list of some."""
        rows = range(len(self))[row]
        return [self._at(one) for one in rows] if isinstance(row, slice) else self._at(rows)

    def __iter__(self) -> Iterator[Record]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same records."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None


class RecordTable(_Records[Record]):
    """Records of one dataclass or msgspec Struct, made again whenever one is asked for.

    A field may hold anything that can be pickled. Whole numbers, texts and tuples of texts take least memory: equal
    texts of a field are kept once.

    Args:
        kind: the dataclass or the Struct.
        records: instances of it; they are not kept.
    """

    def __init__(self, kind: type[Record], records: Iterable[Record]) -> None:
        self.kind = kind
        is_struct = issubclass(kind, msgspec.Struct)
        names = kind.__struct_fields__ if is_struct else [field.name for field in dataclasses.fields(kind)]
        builders = [_Builder() for _ in names]
        self._length = 0
        for record in records:
            self._length += 1
            for name, builder in zip(names, builders, strict=True):
                builder.append(getattr(record, name))
        self._columns = {name: builder.finished() for name, builder in zip(names, builders, strict=True)}

    def __len__(self) -> int:
        return self._length

    def _at(self, row: int) -> Record:
        return self.kind(**{name: column[row] for name, column in self._columns.items()})

    def column(self, name: str) -> Sequence[Any]:
        """One field of all records."""
        return self._columns[name]


def text_column(texts: Iterable[str]) -> Sequence[str]:
    """A list of texts, or of other values that are all of one kind, as `RecordTable` keeps them."""
    builder = _Builder()
    for text in texts:
        builder.append(text)
    return builder.finished()


class RowsById:
    """The row of each of some ids, which are whole numbers of 64 bits or texts, in flat arrays.

    Args:
        ids: in the order of their rows; each is there once.
    """

    def __init__(self, ids: Iterable[int | str]) -> None:
        numbers: dict[int, int] = {}
        texts: dict[str, int] = {}
        for row, one in enumerate(ids):
            (texts if isinstance(one, str) else numbers)[one] = row
        parts = [(kind, sorted(kind)) for kind in (numbers, texts)]
        self._rows = [array("q", map(kind.__getitem__, ordered)) for kind, ordered in parts]
        self._ids = array("q", parts[0][1]), text_column(parts[1][1])

    def row(self, one: int | str) -> int | None:
        """The row of an id; None where it is unknown."""
        is_text = isinstance(one, str)
        known = self._ids[is_text]
        place = bisect.bisect_left(known, one)
        return self._rows[is_text][place] if place < len(known) and known[place] == one else None


class JoinedRecords(_Records[Record]):
    """Several sequences as one."""

    def __init__(self, parts: Sequence[Sequence[Record]]) -> None:
        self.parts = list(parts)
        self.starts = array("q", [0, *itertools.accumulate(map(len, parts))])

    def __len__(self) -> int:
        return self.starts[-1]

    def part_of(self, row: int) -> int:
        """The number of the part that has a row."""
        return bisect.bisect_right(self.starts, row) - 1

    def _at(self, row: int) -> Record:
        part = self.part_of(row)
        return self.parts[part][row - self.starts[part]]

    def __iter__(self) -> Iterator[Record]:
        return itertools.chain.from_iterable(self.parts)


class ChosenRecords(_Records[Record]):
    """Some records of a sequence.

    Args:
        rows: which, in their order.
    """

    def __init__(self, records: Sequence[Record], rows: Iterable[int]) -> None:
        self.records = records
        self.rows = array("q", rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _at(self, row: int) -> Record:
        return self.records[self.rows[row]]


class TextGroups(Sequence):
    """Text indices of each image, in the order of first mention.

    Args:
        images: of every text, what its image is called.
    """

    def __init__(self, images: Iterable[Any]) -> None:
        numbers: dict[Any, int] = {}
        image_of = np.fromiter((numbers.setdefault(image, len(numbers)) for image in images), dtype=np.int64)
        self.texts = np.argsort(image_of, kind="stable")
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(image_of, minlength=len(numbers)))])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, group: int | slice) -> list[int] | list[list[int]]:
        if isinstance(group, slice):
            return [self[index] for index in range(*group.indices(len(self)))]
        index = range(len(self))[group]
        return self.texts[self.starts[index] : self.starts[index + 1]].tolist()

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same lists."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None


class _Column(Sequence, abc.ABC):
    """One field of many records."""

    @abc.abstractmethod
    def takes(self, value: Any) -> bool:
        """Append a value if it is of this kind."""

    def finish(self) -> None:
        """No value comes any more."""

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same values."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None


class _Numbers(_Column):
    """Whole numbers of 64 bits."""

    def __init__(self) -> None:
        self.values = array("q")

    def takes(self, value: Any) -> bool:
        if type(value) is not int or not -(2**63) <= value < 2**63:
            return False
        self.values.append(value)
        return True

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> int:
        return self.values[row]


class _Distinct:
    """Different values as bytes, one after the other."""

    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self.encode, self.decode = encode, decode
        self.known: dict[bytes, int] = {}
        self.content, self.ends = b"", array("q", [0])

    def number(self, value: Any) -> int:
        return self.known.setdefault(self.encode(value), len(self.known))

    def finish(self) -> None:
        self.content = b"".join(self.known)
        self.ends.extend(itertools.accumulate(map(len, self.known)))
        self.known = {}

    def __getitem__(self, number: int) -> Any:
        return self.decode(self.content[self.ends[number] : self.ends[number + 1]])


class _Texts(_Column):
    """Texts, or None."""

    def __init__(self) -> None:
        self.numbers, self.distinct = array("i"), _Distinct(_encode, _decode)

    def takes(self, value: Any) -> bool:
        if value is not None and type(value) is not str:
            return False
        self.numbers.append(-1 if value is None else self.distinct.number(value))
        return True

    def finish(self) -> None:
        self.distinct.finish()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> str | None:
        number = self.numbers[row]
        return None if number < 0 else self.distinct[number]


class _TextTuples(_Column):
    """Tuples of texts, or None."""

    def __init__(self) -> None:
        self.ends, self.numbers, self.distinct = array("q", [0]), array("i"), _Distinct(_encode, _decode)

    def takes(self, value: Any) -> bool:
        if type(value) is not tuple or any(type(one) is not str for one in value):
            return False
        self.numbers.extend([self.distinct.number(one) for one in value])
        self.ends.append(len(self.numbers))
        return True

    def finish(self) -> None:
        self.distinct.finish()

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: int) -> tuple[str, ...]:
        return tuple([self.distinct[number] for number in self.numbers[self.ends[row] : self.ends[row + 1]]])


class _Others(_Column):
    """Anything else."""

    def __init__(self) -> None:
        self.numbers, self.distinct = array("i"), _Distinct(pickle.dumps, pickle.loads)

    def takes(self, value: Any) -> bool:
        self.numbers.append(self.distinct.number(value))
        return True

    def finish(self) -> None:
        self.distinct.finish()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> Any:
        return self.distinct[self.numbers[row]]


class _Builder:
    """Chooses the column that takes all values of a field."""

    def __init__(self) -> None:
        self.column: _Column | None = None

    def append(self, value: Any) -> None:
        if self.column is not None and self.column.takes(value):
            return
        before = list(self.finished())
        for kind in (_Numbers, _Texts, _TextTuples, _Others):
            self.column = kind()
            if all(map(self.column.takes, [*before, value])):
                return

    def finished(self) -> Sequence[Any]:
        if self.column is None:
            return ()
        self.column.finish()
        return self.column


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold halves of characters


def _decode(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")
