"""Large lists and files that data workers share without copying.

Reading a Python object changes its reference count, so a list of a million records is copied, page by page, into every
forked worker. Records serialised into one numpy array have no reference counts. For files larger than memory (text
corpora, zip archives, shards), only a numpy index is kept, memory-mapped from disk.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import struct
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError, reading, user_path
from detector.io import decode_json, decode_text, find_encoding, map_file
from e2e_vl.data.table_files import open_table, tabulate
from e2e_vl.io import require_unique

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class SerializedList(Sequence, Generic[Item]):
    """A list whose items are serialised with MessagePack into one numpy array and decoded on access.

    Args:
        items: anything that msgspec can encode: strings, numbers, tuples, Structs, dataclasses.
        type: the type that items are decoded to. A Struct with `array_like=True` takes the least memory, since field
            names are not stored.
    """

    def __init__(self, items: Iterable[Item], type: Any) -> None:
        encoder = msgspec.msgpack.Encoder()
        data = bytearray()
        ends = array("q", [0])
        for item in items:
            data += _encode(encoder, item)
            ends.append(len(data))
        self._data = np.frombuffer(bytes(data), dtype=np.uint8)
        self._ends = np.frombuffer(ends, dtype=np.int64)
        self._type = type

    @classmethod
    def from_arrays(cls, ends: np.ndarray, data: np.ndarray, type: Any) -> Self:
        """Return the list whose `arrays` these are."""
        items = cls([], type)
        items._ends = ends
        items._data = data
        return items

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The position in `encoded` at which each item ends, int64 [items + 1], after a 0; and `encoded`."""
        return self._ends, self._data

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._item(row) for row in range(len(self))[index]]
        return self._item(range(len(self))[index])

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, range(len(self)))

    @property
    def encoded(self) -> np.ndarray:
        """uint8 [bytes]: all items in MessagePack, one after the other."""
        return self._data

    def encoded_item(self, row: int) -> np.ndarray:
        """Return one item in MessagePack, uint8 [bytes]."""
        return self._data[self._ends[row] : self._ends[row + 1]]

    def _item(self, row: int) -> Item:
        return msgspec.msgpack.decode(self.encoded_item(row), type=self._type)


def _encode(encoder: msgspec.msgpack.Encoder, item: Any) -> bytes:
    try:
        return encoder.encode(item)
    except OverflowError as error:
        raise UserError(f"{item}: a number has more than 64 bits; write it as a string") from error


class RowIndex:
    """The row of each unique id, in two sorted numpy arrays instead of a dict; 12 and "12" are the same id."""

    def __init__(self, ids: Iterable[int | str]) -> None:
        names = np.array([str(id).encode() for id in ids], dtype=np.bytes_)
        self._rows = np.argsort(names, kind="stable")
        self._names = names[self._rows]

    @classmethod
    def from_arrays(cls, names: np.ndarray, rows: np.ndarray) -> Self:
        """Return the index whose `arrays` these are."""
        index = cls([])
        index._names = names
        index._rows = rows
        return index

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The sorted ids as bytes [ids], and the row of each, int64 [ids]."""
        return self._names, self._rows

    def row(self, id: int | str) -> int | None:
        """Return the row of an id; None if there is no such id."""
        name = str(id).encode()
        position = int(np.searchsorted(self._names, name))
        if position == len(self._names) or self._names[position] != name:
            return None
        return int(self._rows[position])


class SerializedDict(Generic[Item]):
    """A dict from ids to items, which are serialised as in `SerializedList`; error messages begin with `where`."""

    def __init__(self, items: Iterable[tuple[int | str, Item]], type: Any, where: str) -> None:
        ids: list[int | str] = []

        def values() -> Iterator[Item]:
            for id, item in items:
                ids.append(id)
                yield item

        self._items = SerializedList(values(), type)
        require_unique(map(str, ids), f"{where}: entry")
        self._rows = RowIndex(ids)
        self._where = where

    @classmethod
    def tabulate(
        cls,
        sources: Sequence[Path],
        folder: Path | None,
        read: Callable[[], Iterable[tuple[int | str, Item]]],
        type: type[msgspec.Struct],
        where: str,
    ) -> Self:
        """Make the dict of what `read` reads from annotation files, with the help of a table in `folder`."""
        kind = [type.__name__, *type.__struct_fields__]
        names, rows, ends, data = tabulate(sources, folder, kind, lambda: cls(read(), type, where).arrays)
        items = cls([], type, where)
        items._items = SerializedList.from_arrays(ends, data, type)
        items._rows = RowIndex.from_arrays(names, rows)
        return items

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Those of the ids, see `RowIndex`, and those of the items, see `SerializedList`."""
        return *self._rows.arrays, *self._items.arrays

    def __contains__(self, id: int | str) -> bool:
        return self._rows.row(id) is not None

    def __getitem__(self, id: int | str) -> Item:
        self.require([id])
        return self._items[self._rows.row(id)]

    @property
    def encoded(self) -> np.ndarray:
        """uint8 [bytes]: all items in MessagePack, one after the other."""
        return self._items.encoded

    def encoded_item(self, id: int | str) -> np.ndarray:
        """Return one item in MessagePack, uint8 [bytes]."""
        return self._items.encoded_item(self._rows.row(id))

    def require(self, ids: Iterable[int | str]) -> None:
        """Raise a UserError if an id has no item."""
        for id in ids:
            if id not in self:
                raise UserError(f"{self._where}: no entry {id}; use files of the same split and release")


