"""Large JSON files that hold one object or one list, read entry by entry, so that the whole is never in memory.

Python's own decoder reads one value from a text and says where it ends; that is all it takes. The text is the file
decoded as Latin-1, one character per byte, so that places in it are places in the file, and every entry that holds more
than ASCII is decoded again as UTF-8.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from detector.errors import UserError, reading
from e2e_vl.data.storage.files import require_file
from e2e_vl.data.storage.index_files import OpenFiles
from e2e_vl.json_keys import UNSURE, count_byte, may_escape_colons, repeated_key, write_again

_CHUNK = 1 << 22  # bytes read at once
_LONGEST = 1 << 28  # bytes of an entry; what is longer is a damaged file
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN_KEY = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\r\n]*:[ \t\r\n]*')
_COMMA = re.compile(r'[ \t\r\n]*,[ \t\r\n]*(?=")')  # and then a key
_DECODER = json.JSONDecoder()
_IN_NUMBERS = ".eE+-0123456789"  # a number may go on behind the window
_CLOSING = {"{": "}", "[": "]"}
_Found = TypeVar("_Found")


class JsonEntry(NamedTuple):
    """One key of the object with its value, and where both stand in the file."""

    key: str
    value: Any
    start: int  # byte of the key's opening quote
    size: int  # bytes up to the end of the value


def json_entries(path: str | Path, what: str) -> Iterator[JsonEntry]:
    """The entries of the one object in a JSON file, in their order.

    Args:
        what: names the content in errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, something else than an object, or a key twice in an object within it. The last one is
            found a few megabytes later.
    """
    path = require_file(path, what)
    with reading(path), path.open("rb") as file:
        scanner = _Scanner(file, path, what, "object")
        yield from scanner.inside("{", scanner.entry)


def json_items(path: str | Path, what: str) -> Iterator[Any]:
    """The values of the one list in a JSON file, in their order.

    Args:
        what: names the content in errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, something else than a list, or a key twice in an object, which is found later.
    """
    path = require_file(path, what)
    with reading(path), path.open("rb") as file:
        scanner = _Scanner(file, path, what, "list")
        yield from scanner.inside("[", scanner.item)


def json_members(path: str | Path, what: str, lists: Collection[str]) -> Iterator[tuple[str, Any, bool]]:
    """The entries of the one object in a JSON file; of the named ones, which are long lists, each value by itself
    after an empty list.

    Args:
        what: names the content in errors.
        lists: keys of the lists.

    Yields:
        The key, the value, and whether it is one value of a list.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, something else than an object, or a key twice in an object, which is found later.
    """
    path = require_file(path, what)
    with reading(path), path.open("rb") as file:
        scanner = _Scanner(file, path, what, "object")
        scanner.expect("{")
        seen: set[str] = set()
        for _ in scanner.steps("}"):
            key = scanner.item()
            if not isinstance(key, str):
                raise scanner.broken("a key with a value is expected")
            if key in seen:
                raise scanner.unclear(scanner.at, f"the object has the key {key[:100]!r} twice")
            seen.add(key)
            scanner.expect(":")
            scanner.keys += 1
            if scanner.next_mark() == "[" and key in lists:
                scanner.expect("[")
                yield key, [], False
                for _ in scanner.steps("]"):
                    yield key, scanner.item(), True
            else:
                yield key, scanner.item(), False
        scanner.end()


def read_entry(files: OpenFiles, path: Path, start: int, size: int) -> tuple[str, Any]:
    """Key and value of an entry that `json_entries` found.

    Raises:
        ValueError: the file has changed since.
    """
    try:
        written = (b"{" + files.read(path, start, size) + b"}").decode("utf-8", "surrogatepass")  # as json.loads
        [(key, value)] = _DECODER.decode(written).items()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: has changed while it was in use (entry at byte {start})") from error
    return key, value


class _Scanner:
    """A window over the file that grows until the next entry is whole."""

    def __init__(self, file: Any, path: Path, what: str, kind: str) -> None:
        self.file, self.path, self.what, self.kind = file, path, what, kind
        self.text, self.at, self.before = "", 0, 0  # the window, the place in it, and bytes before the window
        self.is_at_end = False
        # what was read since the last look for keys that are there twice
        self.colons, self.keys, self.values = 0, 0, 0  # colons of all bytes, of the keys read here, of the values
        self.again = bytearray()
        self.starts, self.ends = array("q"), array("q")  # of each part in the window
        self.has_entries, self.is_sure, self.has_escapes = False, True, False

    def inside(self, opening: str, read: Callable[[], _Found]) -> Iterator[_Found]:
        """What `read` gives for each part of the object or list that the file is."""
        self.expect(opening)
        for _ in self.steps(_CLOSING[opening]):
            yield read()
            while comma := _COMMA.match(self.text, self.at):  # as nearly always; the steps do the same slowly
                self.at = comma.end()
                yield read()
        self.end()

    def steps(self, closing: str) -> Iterator[None]:
        """Stops before each part of an object or list, whose opening mark has been read, until behind its end."""
        is_first = True
        while self.next_mark() != closing:
            if not is_first:
                self.expect(",")
                self.next_mark()
            is_first = False
            yield
        self.expect(closing)

    def end(self) -> None:
        if self.next_mark():
            raise self.broken(f"something stands behind the {self.kind}")
        self.look()

    def entry(self) -> JsonEntry:
        plain = self.plain_entry()
        if plain is not None:
            key, value, end = plain
        else:
            (key, value), end = self.whole(self.decode_entry)
        written = self.text[self.at : end]
        if not written.isascii():
            [(key, value)] = self.decode_again("{" + written + "}").items()
        self.note(value, end)
        self.keys += 1 + key.count(":")
        self.has_entries = True
        found = JsonEntry(key, value, self.before + self.at, end - self.at)
        self.at = end
        return found

    def plain_entry(self) -> tuple[str, Any, int] | None:
        """Key, value and end, where the window holds all of a plain entry, as nearly always; `whole` is slower."""
        found = _PLAIN_KEY.match(self.text, self.at)
        if found is None:
            return None
        try:
            value, end = _DECODER.scan_once(self.text, found.end())
        except (StopIteration, ValueError, RecursionError):
            return None
        if end == len(self.text) or self.text[end] in _IN_NUMBERS:
            return None
        return found[1], value, end

    def item(self) -> Any:
        value, end = self.whole(lambda: self.value(self.at))
        written = self.text[self.at : end]
        if not written.isascii():
            value = self.decode_again(written)
        self.note(value, end)
        self.at = end
        return value

    def note(self, value: Any, end: int) -> None:
        """Remember what has been read from the place on, for the next look."""
        self.starts.append(self.at)
        self.ends.append(end)
        try:
            write_again(value, self.again)
        except UNSURE:
            self.is_sure = False
        else:
            self.values += self.again.count(b":")

    def look(self) -> None:
        """Raises UserError if an object that was read since the last look has a key twice (see `json_keys.py`)."""
        left = self.text.count(":", self.at)
        if not self.is_sure or self.colons - left != self.keys + self.values or self.has_escapes:
            for start, end in zip(self.starts, self.ends, strict=True):
                written = self.text[start:end].encode("latin-1").decode("utf-8", "surrogatepass")
                if double := repeated_key(f"{{{written}}}" if self.has_entries else written):
                    raise self.unclear(start, double)
        self.colons, self.keys, self.values, self.is_sure = left, 0, 0, True
        self.starts, self.ends = array("q"), array("q")

    def unclear(self, at: int, double: str) -> UserError:
        return UserError(
            f"{self.path}: the {self.what} are not clear: near byte {self.before + at}, {double}; copy or download the "
            "file again"
        )

    def decode_entry(self) -> tuple[tuple[str, Any], int]:
        key, start = self.key()
        value, end = self.value(start)
        return (key, value), end

    def whole(self, decode: Callable[[], tuple[_Found, int]]) -> tuple[_Found, int]:
        """What `decode` finds at the place, and where it ends, once the window holds all of it."""
        while True:
            try:
                found, end = decode()
            except RecursionError as error:
                raise self.broken("lists within lists, too many to read") from error
            except (IndexError, StopIteration, ValueError) as error:
                if self.is_at_end or len(self.text) - self.at > _LONGEST:
                    raise self.broken(str(error) or "an entry is cut off") from error
            else:
                if self.is_at_end or (end < len(self.text) and self.text[end] not in _IN_NUMBERS):
                    return found, end
            self.read()

    def decode_again(self, written: str) -> Any:
        """The value of a text that holds more than ASCII."""
        try:
            return json.loads(written.encode("latin-1").decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise self.broken("it is not UTF-8 text") from error

    def key(self) -> tuple[str, int]:
        """A key, and where its value begins."""
        found = _PLAIN_KEY.match(self.text, self.at)
        if found:
            return found[1], found.end()
        key, end = self.value(self.at)
        colon = self.skip(end)
        if not isinstance(key, str) or self.text[colon : colon + 1] not in (":", ""):
            raise self.broken("a key with a value is expected")
        return key, self.skip(colon + 1)

    def value(self, at: int) -> tuple[Any, int]:
        return _DECODER.raw_decode(self.text, at)

    def skip(self, at: int) -> int:
        return _SPACE.match(self.text, at).end()

    def next_mark(self) -> str:
        """The next character that is no white space, which stays; empty at the end of the file."""
        while True:
            self.at = self.skip(self.at)
            if self.at < len(self.text) or self.is_at_end:
                return self.text[self.at : self.at + 1]
            self.read()

    def expect(self, mark: str) -> None:
        if self.next_mark() != mark:
            raise self.broken(f"'{mark}' is expected")
        self.at += 1

    def read(self) -> None:
        """Drop what was read and read on: at least as much as is kept, so that long entries are not read too often."""
        self.look()
        kept = self.text[self.at :]
        chunk = self.file.read(max(_CHUNK, len(kept)))
        self.colons += count_byte(b":", chunk)
        self.has_escapes = self.has_escapes or may_escape_colons(kept[-8:].encode("latin-1") + chunk)
        self.before += self.at
        self.text, self.at, self.is_at_end = kept + chunk.decode("latin-1"), 0, not chunk

    def broken(self, why: str) -> UserError:
        return UserError(
            f"{self.path}: the {self.what} are not one JSON {self.kind} (near byte {self.before + self.at}: {why}); "
            "copy or download the file again"
        )
