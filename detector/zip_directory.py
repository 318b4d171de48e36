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

LOCAL_HEADER = 30  # bytes before the name that stands before the content
# of the directory: signature, flags, method, sum, sizes, lengths, part of a split archive, attributes, offset
_ENTRY = struct.Struct("<4s4x2H4x3L4H2x2L")
_LOCAL = struct.Struct("<4s2x2H16x2H")  # before the content: signature, flags, method, lengths
# of the directory: signature, two numbers of parts, entries here and in all parts, bytes, offset, bytes of the comment
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ4x2L4Q")  # signature, its own bytes, then the same, for 65,535 members or 4 GiB and more
_LOCATOR_64 = struct.Struct("<4s4xQ4x")  # where that is; stands before the other one
_LONGEST_COMMENT = (1 << 16) - 1
_LARGE_2, _LARGE_4 = 0xFFFF, 0xFFFFFFFF  # stand for a number that takes more than two or four bytes
_CHUNK = 1 << 22  # bytes of the directory that are read at once
_IS_ENCRYPTED, _IS_UTF_8 = 1, 0x800  # flags
_IS_FOLDER = 0x10  # attribute; torch leaves the memory of such a member as it was
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of compression that are read


class DamagedZipError(Exception):
    """Why a file is not a readable zip archive, as part of a sentence."""


class Directory(NamedTuple):
    """Where the directory is."""

    offset: int
    size: int  # bytes
    count: int  # members, as the archive says
    shift: int  # bytes before the archive, which its offsets do not count
    behind: int  # bytes behind the archive's last record: a comment, or what somebody appended


class Entry(NamedTuple):
    """What the directory says of a member; none of it is checked."""

    name: str
    flags: int
    method: int  # of compression
    packed: int  # bytes in the archive
    whole: int  # bytes when unpacked
    header: int  # offset of the local header, without the shift
    checksum: int  # CRC-32 of the unpacked content
    attributes: int  # of a file in DOS, by which a folder is told


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
        DamagedZipError: the directory is missing or cut off; the archive is a part of a split one; or its end names two
            different directories, so that programs would disagree on what is in the archive.
    """
    length = file.seek(0, io.SEEK_END)
    before = max(length - _LOCATOR_64.size - _END.size - _LONGEST_COMMENT, 0)
    file.seek(before)
    tail = file.read()
    at = _find_end(tail)
    _, *parts, own, count, size, offset, _ = _END.unpack_from(tail, at)
    end = before + at
    if at >= _LOCATOR_64.size and tail.startswith(b"PK\6\7", at - _LOCATOR_64.size):
        short = (*parts, own, count, size, offset)
        _, end = _LOCATOR_64.unpack_from(tail, at - _LOCATOR_64.size)
        *parts, own, count, size, offset = numbers = _read_end_64(file, end, before + at - _LOCATOR_64.size)
        limits = (_LARGE_2,) * 4 + (_LARGE_4,) * 2
        if any(one not in (limit, large) for one, large, limit in zip(short, numbers, limits, strict=True)):
            raise DamagedZipError("it has two directories of its members")
    if any(parts) or own != count:
        raise DamagedZipError("it is one of several parts; join them first")
    shift = end - size - offset
    if shift < 0:
        raise DamagedZipError("the directory of its members is cut off")
    if count * _ENTRY.size > size:
        raise DamagedZipError(f"its directory of {size} bytes cannot name {count} members")
    return Directory(offset + shift, size, count, shift, len(tail) - at - _END.size)


def _find_end(tail: bytes) -> int:
    """Where the last record of an archive begins in its last bytes.

    A comment may stand behind it, and hold what looks like such a record. So the record counts whose comment is as long
    as it says. If bytes were appended to the archive, no record is; then the file must hold only one.
    """
    found, at = [], tail.find(b"PK\5\6")
    while 0 <= at <= len(tail) - _END.size:
        found.append(at)
        at = tail.find(b"PK\5\6", at + 1)
    exact = [at for at in found if at + _END.size + _END.unpack_from(tail, at)[-1] == len(tail)]
    candidates = exact or found
    if not candidates:
        raise DamagedZipError("it has no directory of its members")
    if len(candidates) > 1:
        raise DamagedZipError("it has two ends, and each of them names a directory of members")
    return candidates[0]


def _read_end_64(file: BinaryIO, place: int, locator: int) -> tuple[int, ...]:
    """The numbers of parts, entries, bytes and offset in the larger record, which ends where its locator begins."""
    if place > locator - _END_64.size:
        raise DamagedZipError("the directory of its members is cut off")
    file.seek(place)
    signature, size, *numbers = _END_64.unpack(file.read(_END_64.size))
    if signature != b"PK\6\6" or place + 12 + size != locator:  # neither the signature nor the size itself count
        raise DamagedZipError("the directory of its members is damaged")
    return tuple(numbers)


def read_entries(file: BinaryIO, directory: Directory) -> Iterator[Entry]:
    """What the directory says of every member, in its order.

    Raises:
        DamagedZipError: the directory is damaged or cut off, or holds more members than it says.
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
        signature, flags, method, checksum, packed, whole, *lengths, part, attributes, header = fields
        name_length, extra_length, comment_length = lengths
        if signature != b"PK\1\2":
            raise DamagedZipError("the directory of its members is damaged")
        first = at + _ENTRY.size
        name = window[first : first + name_length].decode("utf-8" if flags & _IS_UTF_8 else "cp437", "replace")
        extra = window[first + name_length : first + name_length + extra_length]
        at = first + name_length + extra_length + comment_length
        if at > len(window):
            raise DamagedZipError("the directory of its members is cut off")
        if part not in (0, _LARGE_2):
            raise DamagedZipError(f"{name!r} lies in another part of it")
        whole, packed, header = _large(name, extra, whole, packed, header)
        yield Entry(name, flags, method, packed, whole, header, checksum, attributes)
    if left or at < len(window):
        raise DamagedZipError(f"its directory holds more than the {directory.count} members that it states")


