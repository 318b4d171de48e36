"""The directory at the end of a zip archive, read without trusting it.

`zipfile` makes an object of 600 bytes for each of millions of members and believes sizes and places. Here every number
is compared with the length of the file, so that nothing that an archive claims is allocated or read.
"""

from __future__ import annotations

import io
import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

SMALL = 1 << 26  # bytes that the members of every archive may have when unpacked ...
RATIO = 20  # ... and that they may have per byte of the archive; numbers and texts are rarely packed better

LOCAL_HEADER = 30  # bytes before the name
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")  # of the directory: signature, flags, method, sum, sizes, lengths, offset
_END = struct.Struct("<4s6xH2L2x")  # of the directory: signature, entries, its bytes and its offset
_END_64 = struct.Struct("<4s28x3Q")  # the same of archives of more than 65,535 members or 4 GiB
_LOCATOR_64 = struct.Struct("<4s4xQ4x")  # where that is; stands before the other one
_LONGEST_COMMENT = 1 << 16
_CHUNK = 1 << 22  # bytes of the directory that are read at once


class DamagedZipError(Exception):
    """Why a file is not a readable zip archive, as part of a sentence."""


class Directory(NamedTuple):
    """Where the directory is."""

    offset: int
    size: int  # bytes
    count: int  # members, as the archive says
    shift: int  # bytes before the archive, which its offsets do not count


class Entry(NamedTuple):
    """What the directory says of a member; none of it is checked."""

    name: str
    flags: int
    method: int  # of compression
    packed: int  # bytes in the archive
    whole: int  # bytes when unpacked
    header: int  # offset of the local header, without the shift
    checksum: int  # CRC-32 of the unpacked content


class Member(NamedTuple):
    """A member that lies in the file and shares no byte with another one."""

    method: int
    packed: int  # bytes in the archive
    whole: int  # bytes when unpacked, as the archive claims
    start: int  # offset of its content
    checksum: int  # CRC-32 of the unpacked content


def find_directory(file: BinaryIO) -> Directory:
    """The directory of an open archive.

    Raises:
        DamagedZipError: there is none, or it is cut off.
    """
    length = file.seek(0, io.SEEK_END)
    before = max(length - _END.size - _LONGEST_COMMENT, 0)
    file.seek(before)
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise DamagedZipError("it has no directory of its members")
    _, count, size, offset = _END.unpack_from(tail, at)
    end = before + at
    if at >= _LOCATOR_64.size and tail.startswith(b"PK\6\7", at - _LOCATOR_64.size):
        _, place = _LOCATOR_64.unpack_from(tail, at - _LOCATOR_64.size)
        if place > length - _END_64.size:
            raise DamagedZipError("the directory of its members is cut off")
        file.seek(place)
        large = file.read(_END_64.size)
        if len(large) < _END_64.size or not large.startswith(b"PK\6\6"):
            raise DamagedZipError("the directory of its members is damaged")
        _, count, size, offset = _END_64.unpack(large)
        end = place
    shift = end - size - offset
    if shift < 0:
        raise DamagedZipError("the directory of its members is cut off")
    if count * _ENTRY.size > size:
        raise DamagedZipError(f"its directory of {size} bytes cannot name {count} members")
    return Directory(offset + shift, size, count, shift)


def read_entries(file: BinaryIO, directory: Directory) -> Iterator[Entry]:
    """What the directory says of every member, in its order.

    Raises:
        DamagedZipError: the directory is damaged or cut off.
    """
    file.seek(directory.offset)
    left, window, at = directory.size, b"", 0
    for _ in range(directory.count):
        while len(window) - at < _ENTRY.size + 3 * _LONGEST_COMMENT and left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise DamagedZipError("the directory of its members is cut off")
            window, at, left = window[at:] + chunk, 0, left - len(chunk)
        if len(window) - at < _ENTRY.size:
            raise DamagedZipError("the directory of its members is cut off")
        fields = _ENTRY.unpack_from(window, at)
        signature, flags, method, checksum, packed, whole, name_length, extra_length, comment_length, header = fields
        if signature != b"PK\1\2":
            raise DamagedZipError("the directory of its members is damaged")
        first = at + _ENTRY.size
        name = window[first : first + name_length].decode("utf-8" if flags & 0x800 else "cp437", "replace")
        extra = window[first + name_length : first + name_length + extra_length]
        whole, packed, header = _large(extra, whole, packed, header)
        at = first + name_length + extra_length + comment_length
        yield Entry(name, flags, method, packed, whole, header, checksum)


