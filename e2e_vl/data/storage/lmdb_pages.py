"""Reading an LMDB file without mapping it.

LMDB maps its file into memory and trusts every page of it: a file that was cut off ends the process by SIGBUS, and a
damaged page may end it by SIGSEGV, which no program can turn into a sentence. Here pages are read like those of any
file, and each number on them is compared with the length of the file. One database of plain keys and values is read, as
`write_lmdb` writes it, on a machine of 64 bits with the lower byte first.

    page 0, 1   meta: magic, version, the trees of free pages and of keys, last page, number of the transaction
    branch      nodes with the numbers of the pages below
    leaf        nodes with a key and its value, or the number of the page where a long value begins
    overflow    the pages of a long value, one after the other
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from detector.errors import reading

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE = struct.Struct("<Q2xHHH")  # number of the page, flags, lower and upper bound of its free room
_META = struct.Struct("<II")  # magic, version; address and size of the map follow
_TREE = struct.Struct("<IHHQQQQQ")  # size of pages, flags, depth, pages of three kinds, entries, number of the root
_LAST = struct.Struct("<QQ")  # last page, number of the transaction
_META_AT, _FREE_AT, _MAIN_AT, _LAST_AT = 16, 40, 88, 136
_META_BYTES = 152
_NODE = struct.Struct("<HHHH")  # two halves of a length, flags, bytes of the key
_NUMBER = struct.Struct("<Q")  # of the page of a long value
_BRANCH, _LEAF = 1, 2  # flags of pages
_LONG = 1  # flag of a node whose value has pages of its own
_SEVERAL_VALUES = 4  # flag of a tree
_DEEPEST = 32  # pages from the root to a leaf
_NO_PAGE = (1 << 64) - 1


class DamagedLmdbError(Exception):
    """Why a file is not a readable LMDB file, as part of a sentence."""


Place = tuple[int, int]  # of a value: its offset in the file, and its bytes


class _Meta(NamedTuple):
    page_size: int
    entries: int
    root: int  # number of a page
    transaction: int


def find_values(path: Path) -> dict[bytes, Place]:
    """The keys of an LMDB file in their order, and where their values lie.

    Raises:
        DamagedLmdbError: the file is cut off or damaged, or holds something other than plain keys and values.
        OSError: it cannot be read.
    """
    length = path.stat().st_size
    with reading(path), path.open("rb") as file:
        meta = _read_meta(file, length)
        if meta.root == _NO_PAGE:
            return {}
        found = _walk(file, meta, length)
    if len(found) != meta.entries:
        raise DamagedLmdbError(f"it has {len(found)} entries, and its header says {meta.entries}")
    return found


def _read_meta(file: BinaryIO, length: int) -> _Meta:
    """The newer one of the two meta pages."""
    first = _parse_meta(file.read(_META_BYTES))
    page_size = first.page_size
    if page_size < 512 or page_size > 1 << 16 or page_size & (page_size - 1):
        raise DamagedLmdbError(f"its pages claim {page_size} bytes")
    file.seek(page_size)
    second = _parse_meta(file.read(_META_BYTES))
    meta = max(first, second, key=lambda one: one.transaction)
    if meta.page_size != page_size:
        raise DamagedLmdbError(f"its pages claim {page_size} and {meta.page_size} bytes")
    if meta.root != _NO_PAGE and (meta.root + 1) * page_size > length:
        raise DamagedLmdbError(f"it is cut off: its root is page {meta.root}, and it ends at byte {length}")
    return meta


def _parse_meta(data: bytes) -> _Meta:
    if len(data) < _META_BYTES or _META.unpack_from(data, _META_AT) != (_MAGIC, _VERSION):
        raise DamagedLmdbError("it does not begin like an LMDB file of version 1, with two pages about it")
    page_size = _TREE.unpack_from(data, _FREE_AT)[0]
    _, flags, _, _, _, _, entries, root = _TREE.unpack_from(data, _MAIN_AT)
    if flags & _SEVERAL_VALUES:
        raise DamagedLmdbError("its keys have several values")
    return _Meta(page_size, entries, root, _LAST.unpack_from(data, _LAST_AT)[1])


def _walk(file: BinaryIO, meta: _Meta, length: int) -> dict[bytes, Place]:
    """Keys and places of the tree; every page is read once, or the file is damaged."""
    found: dict[bytes, Place] = {}
    size, left = meta.page_size, length // meta.page_size
    waiting = [(meta.root, 1)]
    while waiting:
        number, depth = waiting.pop()
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise DamagedLmdbError("its pages form no tree")
        if (number + 1) * size > length:
            raise DamagedLmdbError(f"it is cut off or damaged: page {number} lies behind its end")
        file.seek(number * size)
        page = file.read(size)
        own, flags, lower, upper = _PAGE.unpack_from(page)
        count = (lower - _PAGE.size) // 2
        if own != number or not _PAGE.size <= lower <= upper <= size or flags & (_BRANCH | _LEAF) not in (1, 2):
            raise DamagedLmdbError(f"page {number} is damaged")
        offsets = struct.unpack_from(f"<{count}H", page, _PAGE.size)
        if count and not upper <= min(offsets) <= max(offsets) <= size - _NODE.size:
            raise DamagedLmdbError(f"page {number} is damaged")
        if flags & _LEAF:
            _add_leaf(found, page, offsets, number, length)
        else:
            waiting += [(_page_below(page, offset), depth + 1) for offset in reversed(offsets)]
    return found


def _page_below(page: bytes, offset: int) -> int:
    low, high, higher, _ = _NODE.unpack_from(page, offset)
    return low | high << 16 | higher << 32


def _add_leaf(found: dict[bytes, Place], page: bytes, offsets: tuple[int, ...], number: int, length: int) -> None:
    size, unpack, unpack_number = len(page), _NODE.unpack_from, _NUMBER.unpack_from
    for offset in offsets:
        low, high, flags, key_bytes = unpack(page, offset)
        value, start = low | high << 16, offset + 8 + key_bytes
        if flags == _LONG and start + 8 <= size:
            place = unpack_number(page, start)[0] * size + 16  # behind the page's head
            if place + value > length:
                raise DamagedLmdbError(f"it is cut off or damaged: a value of {value} bytes lies behind its end")
        elif flags == 0 and start + value <= size:
            place = number * size + start
        else:
            raise DamagedLmdbError(f"page {number} is damaged")
        found[page[offset + 8 : start]] = (place, value)
