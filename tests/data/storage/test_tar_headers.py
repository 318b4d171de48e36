from __future__ import annotations

import io
import tarfile

import pytest

from detector.errors import UserError
from e2e_vl.data.storage.tar_headers import check_tar


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tarfile_writes_is_accepted(tmp_path, layout):
    with tarfile.open(tmp_path / "a.tar", "w", format=layout) as tar:
        for number, name in enumerate(("1.jpg", "a folder/" + "x" * 80 + ".txt", "é" * 40 + ".txt")):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 700 * number, 1.5 if layout == tarfile.PAX_FORMAT else 1
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    check_tar(tmp_path / "a.tar", "get it again")


def header(size: bytes, kind: bytes = b"0") -> bytes:
    data = bytearray(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT))
    data[124:136], data[156:157] = size.ljust(12, b"\0"), kind
    return bytes(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(b"\x80" + (1 << 80).to_bytes(11, "big")), "at byte 0 claims 1208925819614629174706176 bytes"),
        (header(b"2000") + bytes(512), "claims 1024 bytes, more than there are"),
        (header(b"1000000", b"x") + bytes(1 << 19), "extended headers that no image"),
        (header(b"0", b"x") * 9 + bytes(1024), "at byte 4096 has extended headers"),
        (header(b"0", b"S") + bytes(1024), "extended headers"),
        (header(b"16", b"x") + b"14 size=99999\n".ljust(512, b"\0") + bytes(1024), "states a size"),
        (header(b"-0000001000") + bytes(1024), "at byte 0 claims -512 bytes"),
        (header(b"\xff" * 12) + bytes(1024), "at byte 0 claims -1 bytes"),
        (header(b"31", b"x") + b"25 GNU.sparse.realsize=99\n".ljust(512, b"\0") + bytes(1024), "states a size, gaps"),
        (header(b"1000", b"x") + b"9" * 512 + bytes(1024), "a very long number"),
    ],
)
def test_strange_headers_are_refused(tmp_path, content, reason):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.tar: no readable tar file \(.*{reason}.*\); get it again"):
        check_tar(tmp_path / "a.tar", "get it again")
