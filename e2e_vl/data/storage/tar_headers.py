"""The members of a tar file, read without trusting it.

`tarfile` reads as many bytes as a header of extended names claims, searches them with regular expressions that take
hours or gigabytes for some texts, follows a chain of such headers by recursion, and ends without a word at a header
that it cannot read. Here every number is compared with the length of the file, and whatever an archive of images and
captions does not need is refused: links, devices, gaps, and extended headers that state a size. From `tarfile` comes
only how the fields of one header are read.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512
LONGEST_EXTENSION = 1 << 16  # bytes of a header of extended names or times; names are a few hundred bytes long
MOST_EXTENSIONS = 8  # of one member
MOST_RECORDS = 100  # of one extended header
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_RECORDS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a file with gaps",
}
_LENGTH = re.compile(rb"([1-9][0-9]{0,5}) ")
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")
_CHUNK = 1 << 20


class DamagedTarError(Exception):
    """Why a file is not a readable tar file, as part of a sentence."""


class TarMember(NamedTuple):
    """A file in a tar file; it lies within it."""

    name: str
    start: int  # offset of its first header
    offset: int  # of its content
    size: int  # bytes


def members_of(file: BinaryIO) -> Iterator[TarMember]:
    """The files in an open tar file, in their order; folders are left out.

    Raises:
        DamagedTarError: the file is damaged or cut off, goes on behind its end, or holds something that is neither a
            file nor a folder, a name that is no text, or an extended header that no image or caption needs.
    """
    length, position = file.seek(0, 2), 0
    while True:
        member, position = _next_member(file, position, length)
        if member is None:
            break
        if not member.name.endswith("/"):
            yield member
    file.seek(position)
    if any(rest.strip(b"\0") for rest in iter(lambda: file.read(_CHUNK), b"")):
        raise DamagedTarError("it goes on after its end, so members would be lost; split it")


def member_at(file: BinaryIO, start: int) -> TarMember:
    """The file whose first header is at this offset.

    Raises:
        DamagedTarError: as for `members_of`, or the file ends at this offset.
    """
    member, _ = _next_member(file, start, file.seek(0, 2))
    if member is None:
        raise DamagedTarError(f"it has no member at byte {start}")
    return member


def _next_member(file: BinaryIO, start: int, length: int) -> tuple[TarMember | None, int]:
    """The member whose first header is at `start`, and where the next one begins; None: the end. A folder ends in /."""
    position, names = start, {}
    for _ in range(MOST_EXTENSIONS + 1):
        where = f"the member at byte {position}"
        header = _header(file, position)
        if header is None and position > start:
            raise DamagedTarError(f"{where} is missing behind its extended headers")
        position += BLOCK
        if header is None:
            return None, position
        if header.size < 0:
            raise DamagedTarError(f"{where} claims {header.size} bytes; it is damaged")
        if header.size > length - position:
            raise DamagedTarError(f"{where} claims {header.size} bytes, more than there are; it is cut off or damaged")
        kind = header.type
        if kind not in (*_NAMES, *_RECORDS):
            return _member(header, names.get("path"), start, position), position + _blocks(header.size)
        if header.size > LONGEST_EXTENSION:
            raise DamagedTarError(f"{where} has an extended header of {header.size} bytes")
        file.seek(position)
        content, padding = file.read(header.size), file.read(_blocks(header.size) - header.size)
        if padding.strip(b"\0"):
            raise DamagedTarError(f"{where} has an extended header that is longer than it says")
        if kind in _RECORDS:
            names |= _records_of(content, kind == tarfile.XGLTYPE, where)
        elif kind == tarfile.GNUTYPE_LONGNAME:
            names["path"] = content.split(b"\0")[0]
        position += _blocks(header.size)
    raise DamagedTarError(f"{where} has more than {MOST_EXTENSIONS} extended headers")


def _header(file: BinaryIO, position: int) -> tarfile.TarInfo | None:
    """None: a block of zeros, which ends the file."""
    file.seek(position)
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise DamagedTarError("it is cut off")
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.EOFHeaderError:
        return None
    except (tarfile.HeaderError, ValueError) as error:
        raise DamagedTarError(f"it has a damaged header at byte {position}") from error


def _member(header: tarfile.TarInfo, path: bytes | None, start: int, offset: int) -> TarMember:
    try:
        # as bytes, since a name of the header may be cut off within a letter where a longer one stands before it
        name = (header.name.encode("utf-8", "surrogateescape") if path is None else path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedTarError(f"the member at byte {start} has a name that is not UTF-8 text") from error
    if not name or _CONTROL.search(name):
        raise DamagedTarError(f"the member at byte {start} has the name {name[:200]!r}, which no file should have")
    if header.type == tarfile.DIRTYPE:
        if header.size:
            raise DamagedTarError(f"the folder {name!r} claims {header.size} bytes")
        return TarMember(name.rstrip("/") + "/", start, offset, 0)
    if header.type not in _FILES or name.endswith("/"):
        kind = _KINDS.get(header.type, "neither a file nor a folder")
        raise DamagedTarError(f"{name!r} is {kind}, which cannot be read; pack the files themselves")
    return TarMember(name, start, offset, header.size)


def _records_of(content: bytes, is_global: bool, where: str) -> dict[str, bytes]:
    """The path in an extended header of POSIX, whose records are "LENGTH KEY=VALUE" with a line feed behind each."""
    found: dict[str, bytes] = {}
    position = 0
    while position < len(content):
        match = _LENGTH.match(content, position)
        end = position + int(match[1]) if match else 0
        if not match or not match.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise DamagedTarError(f"{where} has a damaged extended header")
        key, equals, value = content[match.end() : end - 1].partition(b"=")
        name = key.decode("ascii", "replace")
        if not equals or name in found or len(found) == MOST_RECORDS:
            raise DamagedTarError(f"{where} has a damaged extended header")
        if name == "size" or name.startswith("GNU.sparse.") or (is_global and name == "path"):
            raise DamagedTarError(f"{where} has an extended header that states {name}, which no image or caption needs")
        found[name] = value
        position = end
    return {"path": found["path"]} if "path" in found else {}


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
