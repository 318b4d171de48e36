"""Hostile zip and tar archives."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Callable

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
}
