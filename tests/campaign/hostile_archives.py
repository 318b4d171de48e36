"""Hostile zip and tar archives."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.campaign.hostile_parts import HUGE, Builder, written


def zip_bytes(method: int = zipfile.ZIP_STORED, **contents: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method, compresslevel=1) as archive:
        for name, content in (contents or {"x": b"content", "y": b"other content"}).items():
            archive.writestr(name, content)
    return stream.getvalue()


def _zip(change: Callable[[bytes], bytes], content: bytes | None = None) -> Builder:
    return written("a.zip", change(zip_bytes() if content is None else content))


def _directory(at: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrite a place of the directory's first entry."""

    def change(content: bytes) -> bytes:
        start = content.index(b"PK\1\2") + at
        return content[:start] + value + content[start + len(value) :]

    return change


def _end(at: int, value: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        start = content.rindex(b"PK\5\6") + at
        return content[:start] + value + content[start + len(value) :]

    return change


def _zip64(count: int, size: int, offset: int) -> bytes:
    end = b"PK\6\6" + struct.pack("<Q", 44) + bytes(12) + struct.pack("<4Q", count, count, size, offset)
    return end + b"PK\6\7" + bytes(4) + struct.pack("<QI", 0, 1) + b"PK\5\6" + b"\xff" * 16 + bytes(2)


def _local(at: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrite a place of the header before the first member."""
    return lambda content: content[:at] + value + content[at + len(value) :]


def _with_end(count: int, *, is_large: bool) -> Callable[[bytes], bytes]:
    """A larger record of the end, beside which the other one names `count` members, or stands for it."""

    def change(content: bytes) -> bytes:
        start, end = content.index(b"PK\1\2"), content.rindex(b"PK\5\6")
        large = _zip64(2, end - start, start)[:-22].replace(bytes(4) + struct.pack("<QI", 0, 1), bytes(4))
        large += struct.pack("<QI", end, 1)
        short = struct.pack("<4H2LH", 0, 0, count, count, end - start, start, 0)
        return content[:end] + large + (b"PK\5\6" + (b"\0" * 4 + b"\xff" * 12 + b"\0\0" if is_large else short))

    return change


def _far_away(content: bytes) -> bytes:
    """A directory at the beginning of the file, whose member lies at the end of all numbers."""
    place = struct.pack("<HHQ", 1, 8, (1 << 63) - 1)
    entry = (
        b"PK\1\2" + struct.pack("<6H3L5H2L", 45, 45, 0, 0, 0, 0, 0, 0, 0, 1, 12, 0, 0, 0, 0, 0xFFFFFFFF) + b"x" + place
    )
    large = b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, 1, 1, len(entry), 0)
    return (
        entry
        + large
        + b"PK\6\7"
        + struct.pack("<LQL", 0, len(entry), 1)
        + b"PK\5\6"
        + bytes(4)
        + b"\xff" * 12
        + bytes(2)
    )


def _of_gigabytes(folder: Path, canary: Path) -> Path:
    """A member of 3 GiB which is not packed, on a disk that keeps no zeros."""
    size = 3 << 30
    header = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, size, size, 1, 0) + b"x"
    entry = b"PK\1\2" + struct.pack("<6H3L5H2L", 20, 20, 0, 0, 0, 0, 0, size, size, 1, 0, 0, 0, 0, 0, 0) + b"x"
    with (folder / "a.zip").open("wb") as file:
        file.write(header)
        file.seek(len(header) + size)
        file.write(entry + b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 1, 1, len(entry), len(header) + size, 0))
    return folder / "a.zip"


def _overlapping(content: bytes) -> bytes:
    """Many entries of the directory for one member."""
    start, end = content.index(b"PK\1\2"), content.rindex(b"PK\5\6")
    entry = content[start : start + 47]
    names = [entry[:46] + b"%c" % (97 + n) for n in range(20)]
    directory = b"".join([entry, *names])
    return (
        content[:start] + directory + content[end:][:8] + struct.pack("<HHII", 21, 21, len(directory), start) + bytes(2)
    )


ZIPS: dict[str, Builder] = {
    "empty": written("a.zip", b""),
    "cut_off": _zip(lambda content: content[:-30]),
    "without_directory": _zip(lambda content: content[: content.index(b"PK\1\2")]),
    "of_a_bomb": _zip(lambda content: content, zip_bytes(zipfile.ZIP_DEFLATED, x=bytes((1 << 28) + 9))),
    "with_another_size": _zip(_directory(20, struct.pack("<I", 1 << 30))),
    "with_a_member_outside": _zip(_directory(42, struct.pack("<I", (1 << 32) - 2))),
    "with_too_many_members": _zip(_end(8, b"\xff\xfe\xff\xfe")),
    "with_too_few_members": _zip(_end(8, b"\0\0\0\0")),
    "with_a_directory_outside": _zip(_end(16, b"\xff\xff\xff\x7f")),
    "with_a_long_directory": _zip(_end(12, b"\xff\xff\xff\x7f")),
    "with_terabytes_of_members": written("a.zip", _zip64(HUGE, HUGE, 0)),
    "with_members_without_end": written("a.zip", _zip64((1 << 64) - 1, 0, 0)),
    "with_damaged_headers": _zip(lambda content: content.replace(b"PK\3\4", b"XXXX")),
    "with_overlapping_members": _zip(_overlapping),
    "with_two_directories": _zip(_with_end(1, is_large=False)),
    "with_a_directory_elsewhere": _zip(
        lambda content: _with_end(2, is_large=True)(content).replace(b"PK\6\6", b"XXXX")
    ),
    "with_an_archive_as_its_comment": _zip(
        lambda content: _end(20, struct.pack("<H", len(zip_bytes(x=b"evil"))))(content) + zip_bytes(x=b"evil")
    ),
    "of_one_part_of_several": _zip(_end(4, b"\1\0\1\0")),
    "with_members_that_are_not_counted": _zip(_end(8, b"\1\0\1\0")),
    "with_an_entry_beyond_its_directory": _zip(
        lambda content: content[: content.rindex(b"PK\1\2") + 32] + b"\5" + content[content.rindex(b"PK\1\2") + 33 :]
    ),
    "with_another_name_before_its_content": _zip(_local(30, b"z")),
    "with_another_method_before_its_content": _zip(_local(8, b"\x08")),
    "with_content_of_another_member": _zip(_local(28, b"\x14")),
    "with_one_name_twice": _zip(lambda content: content.replace(b"y", b"x")),
    "with_a_place_beyond_all_numbers": _zip(_far_away),
    "without_the_size_that_stands_apart": _zip(_directory(20, b"\xff" * 4)),
    "with_a_member_of_gigabytes": _of_gigabytes,
    "with_damaged_content": _zip(
        lambda content: content[:40] + b"\xff" * 40 + content[80:],
        zip_bytes(zipfile.ZIP_DEFLATED, x=bytes(range(256)) * 9),
    ),
}


def member(name: str, size: bytes, kind: bytes = b"0", content: bytes = b"", count: int = 1) -> bytes:
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[156:157] = size.ljust(12, b"\0"), kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return (bytes(header) + content + bytes(-len(content) % 512)) * count


def _hidden(kind: bytes, *members: bytes, name: str = "d") -> bytes:
    """Members behind one that has no content, but a size that reaches over them."""
    return member(name, _octal(sum(map(len, members))), kind) + b"".join(members)


def _tar(*members: bytes) -> Builder:
    return written("00000.tar", b"".join(members) + bytes(1024))


def _octal(number: int) -> bytes:
    return b"%011o" % number


def _sparse(content: bytes = b"abcd", name: str = "1.jpg", **words: object) -> bytes:
    """A member behind extended headers about its gaps; "major" stands for GNU.sparse.major."""
    text = b""
    for key, value in words.items():
        record = f" GNU.sparse.{key}={value}\n".encode()
        length = next(n for n in range(len(record), 999) if n == len(str(n)) + len(record))
        text += str(length).encode() + record
    return member("x", _octal(len(text)), b"x", text) + member(name, _octal(len(content)), content=content)


_PAX = b"9" * 60_000
_IMAGE, _CAPTION = member("1.jpg", _octal(4), content=b"abcd"), member("1.txt", _octal(5), content=b"a cat")
TARS: dict[str, Builder] = {
    "empty": written("00000.tar", b""),
    "cut_off": written("00000.tar", member("1.jpg", _octal(4000), content=bytes(1000))),
    "of_terabytes": _tar(member("1.jpg", b"\x80" + (1 << 80).to_bytes(11, "big"))),
    "of_gigabytes": _tar(member("1.jpg", _octal(8**11 - 1))),
    "of_negative_size": _tar(member("1.jpg", b"\xff" * 12)),
    "with_names_of_gigabytes": _tar(member("1.jpg", _octal(8**11 - 1), b"x")),
    "with_names_of_terabytes": _tar(member("1.jpg", b"\x80" + (1 << 80).to_bytes(11, "big"), b"L")),
    "with_chained_names": _tar(member("a", _octal(0), b"x", count=5000), member("1.jpg", _octal(0))),
    "with_slow_names": _tar(member("a", _octal(len(_PAX)), b"x", _PAX), member("1.jpg", _octal(0))),
    "with_hidden_size": _tar(member("a", _octal(14), b"x", b"14 size=99999\n"), member("1.jpg", _octal(0))),
    "of_negative_octal_size": _tar(member("1.jpg", b"-0000001000"), _IMAGE, _CAPTION),
    "of_gaps_without_end": _tar(_sparse(b"99999999\n".ljust(512, b"1"), major=1, minor=0), _CAPTION),
    "of_gaps_of_exabytes": _tar(_sparse(realsize=10**18), _CAPTION),
    "of_gaps_of_gigabytes": _tar(
        _IMAGE, _sparse(b"0\n".ljust(512, b"\0"), "1.txt", major=1, minor=0, realsize=4 << 30)
    ),
    "of_gaps_in_a_map": _tar(_IMAGE, _sparse(b"a cat", "1.txt", map="0,5", size=3 << 30)),
    "of_gaps_of_negative_size": _tar(_sparse(realsize=-5), _CAPTION),
    "with_gaps": _tar(member("1.jpg", _octal(0), b"S")),
    "with_damaged_headers": _tar(member("1.jpg", _octal(0)).replace(b"ustar", b"XXXXX")),
    "with_slow_names_in_a_folder": _tar(_hidden(b"5", member("a", _octal(len(_PAX)), b"x", _PAX)), _IMAGE, _CAPTION),
    "with_chained_names_in_a_link": _tar(_hidden(b"2", member("a", _octal(0), b"x", count=5000)), _IMAGE, _CAPTION),
    "with_chained_names_in_an_old_folder": _tar(
        _hidden(b"\0", member("a", _octal(0), b"x", count=5000), name="d/"), _IMAGE, _CAPTION
    ),
    "with_names_of_gigabytes_in_a_folder": _tar(_hidden(b"5", member("a", _octal(8**11 - 1), b"L")), _IMAGE, _CAPTION),
    "with_names_in_names": _tar(member("a", _octal(65_001), b"x", b"2 " * 32_500 + b"=", count=8), _IMAGE, _CAPTION),
    "with_names_for_all": _tar(
        *(
            member("a", _octal(49_500), b"g", b"".join(b"11 k%04d=1\n" % (n % 9999) for n in range(4500)))
            for _ in range(9)
        ),
        *(_IMAGE, _CAPTION),
    ),
    "with_a_link": _tar(_IMAGE, _CAPTION, member("2.jpg", _octal(0), b"2"), member("2.txt", _octal(1), content=b"a")),
    "with_a_hard_link": _tar(
        _IMAGE, _CAPTION, member("2.jpg", _octal(0), b"1"), member("2.txt", _octal(1), content=b"a")
    ),
    "with_a_device": _tar(_IMAGE, _CAPTION, member("2.jpg", _octal(0), b"3")),
    "with_a_name_for_all": _tar(member("a", _octal(14), b"g", b"14 path=1.jpg\n"), _IMAGE, _CAPTION),
    "with_a_name_that_is_no_text": _tar(member("a", _octal(10), b"x", b"10 path=\xff\n"), _IMAGE, _CAPTION),
    "without_an_end": written("00000.tar", _IMAGE + _CAPTION),
    "with_members_behind_its_end": written("00000.tar", _IMAGE + _CAPTION + bytes(1024) + _IMAGE),
    "of_a_packed_bomb": written("00000.tar", gzip.compress(bytes(1 << 28), 1)),
}