def fingerprint(contents: Iterable[np.ndarray | list[Any] | dict[str, Any] | None]) -> str:
    """Hash arrays and plain values; equal contents have the same hash in every process and on every machine."""
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    digest = hashlib.blake2b(digest_size=16)
    for value in contents:
        if isinstance(value, np.ndarray):
            digest.update(np.ascontiguousarray(value).data)
        else:
            digest.update(encode(value))
    return digest.hexdigest()


MAX_EXAMPLES = 12  # records that a message lists


def list_examples(records: Sequence[str], count: int | None = None) -> str:
    """Join the first records, and the number of the others, for a message.

    Args:
        count: the number of all records, if `records` are the first ones; None: these are all.
    """
    if count is None:
        count = len(records)
    examples = "; ".join(records[:MAX_EXAMPLES])
    hidden = count - MAX_EXAMPLES
    if hidden > 0:
        return f"{examples} and {hidden:,} more"
    return examples


class SkippedRecords:
    """Counts the records of a file that a reader skips, and logs the counts with examples."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, reason: str, record: int | str) -> None:
        """Count a skipped record.

        Args:
            reason: a plural, such as "refs without a sentence".
            record: the id of the record, or its line.
        """
        self._counts[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(str(record))

    def log(self) -> None:
        """Log one warning for each reason."""
        for reason, count in self._counts.items():
            examples = list_examples(self._examples[reason], count)
            logger.warning("%s: skipped %s %s: %s", self._path, f"{count:,}", reason, examples)


def drop_repeats(records: Iterable[Item], skipped: SkippedRecords, what: str) -> Iterator[Item]:
    """Yield the records without exact repeats of an earlier one.

    A record that repeats an id with other contents is not dropped; `require_unique` refuses it afterwards. Only hashes
    of the records are kept, since there may be more records than fit into memory.

    Args:
        records: Structs with an `id`.
        what: the plural of the records for the log, such as "questions".
    """
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    first_hashes: dict[int | str, bytes] = {}
    for record in records:
        content_hash = hashlib.blake2b(_encode(encoder, record), digest_size=16).digest()
        if record.id not in first_hashes:
            first_hashes[record.id] = content_hash
        elif first_hashes[record.id] == content_hash:
            skipped.add(f"{what} that repeat an earlier one", record.id)
            continue
        yield record


class TextGroups(Sequence):
    """Text indices of each image, in two numpy arrays.

    `texts` int64 [texts] has those of the first image, then the second, ...; `counts` int [images]: how many texts each
    image has.
    """

    def __init__(self, texts: np.ndarray, counts: Sequence[int] | np.ndarray) -> None:
        self.texts = texts
        # of each text in `texts`, which may be some of many
        self._position_of = np.full(texts.max(initial=-1) + 1, -1)
        self._position_of[texts] = np.arange(len(texts))
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))])

    @classmethod
    def of_images(cls, images: Iterable[Any]) -> TextGroups:
        """Make groups from the image of each text; images are in the order of first mention."""
        numbers: dict[Any, int] = {}
        image_of = np.fromiter((numbers.setdefault(image, len(numbers)) for image in images), dtype=np.int64)
        return cls(np.argsort(image_of, kind="stable"), np.bincount(image_of, minlength=len(numbers)))

    @classmethod
    def of_lists(cls, groups: Sequence[Sequence[int]]) -> TextGroups:
        """Make groups from a list of text indices per image."""
        counts = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
        texts = np.fromiter(itertools.chain.from_iterable(groups), dtype=np.int64, count=int(counts.sum()))
        return cls(texts, counts)

    @classmethod
    def consecutive(cls, counts: Sequence[int] | np.ndarray) -> TextGroups:
        """Make groups of texts that are numbered image by image, from the number of texts of each image."""
        return cls(np.arange(int(np.sum(counts))), counts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def group_of(self, text: int) -> int:
        """Return the index of the group that a text belongs to."""
        return int(np.searchsorted(self.starts, self._position_of[text], side="right")) - 1

    def __getitem__(self, group: int | slice) -> list[int] | list[list[int]]:
        if isinstance(group, slice):
            return [self[index] for index in range(*group.indices(len(self)))]
        index = range(len(self))[group]
        return self.texts[self.starts[index] : self.starts[index + 1]].tolist()


def stream_list(path: str | Path, type: Any = Any, key: str = "") -> Iterator[Any]:
    """Yield the values of a list in a JSON file of any size, decoded one by one from the memory-mapped file.

    Args:
        type: the type that values are decoded to.
        key: that of the list if the file is an object.
    """
    content = map_file(path)
    if key:
        entries = decode_json(content, str(path), dict[str, msgspec.Raw])
        if key not in entries:
            raise UserError(f"{path} has no '{key}'; use another file")
        content = entries[key]
    for number, value in enumerate(decode_json(content, str(path), list[msgspec.Raw])):
        yield decode_json(value, f"{path}: entry {number}", type)


def stream_dict(path: str | Path, type: Any = Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a JSON object in a file of any size; see `stream_list`."""
    for key, value in decode_json(map_file(path), str(path), dict[str, msgspec.Raw]).items():
        yield key, decode_json(value, f"{path}: entry {key}", type)


