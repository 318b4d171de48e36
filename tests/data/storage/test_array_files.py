from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest

from detector.errors import MissingFileError, UserError
from e2e_vl.data.storage.array_files import read_npz

ARRAYS = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "swapped": np.array([1, 258], dtype=">i4"),
    "flags": np.array([True, False]),
    "none": np.zeros((0, 4), np.float32),
    "number": np.array(7),
    "text": np.array("é" * 5),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_as_numpy_reads_them(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    for found in (read_npz(tmp_path / "a.npz"), read_npz(io.BytesIO((tmp_path / "a.npz").read_bytes()), "a")):
        assert list(found) == list(ARRAYS)
        for name, array in np.load(tmp_path / "a.npz").items():
            assert np.array_equal(found[name], array) and found[name].dtype == array.dtype
            assert found[name].flags.writeable
    assert list(read_npz(tmp_path / "a.npz", only=("text", "other"))) == ["text"]


def with_header(shape: str, kind: str = "'<f4'", data: bytes = bytes(8)) -> bytes:
    text = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (with_header("(3,)"), r"claims the shape \[3\], but has 8 bytes"),
        (with_header("(1099511627776,)"), "claims the shape"),
        (with_header("(-2,)"), "has the shape"),
        (with_header("(" + "1," * 40 + ")"), "has the shape"),
        (with_header("(1,)", "'|O'"), "holds object and no numbers"),
        (with_header("(2,)", "'<U1'"), "holds <U1 and no numbers"),
        (with_header("(1,)", "[('a', '<f4'), ('b', '<f4')]"), "and no numbers"),
        (with_header("(99999999,)", "'|V0'", b""), "and no numbers"),
        (with_header("2 ** 99"), "header of the array 'a' is damaged"),
        (b"no archive", "no directory"),
    ],
)
def test_claims_are_refused(tmp_path, content, reason):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.npz: no readable file of arrays \(.*{reason}"):
        read_npz(tmp_path / "a.npz")


def test_a_file_that_is_cut_off_or_has_a_flipped_bit(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(300))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[:-1000] + bytes(1000))
    with pytest.raises(UserError, match=r"a\.npz: no readable file"):
        read_npz(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(whole[:900] + b"\xff" + whole[901:])
    with pytest.raises(UserError, match="checksum differs"):
        read_npz(tmp_path / "a.npz")


def test_bombs_are_not_unpacked(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(10_000_000))  # 80 MB in 80 KB
    with pytest.raises(UserError, match="its members claim 80"):
        read_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{f"x{n}": np.zeros(1) for n in range(65)})
    with pytest.raises(UserError, match="it has 65 members"):
        read_npz(tmp_path / "b.npz")
    whole = (tmp_path / "b.npz").read_bytes()
    (tmp_path / "b.npz").write_bytes(rewritten(whole, lambda name, data: data if name == "x1.npy" else None))
    assert list(read_npz(tmp_path / "b.npz")) == ["x1"]


def test_a_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match=r"none\.npz: there is no such file"):
        read_npz(tmp_path / "none.npz")


def rewritten(content: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive whose members went through `change`; None leaves one out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return stream.getvalue()
