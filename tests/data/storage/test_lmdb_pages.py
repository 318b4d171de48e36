from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from e2e_vl.data.storage.lmdb_pages import DamagedLmdbError, find_values

lmdb = pytest.importorskip("lmdb")


def write(path: Path, contents: dict[bytes, bytes], *, per_transaction: int = 1000) -> None:
    items = list(contents.items())
    with lmdb.open(str(path), subdir=False, map_size=1 << 26, lock=False) as environment:
        for start in range(0, len(items), per_transaction):
            with environment.begin(write=True) as transaction:
                for key, value in items[start : start + per_transaction]:
                    transaction.put(key, value)


def read(path: Path) -> dict[bytes, bytes]:
    content = path.read_bytes()
    return {key: content[offset : offset + size] for key, (offset, size) in find_values(path).items()}


@pytest.mark.parametrize("number", [0, 1, 7, 300, 5000])
@pytest.mark.parametrize("longest", [0, 40, 3000, 20_000])
def test_what_lmdb_writes_is_read_in_its_order(tmp_path, number, longest):
    draw = random.Random(number)
    size = longest if number < 1000 else min(longest, 3000)
    contents = {
        f"image {draw.random()}".encode() * draw.randint(1, 8): draw.randbytes(draw.randint(0, size))
        for _ in range(number)
    }
    write(tmp_path / "a.lmdb", contents)
    found = read(tmp_path / "a.lmdb")
    assert found == contents
    with (
        lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as t,
    ):
        assert list(found) == list(t.cursor().iternext(values=False))


def test_the_newest_transaction_counts(tmp_path):
    contents = {f"{n}".encode(): bytes(n) for n in range(200)}
    write(tmp_path / "a.lmdb", contents, per_transaction=7)
    write(tmp_path / "a.lmdb", {b"3": b"new", b"more": b"x" * 9000})
    assert read(tmp_path / "a.lmdb") == {**contents, b"3": b"new", b"more": b"x" * 9000}


def test_a_file_that_is_cut_off_is_refused_wherever_a_value_is_missing(tmp_path):
    contents = {f"{n}".encode(): bytes(5000) for n in range(50)}
    write(tmp_path / "a.lmdb", contents)
    whole = (tmp_path / "a.lmdb").read_bytes()
    for pages in range(len(whole) // 4096):
        (tmp_path / "a.lmdb").write_bytes(whole[: pages * 4096])
        with pytest.raises(DamagedLmdbError, match=r"cut off|begin like|damaged"):
            find_values(tmp_path / "a.lmdb")


def test_damaged_pages_are_refused(tmp_path):
    path, contents = tmp_path / "a.lmdb", {f"{n:05d}".encode(): b"x" * 40 for n in range(600)}
    write(path, contents)
    whole = path.read_bytes()
    root = struct.unpack_from("<Q", whole, 4096 + 128)[0]
    first = root * 4096 + struct.unpack_from("<H", whole, root * 4096 + 16)[0]

    def refused(at: int, value: bytes) -> str:
        path.write_bytes(whole[:at] + value + whole[at + len(value) :])
        with pytest.raises(DamagedLmdbError) as caught:
            find_values(path)
        return str(caught.value)

    assert "no tree" in refused(first, struct.pack("<HHH", root, 0, 0))  # the root is below itself
    assert "lies behind its end" in refused(first, b"\xff\xff\xff\xff")
    assert "is damaged" in refused(root * 4096, b"\xff")
    assert "is damaged" in refused(root * 4096 + 12, b"\xff\xff")
    assert "is damaged" in refused(root * 4096 + 16, b"\xff\x0f")
    assert "its root is page" in refused(4096 + 128, struct.pack("<Q", 1 << 40))
    assert "its header says 601" in refused(4096 + 120, struct.pack("<Q", 601))
    assert "its pages claim 4096 and 12" in refused(4096 + 40, struct.pack("<I", 12))
    assert "does not begin like" in refused(0, bytes(4096))
    assert "does not begin like" in refused(4096, bytes(4096))
    assert "several values" in refused(4096 + 92, b"\x04")