def stream_lines(path: str | Path, type: Any = Any) -> Iterator[Any]:
    """Yield the values of a file with one JSON value per line, each decoded as `type`; blank lines are skipped."""
    path = user_path(path)
    require_utf8(path)
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield decode_json(line, f"{path}, line {number}", type)


def require_utf8(path: Path) -> None:
    """Raise a UserError if a file that is read line by line is in another Unicode encoding."""
    with reading(path):
        encoding = find_encoding(read_range(path, 0, 4))
    if not encoding.startswith("utf-8"):
        raise UserError(f"{path}: the encoding is {encoding.upper()}; save the file as UTF-8")


def cached_array(sources: Sequence[Path], folder: Path, kind: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return an index of files, which a table in `folder` keeps, see `open_table`."""
    try:
        (index,) = open_table(sources, folder, [kind], lambda: [make()])
    except PermissionError as error:
        raise UserError(
            f"{folder}: the index of {sources[0]} cannot be written here; set data.config.cache to a writable folder"
        ) from error
    return index


def read_range(path: Path, offset: int, size: int = -1) -> bytes:
    """Read bytes of a file (-1: up to its end), reopened because forked workers must not share a file position."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


class TextLines(Sequence):
    """The non-blank lines of a UTF-8 text file of any size; only an index is kept, memory-mapped from `cache`."""

    def __init__(self, path: str | Path, cache: str | Path) -> None:
        self.path = user_path(path)
        with reading(self.path):
            self._starts = cached_array([self.path], Path(cache), "lines", self._find_lines)

    def _find_lines(self) -> np.ndarray:
        """Return int64 [n], the offsets of the non-blank lines."""
        require_utf8(self.path)
        starts = array("q")
        position = 0
        size = self.path.stat().st_size
        title = f"indexing {self.path.name}"
        with self.path.open("rb") as file, tqdm(total=size, desc=title, unit="B", unit_scale=True, delay=1) as bar:
            for line in file:
                if line.strip():
                    starts.append(position)
                position += len(line)
                bar.update(len(line))
        if not starts:
            raise UserError(f"{self.path} has no text")
        return np.array(starts)

    @property
    def offsets(self) -> np.ndarray:
        """The byte at which each line begins, int64 [lines]."""
        return self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> str:
        """Read a line, stripped of whitespace."""
        with self.path.open("rb") as file:
            file.seek(int(self._starts[range(len(self))[number]]))
            return decode_text(file.readline(), f"{self.path}, line {number + 1}").strip()


class Archives:
    """Reads `folder/archive.zip@/member`: from the archive if it exists, otherwise from the unpacked folder.

    `zipfile` keeps about a kilobyte per member in every process that opens an archive. Here one process writes an index
    of the members to the folder `cache`, which all processes memory-map. Names are relative to `root`.
    """

    def __init__(self, root: str | Path, cache: str | Path) -> None:
        self.root = Path(root)
        self.cache = Path(cache)
        self._indices: dict[Path, np.ndarray] = {}

    def find(self, name: str) -> Path | tuple[Path, str]:
        """Return the path of a file, or of an archive and the name of its member."""
        file_name, marker, member = name.partition("@")
        path = self.root / file_name
        if not marker:
            if not path.is_file():
                raise MissingFileError(f"{self.root / name} does not exist")
            return path
        member = member.lstrip("/")
        if path.is_file():
            return path, member
        unpacked = path.with_suffix("")
        # the parts of an archive (train_frcnn.0.zip ...) are unpacked into one folder
        unpacked_parts = path.with_name(re.sub(r"\.\d+$", "", path.stem))
        for folder in (unpacked, unpacked_parts):
            if (folder / member).is_file():
                return folder / member
        raise MissingFileError(f"{self.root / name} does not exist, nor its unpacked folder")

    def read(self, name: str) -> bytes:
        """Return the contents of a file or member; the checksum of a member is verified."""
        location = self.find(name)
        if isinstance(location, Path):
            return location.read_bytes()
        archive, member = location
        if archive not in self._indices:
            self._indices[archive] = cached_array([archive], self.cache, "zip", lambda: _list_members(archive))
        index = self._indices[archive]
        row = int(np.searchsorted(index[0], hash_name(member)))
        if row == index.shape[1] or index[0, row] != hash_name(member):
            raise MissingFileError(f"{archive} has no member {member}; download the archive again")
        _, offset, size, method, checksum = index[:, row].tolist()
        # the fields in a local header may be longer than those in the central directory
        name_length, extra_length = struct.unpack("<26x2H", read_range(archive, offset, 30))
        content = read_range(archive, offset + 30 + name_length + extra_length, size)
        if method == zipfile.ZIP_DEFLATED:
            content = zlib.decompress(content, -zlib.MAX_WBITS)
        if zlib.crc32(content) != checksum:
            raise UserError(f"{archive}: the member {member} is damaged (wrong checksum); download the archive again")
        return content


def _list_members(archive: Path) -> np.ndarray:
    """Return int64 [5, members], sorted by the hash of the name: hash, offset, compressed size, method, CRC-32."""
    with reading(archive, zipfile.BadZipFile), zipfile.ZipFile(archive) as file:
        members = [member for member in file.infolist() if not member.is_dir()]
    checksums: dict[str, int] = {}
    for member in members:
        if checksums.setdefault(member.filename, member.CRC) != member.CRC:
            raise UserError(f"{archive}: two different members have the name {member.filename}; remove one of them")
    rows = []
    for member in members:
        name_hash = hash_name(member.filename)
        rows.append((name_hash, member.header_offset, member.compress_size, member.compress_type, member.CRC))
    return np.array(sorted(rows), dtype=np.int64).T.copy()


def hash_name(name: str) -> int:
    """Hash a name to 64 bits, alike in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