def _large(name: str, extra: bytes, whole: int, packed: int, header: int) -> tuple[int, int, int]:
    """Both sizes of a member and the offset of its local header, which stand apart if they take more than 32 bits."""
    numbers = (whole, packed, header)
    needed = numbers.count(_LARGE_4)
    at = 0
    while needed and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            if length < 8 * needed or at + 4 + length > len(extra):
                raise DamagedZipError(f"{name!r} has no whole size or place")
            large = iter(struct.unpack_from(f"<{needed}Q", extra, at + 4))
            found = [next(large) if number == _LARGE_4 else number for number in numbers]
            return found[0], found[1], found[2]
        at += 4 + length
    return numbers


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
    members: dict[str, Member] = {}
    names, ends = set(), []
    for entry in list(read_entries(file, directory)):
        if entry.name.lower() in names:
            raise DamagedZipError(f"it names {entry.name!r} twice")
        names.add(entry.name.lower())
        check_entry(entry, directory)
        if entry.method == zipfile.ZIP_STORED and entry.packed != entry.whole:
            raise DamagedZipError(f"{entry.name!r} has two sizes")
        if entry.attributes & _IS_FOLDER and entry.packed:
            raise DamagedZipError(f"{entry.name!r} is a folder with content")
        header = entry.header + directory.shift
        start = content_start(file, header, entry.name, entry.method)
        if start + entry.packed > directory.offset:
            raise DamagedZipError(f"{entry.name!r} lies outside of the file; it is cut off or damaged")
        ends.append((header, start + entry.packed))
        members[entry.name] = Member(entry.method, entry.packed, entry.whole, start, entry.checksum)
    ends.sort()
    if any(end > after for (_, end), (after, _) in itertools.pairwise(ends)):
        raise DamagedZipError("two of its members overlap")
    claimed, length = sum(member.whole for member in members.values()), file.seek(0, io.SEEK_END)
    if claimed > max(SMALL, RATIO * length):
        raise DamagedZipError(f"its members claim {claimed} bytes in a file of {length} bytes")
    return members


def check_entry(entry: Entry, directory: Directory) -> None:
    """Check what the directory says of a member.

    Raises:
        DamagedZipError: the member is encrypted or packed in an unusual way, or does not end before the directory.
    """
    if entry.method not in METHODS or entry.flags & _IS_ENCRYPTED:
        raise DamagedZipError(f"{entry.name!r} is encrypted or compressed in a way that is not supported")
    if directory.shift + entry.header + LOCAL_HEADER + entry.packed > directory.offset:
        raise DamagedZipError(f"{entry.name!r} lies outside of the file; it is cut off or damaged")


def content_start(file: BinaryIO, header: int, name: str, method: int) -> int:
    """Offset of a member's content behind its local header.

    What stands there must be what the directory says: a flipped bit in one of both names would make another member of
    it. Sizes and checksum come from the directory, because a local header may leave them out.

    Raises:
        DamagedZipError: the local header is missing or belongs to another member.
    """
    file.seek(header)
    local = file.read(LOCAL_HEADER)
    if len(local) < LOCAL_HEADER or not local.startswith(b"PK\3\4"):
        raise DamagedZipError(f"{name!r} has no header before its content, or lies outside of the file")
    _, flags, own_method, name_length, extra_length = _LOCAL.unpack(local)
    own_name = file.read(name_length)
    if name not in (own_name.decode(encoding, "replace") for encoding in ("utf-8", "cp437")):
        raise DamagedZipError(f"{name!r} has another name before its content")
    if own_method != method or flags & _IS_ENCRYPTED:
        raise DamagedZipError(f"{name!r} is packed or encrypted in another way before its content")
    return header + LOCAL_HEADER + name_length + extra_length


def inflate(packed: bytes, longest: int) -> bytes:
    """Unpack the content of a member.

    Raises:
        DamagedZipError: it is damaged, cut off, or unpacks to more than `longest` bytes.
    """
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(packed, longest + 1)
    except zlib.error as error:
        raise DamagedZipError(f"it is damaged: {error}") from error
    if len(content) > longest:
        raise DamagedZipError(f"it unpacks to more than {longest} bytes")
    if not unpacker.eof:
        raise DamagedZipError("it is cut off")
    return content


def read_member(file: BinaryIO, member: Member, *, has_checksum: bool = True) -> bytes:
    """The content of a member that `read_members` found.

    Raises:
        DamagedZipError: see `inflate`; or it is not what the archive claims.
    """
    file.seek(member.start)
    packed = file.read(member.packed)
    content = packed if member.method == zipfile.ZIP_STORED else inflate(packed, member.whole)
    if len(content) != member.whole:
        raise DamagedZipError(f"a member is not {member.whole} bytes long, as the archive claims")
    if has_checksum and zlib.crc32(content) != member.checksum:
        raise DamagedZipError("a member is not as it was written: its checksum differs")
    return content


def check_member(file: BinaryIO, member: Member) -> None:
    """Compare the content of a member with its checksum; what is not packed is read in parts.

    Raises:
        DamagedZipError: as `read_member`.
    """
    if member.method != zipfile.ZIP_STORED:
        read_member(file, member)
        return
    file.seek(member.start)
    checksum, left = 0, member.packed
    while left and (data := file.read(min(left, _CHUNK))):
        checksum, left = zlib.crc32(data, checksum), left - len(data)
    if left or checksum != member.checksum:
        raise DamagedZipError("a member is not as it was written: its checksum differs")
