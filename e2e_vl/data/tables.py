"""Large lists that data workers share without copying, and JSON files that are read as a stream.

A forked worker that looks at a Python object writes its reference count, so a list of a million records is copied into
every worker, page by page. Records that are serialised into one numpy array have no reference counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import ijson
import msgspec
import numpy as np

from detector.errors import MissingFileError, UserError, first_line

Item = TypeVar("Item")


class SerializedList(Sequence, Generic[Item]):
    """A list whose items are serialised with MessagePack into one numpy array and decoded on access.

    Args:
        items: anything that msgspec encodes: texts, numbers, tuples, Structs, dataclasses. They are not kept.
        type: what an item is decoded as. A Struct with `array_like=True` takes least memory, since its field names are
            not stored with every item.
    """

    def __init__(self, items: Iterable[Item], type: Any) -> None:
        encode = msgspec.msgpack.Encoder().encode
        data, ends = bytearray(), array("q", [0])
        for item in items:
            data += encode(item)
            ends.append(len(data))
        self._data = np.frombuffer(bytes(data), dtype=np.uint8)
        self._ends = np.frombuffer(ends, dtype=np.int64)
        self._type = type
        self._decoder = msgspec.msgpack.Decoder(type)

    def __getstate__(self) -> tuple[np.ndarray, np.ndarray, Any]:
        return self._data, self._ends, self._type

    def __setstate__(self, state: tuple[np.ndarray, np.ndarray, Any]) -> None:
        self._data, self._ends, self._type = state
        self._decoder = msgspec.msgpack.Decoder(self._type)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        """An item, or a list of some."""
        rows = range(len(self))[index]
        return [self._item(row) for row in rows] if isinstance(index, slice) else self._item(rows)

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, range(len(self)))

    def _item(self, row: int) -> Item:
        return self._decoder.decode(self._data[self._ends[row] : self._ends[row + 1]])


class RowIndex:
    """The row of each id, in two sorted numpy arrays instead of a dict.

    Args:
        ids: whole numbers or texts, each once; a number and its text (12 and "12") are the same id.
    """

    def __init__(self, ids: Iterable[int | str]) -> None:
        names = np.array([str(one).encode() for one in ids], dtype=np.bytes_)
        self._rows = np.argsort(names, kind="stable")
        self._names = names[self._rows]

    def row(self, id: int | str) -> int | None:
        """The row of an id; None where it is unknown."""
        name = str(id).encode()
        place = int(np.searchsorted(self._names, name))
        return int(self._rows[place]) if place < len(self._names) and self._names[place] == name else None


class TextGroups(Sequence):
    """Text indices of each image, images in the order of first mention.

    Args:
        images: the image of every text, by any name.
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


def stream_list(path: str | Path, type: Any = Any, prefix: str = "item") -> Iterator[Any]:
    """The values of a list in a JSON file of any size, one by one, each converted to `type`.

    Args:
        prefix: where the values lie, as ijson writes it: "item" for a file that is one list, "questions.item" for the
            list under the key "questions".
    """
    return (value for _, value in _stream(path, type, enumerate(_parsed(path, ijson.items, prefix))))


def stream_dict(path: str | Path, type: Any = Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON file of any size that holds one object, each value converted to `type`."""
    return _stream(path, type, _parsed(path, ijson.kvitems, ""))


def _stream(path: str | Path, type: Any, entries: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for key, value in entries:
        try:
            yield key, msgspec.convert(value, type)
        except msgspec.ValidationError as error:
            raise UserError(f"{path}: entry {key}: {error}; correct the file") from error


def _parsed(path: str | Path, parse: Any, prefix: str) -> Iterator[Any]:
    try:
        with open(path, "rb") as file:
            yield from parse(file, prefix, use_float=True)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no such file; check the path in the data config") from error
    except ijson.JSONError as error:
        raise UserError(f"{path} is not valid JSON ({first_line(error)}); copy or download the file again") from error
