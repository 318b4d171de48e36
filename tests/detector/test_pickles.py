from __future__ import annotations

import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from detector.errors import UserError
from detector.weight_files import load_arrays

ARRAYS = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "half": np.array([1.5, -2.0], dtype=np.float16),
    "swapped": np.array([1, 258], dtype=">i4"),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 4), dtype=np.float32),
    "number": np.array(7),
}


def write(path: Path, content: object, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def test_a_list_that_is_named_twice_is_not_copied_twice(tmp_path: Path):
    """Otherwise 40 of them inside each other would be 2 ** 40 lists."""
    content: list = [1]
    for _ in range(40):
        content = [content, content]
    loaded = load_arrays(write(tmp_path / "lists.pkl", content))
    assert loaded[0] is loaded[1] and len(loaded) == 2


def python2_pickle(arrays: dict[str, np.ndarray]) -> bytes:
    """What Python 2's cPickle writes with protocol 2: names and array bytes are byte strings of no encoding."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    out = b"\x80\x02}("
    for name, array in arrays.items():
        out += text(name.encode("latin1"))
        out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
        out += b"(" + number(1) + b"(" + b"".join(map(number, array.shape)) + b"t"
        out += b"cnumpy\ndtype\n" + text(array.dtype.str[1:].encode()) + number(0) + number(1) + b"\x87R"
        out += b"(" + number(3) + text(b"<") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
        out += b"\x89" + text(array.tobytes()) + b"tb"
    return out + b"u."


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_protocol(tmp_path: Path, protocol: int):
    content = {"model": OrderedDict(ARRAYS), "__author__": "someone", "scalar": np.float32(2.5), "more": [1, (2, None)]}
    read = load_arrays(write(tmp_path / "a.pkl", content, protocol))
    assert list(read) == list(content)
    assert (read["__author__"], read["scalar"], read["more"]) == ("someone", 2.5, [1, [2, None]])
    for name, array in ARRAYS.items():
        assert np.array_equal(read["model"][name], array)
        assert read["model"][name].dtype == array.dtype


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_large_arrays_of_every_protocol(tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch):
    """Old protocols hold bytes as text, which is copied twice."""
    monkeypatch.setattr("detector.weight_files.SMALL", 0)
    arrays = {"w": np.full((50, 1000), -0.3, dtype=np.float32), "zeros": np.zeros(50_000, dtype=np.float32)}
    read = load_arrays(write(tmp_path / "a.pkl", arrays, protocol))
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())


def test_an_array_that_is_named_twice_is_one_array(tmp_path: Path):
    read = load_arrays(write(tmp_path / "a.pkl", [ARRAYS["floats"]] * 3))
    assert read[0] is read[1] is read[2]


def test_arrays_that_share_their_bytes_take_a_bounded_memory(tmp_path: Path):
    """A thousand arrays of one string of a megabyte."""
    data = b"T" + struct.pack("<i", 1 << 20) + bytes(1 << 20) + b"q\x00"
    start = (
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87Rq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03"
    )
    one = b"h\x02h\x03K\x00\x85U\x01b\x87R(K\x01J" + struct.pack("<i", 1 << 20) + b"\x85h\x01\x89h\x00tb"
    for number in (3, 1000):
        (tmp_path / "a.pkl").write_bytes(b"\x80\x02(" + data + start + b"l](" + one * number + b"e.")
        if number == 3:
            assert len(load_arrays(tmp_path / "a.pkl")) == 3
    with pytest.raises(UserError, match="its arrays would take more memory than the file"):
        load_arrays(tmp_path / "a.pkl")


def test_arrays_of_python_2(tmp_path: Path):
    arrays = {"caf\xe9": np.arange(-3, 3, dtype=np.float32).reshape(2, 3), "b": np.array([200, 3], dtype=np.uint8)}
    content = python2_pickle(arrays)
    assert np.array_equal(pickle.loads(content, encoding="latin1")["caf\xe9"], arrays["caf\xe9"])  # numpy agrees
    (tmp_path / "a.pkl").write_bytes(content)
    read = load_arrays(tmp_path / "a.pkl")
    assert list(read) == list(arrays)
    assert all(np.array_equal(read[name], arrays[name]) for name in arrays)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


class OwnArray(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"model": Bomb()}, "mkdir"),
        ({"model": {"w": ARRAYS["floats"], "x": Bomb()}}, "mkdir"),
        ({"w": np.array([Bomb(), None], dtype=object)}, "mkdir|an array of type"),
        ({"w": np.array([None, 3], dtype=object)}, "an array of type 'O8?'"),
        ({"w": np.zeros(2, dtype=[("a", "f4")])}, "an array of type"),
        ({"w": np.array(["text"])}, "an array of type"),
        ({"w": np.array(["2020-01-01"], dtype="datetime64[D]")}, "an array of type"),
        ({"w": np.zeros(2).view(OwnArray)}, "OwnArray"),
        ({"w": np.load}, r"numpy\S*\.load"),
        ({"w": eval}, "eval"),
        ({"w": {1, 2}}, "set"),
    ],
)
def test_anything_else_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, named: str
):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.pkl", content)
    with pytest.raises(ValueError, match=rf"a\.pkl: not a plain pickle of arrays, it holds .*({named}).*executed"):
        load_arrays(path)
    assert not (tmp_path / "bomb-went-off").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps(ARRAYS)[:-20],
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR.",  # an array that is never filled
        b"cnumpy\ndtype\n(S'f4'\nI0\nI1\ntR(I3\nS'<'\nNNNI-1\nI-1\nI0\ntbb.",  # nothing to build
        python2_pickle({"w": np.zeros(4, np.float32)}).replace(b"J\x04\0\0\0t", b"J\x05\0\0\0t"),  # a shape too large
    ],
)
def test_damaged_pickles(tmp_path: Path, content: bytes):
    (tmp_path / "a.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.pkl: "):
        load_arrays(tmp_path / "a.pkl")


def test_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.pkl: no such weights file"):
        load_arrays(tmp_path / "none.pkl")


def test_python_2_writer_uses_byte_strings():
    """The writer above is not Python 3's: it has no unicode opcode at all."""
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(python2_pickle({"w": np.zeros(2, np.float32)}))}
    assert "BINSTRING" in opcodes and not any("UNICODE" in name for name in opcodes)
