from __future__ import annotations

import io
import struct
import zipfile

import pytest

from detector import zip_directory
from detector.zip_directory import DamagedZipError, inflate, read_member, read_members

CONTENTS = {"a": b"content" * 9, "größe/b": bytes(300), "c": b""}


def archive(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as out:
        for name, content in CONTENTS.items():
            out.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("before", [b"", b"some program"])
def test_members_are_read_as_zipfile_reads_them(method, before):
    file = io.BytesIO(before + archive(method))
    members = read_members(file, 3)
    assert {name: read_member(file, member) for name, member in members.items()} == CONTENTS


def refused(content: bytes, most: int = 10) -> str:
    file = io.BytesIO(content)
    with pytest.raises(DamagedZipError) as caught:
        for member in read_members(file, most).values():
            read_member(file, member)
    return str(caught.value)


def overwritten(content: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    start = content.index(signature) + at
    return content[:start] + value + content[start + len(value) :]


def test_damaged_archives_are_refused(monkeypatch):
    whole = archive()
    assert refused(b"") == "it has no directory of its members"
    assert refused(whole, most=2) == "it has 3 members; at most 2 are expected"
    for end in range(len(whole) - 22):
        refused(whole[:end])
    assert "lies outside of the file" in refused(overwritten(whole, b"PK\1\2", 42, b"\xff\xff\xff\x7f"))
    assert "lies outside of the file" in refused(overwritten(whole, b"PK\1\2", 20, b"\xff\xff\xff\x7f"))
    assert "cannot name 65535 members" in refused(overwritten(whole, b"PK\5\6", 8, b"\xff\xff\xff\xff"))
    assert "checksum differs" in refused(overwritten(whole, b"PK\1\2", 16, b"\0\0\0\0"))
    assert "unpacks to more than 20 bytes" in refused(overwritten(whole, b"PK\1\2", 24, struct.pack("<I", 20)))
    assert "is not 90 bytes long" in refused(overwritten(whole, b"PK\1\2", 24, struct.pack("<I", 90)))
    assert "encrypted or compressed" in refused(overwritten(whole, b"PK\1\2", 10, b"\x0e"))
    assert "has two sizes" in refused(overwritten(archive(zipfile.ZIP_STORED), b"PK\1\2", 24, b"\1\0\0\0"))
    monkeypatch.setattr(zip_directory, "SMALL", 10)
    monkeypatch.setattr(zip_directory, "RATIO", 0)
    assert "its members claim 363 bytes in a file of" in refused(whole)


def test_members_that_overlap_or_share_a_name_are_refused():
    whole = archive(zipfile.ZIP_STORED)
    first, second = (
        i for i in range(len(whole)) if whole.startswith(b"PK\1\2", i) and whole[i + 46 : i + 47] in b"a\xc3g"
    )
    same = whole[: second + 42] + whole[first + 42 : first + 46] + whole[second + 46 :]
    assert "has another name before its content" in refused(same)
    assert "overlap" in refused(overwritten(whole, b"PK\3\4", 28, b"\5\0"))
    assert "twice" in refused(whole.replace(b"c", b"A"))


def test_inflate_is_bounded():
    packed = archive()
    member = read_members(io.BytesIO(packed), 3)["größe/b"]
    data = packed[member.start : member.start + member.packed]
    assert inflate(data, 300) == bytes(300)
    with pytest.raises(DamagedZipError, match="unpacks to more than 299 bytes"):
        inflate(data, 299)
    with pytest.raises(DamagedZipError, match="cut off"):
        inflate(data[:-1], 300)
    with pytest.raises(DamagedZipError, match="damaged"):
        inflate(b"\xff" * 20, 300)


def test_a_member_has_one_name():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("scores.npy", b"content")
    whole = file.getvalue()
    for place in (whole.index(b"scores"), whole.rindex(b"scores")):
        changed = whole[:place] + b"q" + whole[place + 1 :]
        with pytest.raises(DamagedZipError, match="has another name before its content"):
            read_members(io.BytesIO(changed), 3)
