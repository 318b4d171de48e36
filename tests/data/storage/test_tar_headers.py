from __future__ import annotations

import io
import tarfile

import pytest

from e2e_vl.data.storage.tar_headers import DamagedTarError, member_at, members_of

NAMES = ("1.jpg", "a folder/" + "x" * 80 + ".txt", "é" * 60 + "1.txt", "é" * 60 + "2.txt", "b/" + "y" * 300)


def tar_bytes(layout: int = tarfile.PAX_FORMAT, **more: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=layout, pax_headers=more) as tar:
        folder = tarfile.TarInfo("a folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, name in enumerate(NAMES[: 2 if layout == tarfile.USTAR_FORMAT else None]):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 700 * number, 1.5 if layout == tarfile.PAX_FORMAT else 1
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
    return stream.getvalue()


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(layout):
    content = tar_bytes(layout, **({"comment": "a commit"} if layout == tarfile.PAX_FORMAT else {}))
    file = io.BytesIO(content)
    members = list(members_of(file))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(one.name, one.offset_data, one.size) for one in tar if one.isreg()]
    assert [(one.name, one.offset, one.size) for one in members] == expected
    assert [member_at(file, one.start) for one in members] == members


def header(size: bytes, kind: bytes = b"0", name: str = "a") -> bytes:
    data = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    data[124:136], data[156:157] = size.ljust(12, b"\0"), kind
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def extended(*records: bytes, kind: bytes = b"x") -> bytes:
    """An extended header; each record gets its length before it unless it begins with a digit."""
    text = b""
    for record in records:
        length = next(n for n in range(len(record), 9999) if n == len(str(n)) + len(record) + 2)
        text += record if record[:1].isdigit() else b"%d %s\n" % (length, record)
    return header(b"%o" % len(text), kind) + text + bytes(-len(text) % 512)


END = bytes(1024)
FILE = header(b"0", name="1.jpg")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is cut off"),
        (FILE, "it is cut off"),
        (FILE + END + FILE, "goes on after its end"),
        (FILE[:-1] + b"?" + END, "a damaged header at byte 0"),
        (header(b"\x80" + (1 << 80).to_bytes(11, "big")), "at byte 0 claims 1208925819614629174706176 bytes"),
        (header(b"2000") + bytes(512), "claims 1024 bytes, more than there are"),
        (header(b"1000000", b"x") + bytes(1 << 19), "an extended header of 262144 bytes"),
        (header(b"0", b"x") * 9 + END, "more than 8 extended headers"),
        (header(b"0", b"x") + END, "at byte 512 is missing behind its extended headers"),
        (header(b"0", b"S") + END, "'a' is a file with gaps"),
        (header(b"0", b"1") + END, "'a' is a hard link"),
        (header(b"0", b"2") + END, "'a' is a symbolic link"),
        (header(b"0", b"3") + END, "'a' is a device"),
        (header(b"0", b"M") + END, "'a' is neither a file nor a folder"),
        (header(b"1000", b"5") + header(b"0", b"x") + FILE + END, "the folder 'a' claims 512 bytes"),
        (header(b"1000", b"\0", "a/") + header(b"0", b"x") + FILE + END, "the folder 'a' claims 512 bytes"),
        (header(b"-0000001000") + END, "at byte 0 claims -512 bytes"),
        (header(b"\xff" * 12) + END, "at byte 0 claims -1 bytes"),
        (header(b"\x1c4000") + END, "claims 2048 bytes, more than there are"),
        (extended(b"size=99999") + FILE + END, "states size"),
        (extended(b"GNU.sparse.realsize=99") + FILE + END, r"states GNU\.sparse\.realsize"),
        (extended(b"path=b", kind=b"g") + FILE + END, "states path"),
        (extended(b"path=b", b"path=c") + FILE + END, "a damaged extended header"),
        (extended(b"0 path=b\n") + FILE + END, "a damaged extended header"),
        (extended(b"2 " * 300 + b"=") + FILE + END, "a damaged extended header"),
        (extended(b"9" * 600) + FILE + END, "a damaged extended header"),
        (extended(b"99 path=b\n") + FILE + END, "a damaged extended header"),
        (extended(*(b"k%d=1" % n for n in range(101))) + FILE + END, "a damaged extended header"),
        (header(b"1", b"x") + b"9 path=b\n".ljust(512, b"\0") + FILE + END, "longer than it says"),
        (extended(b"path=\xff\xfe") + FILE + END, "a name that is not UTF-8"),
        (extended(b"path=a\nb") + FILE + END, "which no file should have"),
        (extended(b"path=") + FILE + END, "which no file should have"),
    ],
)
def test_strange_headers_are_refused(content, reason):
    with pytest.raises(DamagedTarError, match=reason):
        list(members_of(io.BytesIO(content)))


def test_a_member_that_is_not_there():
    with pytest.raises(DamagedTarError, match="no member at byte 512"):
        member_at(io.BytesIO(FILE + END), 512)