def _large(extra: bytes, whole: int, packed: int, header: int) -> tuple[int, int, int]:
    """Both sizes of a member and the offset of its local header, which stand apart if they take more than 32 bits."""
    limit = 0xFFFFFFFF
    if limit not in (whole, packed, header):
        return whole, packed, header
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = list(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            found = [numbers.pop(0) if value == limit and numbers else value for value in (whole, packed, header)]
            return found[0], found[1], found[2]
        at += 4 + length
    return whole, packed, header


def read_members(file: BinaryIO, most: int) -> dict[str, Member]:
    """The members of a small archive, such as a `.npz` file or a checkpoint, in the order of the directory.

    Args:
        most: how many there may be.

    Raises:
        DamagedZipError: the archive is damaged or cut off; a member lies outside, overlaps another one, is named twice
            or in two ways, is encrypted or packed in an unusual way; or the members claim to be much larger than the
            file.
    """
    try:
        return _read_members(file, most)
    except (struct.error, OverflowError) as error:
        raise DamagedZipError("the directory of its members is damaged") from error


def _read_members(file: BinaryIO, most: int) -> dict[str, Member]:
    directory = find_directory(file)
    if directory.count > most:
        raise DamagedZipError(f"it has {directory.count} members; at most {most} are expected")
    entries = list(read_entries(file, directory))
    members: dict[str, Member] = {}
    names, ends = set(), []
    for entry in entries:
        if entry.name.lower() in names:
            raise DamagedZipError(f"it names {entry.name!r} twice")
        names.add(entry.name.lower())
        is_stored = entry.method == zipfile.ZIP_STORED
        if not (is_stored or entry.method == zipfile.ZIP_DEFLATED) or entry.flags & 1:
            raise DamagedZipError(f"{entry.name!r} is encrypted or compressed in a way that is not supported")
        if is_stored and entry.packed != entry.whole:
            raise DamagedZipError(f"{entry.name!r} has two sizes")
        header = entry.header + directory.shift
        start = content_start(file, header, directory.offset - header)
        if start is None or start + entry.packed > directory.offset:
            raise DamagedZipError(f"{entry.name!r} lies outside of the file; it is cut off or damaged")
        ends.append((header, start + entry.packed))
        members[entry.name] = Member(entry.method, entry.packed, entry.whole, start, entry.checksum)
    ends.sort()
    if any(end > after for (_, end), (after, _) in itertools.pairwise(ends)):
        raise DamagedZipError("two of its members overlap")
    for entry in entries:
        if _local_name(file, entry.header + directory.shift, entry.flags) != entry.name:
            raise DamagedZipError(f"{entry.name!r} has another name before its content")
    claimed, length = sum(member.whole for member in members.values()), file.seek(0, io.SEEK_END)
    if claimed > max(SMALL, RATIO * length):
        raise DamagedZipError(f"its members claim {claimed} bytes in a file of {length} bytes")
    return members


def content_start(file: BinaryIO, header: int, room: int) -> int | None:
    """Offset of a member's content behind its local header; None: there is no local header, or no room for it."""
    if room < LOCAL_HEADER:
        return None
    file.seek(header)
    local = file.read(LOCAL_HEADER)
    if len(local) < LOCAL_HEADER or not local.startswith(b"PK\3\4"):
        return None
    return header + LOCAL_HEADER + sum(struct.unpack_from("<HH", local, 26))


def _local_name(file: BinaryIO, header: int, flags: int) -> str:
    """The name of a member before its content; a flipped bit in one of both names would make another array of it."""
    file.seek(header + 26)
    (length,) = struct.unpack("<H2x", file.read(4))
    return file.read(length).decode("utf-8" if flags & 0x800 else "cp437", "replace")


def inflate(packed: bytes, longest: int) -> bytes:
    """Unpack the content of a member.

    Raises:
        DamagedZipError: it is damaged, cut off, or unpacks to more than `longest` bytes.
    """
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(packed, longest + 1)
    except zlib.error as error:
        raise DamagedZipError(f"damaged ({error})") from error
    if len(content) > longest:
        raise DamagedZipError(f"damaged: it unpacks to more than {longest} bytes")
    if not unpacker.eof:
        raise DamagedZipError("cut off")
    return content


def read_member(file: BinaryIO, member: Member) -> bytes:
    """The content of a member that `read_members` found.

    Raises:
        DamagedZipError: see `inflate`; or it is not what the archive claims.
    """
    file.seek(member.start)
    packed = file.read(member.packed)
    content = packed if member.method == zipfile.ZIP_STORED else inflate(packed, member.whole)
    if len(content) != member.whole:
        raise DamagedZipError(f"a member is not {member.whole} bytes long, as the archive claims")
    if zlib.crc32(content) != member.checksum:
        raise DamagedZipError("a member is not as it was written: its checksum differs")
    return content
