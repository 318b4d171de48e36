"""JSON, YAML, pickles and atomic writes."""

from __future__ import annotations

import math
import os
import pickle
import struct
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from detector import io
from detector.errors import MissingFileError, UserError
from detector.io import (
    atomic_file,
    atomic_files,
    atomic_folder,
    read_json,
    read_pickle,
    read_text,
    read_yaml,
    remove_leftovers,
    write_json,
    write_text,
)


class Point(msgspec.Struct):
    x: int


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", b'{"x": 1', "not valid JSON"),
        ("a.json", b"", "not valid JSON"),
        ("a.json", b'{"x": NaN}', r"NaN read as null\): .* - at `\$\.x`"),
        ("a.json", b"<!DOCTYPE html>", "it is an HTML page"),
        ("a.json", b"version https://git-lfs.github.com/spec/v1", "it is a pointer of Git LFS"),
        ("a.json", b"\x1f\x8b\x08\0", "it is a compressed file"),
        ("a.json", b"\x89HDF\r\n", "it is an HDF5 file"),
        ("a.json", b'{"x": Infinity}', "not valid JSON: .*JSON has no Infinity"),
        ("a.json", b'{"x":\n"gr\xf6\xdfer"}', "line 2: not UTF-8 .*größer"),
        ("a.json", b'{"x": 1.5}', r"\$\.x"),
        ("a.json", b'{"x": "1"}', r"\$\.x"),
        ("a.json", b"{}", "`x`"),
        ("a.yaml", b"a: !!python/object/apply:os.system [x]", "not valid YAML"),
        ("a.yaml", b"a: 1\nb: 2\na: 3", "not valid YAML: found duplicate key 'a'"),
        ("a.yaml", b"a: [b", "not valid YAML"),
        ("a.yaml", b"a: 1\n---\nb: 2", "not valid YAML"),
        ("a.yaml", b"a: !!int x", "not valid YAML"),
        ("a.yaml", b"a: \xff", "not valid YAML"),
        pytest.param("a.yaml", b"[" * 100_000, "not valid YAML", id="deep"),
        ("a.pkl", b"", "damaged"),
        ("a.pkl", b"not a pickle", "damaged"),
        ("a.pkl", pickle.dumps([np.arange(6)])[:-20], "damaged"),
    ],
)
def test_faults_name_file_and_place(name: str, content: bytes, fault: str, tmp_path: Path):
    path = tmp_path / name
    readers = {".json": lambda path: read_json(path, Point), ".yaml": read_yaml, ".pkl": read_pickle}
    with pytest.raises(MissingFileError, match=name):
        readers[path.suffix](path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{fault}"):
        readers[path.suffix](path)


class Row(msgspec.Struct):
    id: int | str
    area: float | None = None


@pytest.mark.parametrize(
    ("content", "row"),
    [
        (b'\xef\xbb\xbf{"id": 1}', Row(1)),
        ('{"id": "größer"}'.encode("utf-16"), Row("größer")),
        ('{"id": "größer"}'.encode("utf-16-be"), Row("größer")),
        ('{"id": "größer"}'.encode("utf-32"), Row("größer")),
        (b'{"id": "the dog\x92s"}', Row("the dog\u2019s")),
        (b'{"id": "NaN \\" NaN", "area": NaN}', Row('NaN " NaN')),
        (b'{"id": 1.0, "area": 2.0}', Row(1, 2.0)),
    ],
)
def test_json_of_other_tools(tmp_path: Path, content: bytes, row: Row):
    (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json", Row) == row


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("\ufeffgrößer\r\n".encode(), "größer\n"),
        ("größer".encode("utf-16"), "größer"),
        ("größer".encode("utf-16-le"), "größer"),
        (b"\x93it\x92s\x94 \x96 ", "\u201cit\u2019s\u201d \u2013 "),
        (b"", ""),
    ],
)
def test_text_of_other_tools(tmp_path: Path, content: bytes, text: str):
    (tmp_path / "a.txt").write_bytes(content)
    assert read_text(tmp_path / "a.txt") == text


def test_json_without_nan(tmp_path: Path):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UserError, match=r"x\.json: .*NaN or infinite"):
            write_json(tmp_path / "x.json", {"boxes": [{"score": value}]})
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "x.json", [{"x": 3, "name": "ä"}])
    assert "ä" in (tmp_path / "x.json").read_text("utf-8")
    assert read_json(tmp_path / "x.json", list[Point]) == [Point(3)]


def test_yaml(tmp_path: Path):
    path = tmp_path / "a.yaml"
    write_text(path, "a: 1e-5\nb: 1E5\nc: [.5e1, 1.0e-05, e5, 1e]\nd: {<<: {y: 1, z: 2}, z: 3}\ne: &n [1, x]\nf: *n\n")
    assert read_yaml(path) == {
        "a": 1e-5,
        "b": 1e5,
        "c": [5.0, 1e-5, "e5", "1e"],
        "d": {"y": 1, "z": 3},
        "e": [1, "x"],
        "f": [1, "x"],
    }
    path.write_bytes(b"")
    assert read_yaml(path) is None


ARRAYS = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 4), dtype=np.float32),
    "text": np.array(["größer", ""]),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_protocol(tmp_path: Path, protocol: int):
    content = {"model": OrderedDict(ARRAYS), "__author__": "someone", "scalar": np.float32(2.5), "more": [1, (2, None)]}
    content["nothing"] = [np.str_(""), np.bytes_(b"")]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, protocol))
    read = read_pickle(tmp_path / "a.pkl")
    assert (read["__author__"], read["scalar"], read["more"]) == ("someone", 2.5, [1, (2, None)])
    assert type(read["scalar"]) is float
    assert read["nothing"] == ["", b""]
    for name, array in ARRAYS.items():
        assert np.array_equal(read["model"][name], array) and read["model"][name].dtype == array.dtype


def python2_pickle(name: str, array: np.ndarray) -> bytes:
    """What Python 2's cPickle writes with protocol 2: name and content of the array are strings of no encoding."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    out = b"\x80\x02}(" + text(name.encode("latin1"))
    out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    out += b"(" + number(1) + b"(" + b"".join(map(number, array.shape)) + b"t"
    out += b"cnumpy\ndtype\n" + text(array.dtype.str[1:].encode()) + number(0) + number(1) + b"\x87R"
    out += b"(" + number(3) + text(b"<") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    return out + b"\x89" + text(array.tobytes()) + b"tbu."


def test_arrays_of_python_2(tmp_path: Path):
    array = np.arange(-3, 3, dtype=np.float32).reshape(2, 3)
    (tmp_path / "a.pkl").write_bytes(python2_pickle("caf\xe9", array))
    assert np.array_equal(read_pickle(tmp_path / "a.pkl")["caf\xe9"], array)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


@pytest.mark.parametrize("content", [{"model": Bomb()}, {"w": np.array([Bomb()], dtype=object)}, np.load, eval, {1, 2}])
def test_other_classes_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(UserError, match=r"a\.pkl: .* is not allowed"):
        read_pickle(tmp_path / "a.pkl")
    assert not (tmp_path / "bomb-went-off").exists()


class Call:
    """Pickled as a call of a function, with a state that the result gets."""

    def __init__(self, function: object, arguments: tuple, state: object = None) -> None:
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self):
        return (self.function, self.arguments) if self.state is None else (self.function, self.arguments, self.state)


def lying_dtype(code: str, *state: object) -> Call:
    return Call(np.dtype, (code, False, True), (3, *state))


def scalar(dtype: Call, content: bytes = b"A" * 8) -> Call:
    return Call(np.float32(1).__reduce__()[0], (dtype, content))


def array(shape: tuple, dtype: object, content: object) -> Call:
    return Call(np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, shape, dtype, False, content))


AN_OBJECT = {"a": (np.dtype("O"), 0)}
# of an array of objects whose addresses are in the file
LYING_DTYPES = {
    "record of objects": lying_dtype("V8", "|", None, ("a",), AN_OBJECT, 8, 1, 0),
    "number with fields": lying_dtype("f8", "<", None, ("a",), AN_OBJECT, 8, 8, 63),
    "subarray of objects": lying_dtype("f8", "<", (np.dtype("O"), (1,)), None, None, 8, 8, 63),
    "object": lying_dtype("O", "|", None, None, None, 8, 8, 0),
    "date": lying_dtype("M8", "<", None, None, None, -1, -1, 0),
    "fields by name": Call(np.dtype, ({"names": ["a"], "formats": ["O"]},)),
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", LYING_DTYPES)
def test_a_dtype_that_lies_is_refused(tmp_path: Path, kind: str, protocol: int):
    """NumPy would take the eight bytes "AAAAAAAA" for the address of an object, and the process would end."""
    dtype = LYING_DTYPES[kind]
    contents = [scalar(dtype), array((1,), dtype, b"A" * 8), Call(OrderedDict, (array((1,), dtype, b"A" * 8),))]
    for content in contents:
        (tmp_path / "a.p").write_bytes(pickle.dumps([content], protocol))
        with pytest.raises(UserError, match=r"a\.p: .*is not allowed"):
            read_pickle(tmp_path / "a.p")


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (scalar(lying_dtype("f8", "<", None, None, None, -1, -1, 63)), 2261634.5098039214),  # flags of objects
        (scalar(lying_dtype("S8", "|", None, None, None, -800, 1, 0)), b"A" * 8),  # another size
        (Call(np.ndarray, ((3,), "O")), []),
        (Call(OrderedDict, (), {"items": 3}), {}),
        (Call(OrderedDict, (), (None, {"__class__": np.ndarray})), {}),
    ],
)
def test_false_state_has_no_effect(tmp_path: Path, content: Call, value: object):
    (tmp_path / "a.p").write_bytes(pickle.dumps(content, 2))
    read = read_pickle(tmp_path / "a.p")
    assert (read.tolist() if isinstance(read, np.ndarray) else read) == value


@pytest.mark.parametrize("shape", [(2,), (-2, -1), (2**32, 2**32), (2**62,), "x"])
def test_arrays_of_another_size_than_their_content_are_damaged(tmp_path: Path, shape: tuple):
    for content in (b"A" * 8, [1]):
        (tmp_path / "a.p").write_bytes(pickle.dumps(array(shape, np.dtype("f8"), content), 2))
        with pytest.raises(UserError, match=r"a\.p: damaged"):
            read_pickle(tmp_path / "a.p")


def test_the_memory_of_an_array_is_not_freed_under_another_one(tmp_path: Path):
    """NumPy frees an array's memory when its state is set again, although another array may share it."""
    state = (1, (1,), np.dtype("f8"), False, b"A" * 8)
    (tmp_path / "a.p").write_bytes(
        pickle.dumps(array((8,), np.dtype("f8"), b"A" * 64), 2)[:-1] + pickle.dumps(state, 2)[2:-1] + b"b."
    )
    with pytest.raises(UserError, match=r"a\.p: .*two states"):
        read_pickle(tmp_path / "a.p")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "encoder").mkdir(parents=True)
    for name in ("config.yaml", "encoder/weights", "notes.txt"):
        (folder / name).write_text(f"earlier {name}")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write_parts(folder: Path) -> None:
    with atomic_files(folder, "config.yaml") as part:
        (part / "encoder").mkdir()
        (part / "encoder" / "more").write_text("new")
        (part / "config.yaml").write_text("new")


def test_an_error_leaves_the_earlier_file_and_folder(folder: Path):
    path, before = folder.parent / "a.txt", contents(folder)
    write_text(path, "earlier")
    with pytest.raises(OSError, match="full"), atomic_file(path) as part:
        part.write_text("hal")
        raise OSError("full")
    with pytest.raises(KeyboardInterrupt), atomic_folder(folder) as part:
        (part / "config.yaml").write_text("other")
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="full"), atomic_files(folder, "config.yaml") as part:
        (part / "config.yaml").write_text("hal")
        raise OSError("full")
    assert path.read_text() == "earlier" and contents(folder) == before
    assert sorted(one.name for one in folder.parent.iterdir()) == ["a.txt", "model"]


def test_new_files_replace_earlier_ones(folder: Path, tmp_path: Path):
    write_parts(folder)
    assert contents(folder) == {"config.yaml": "new", "encoder/more": "new", "notes.txt": "earlier notes.txt"}
    write_parts(tmp_path / "new" / "deep")
    assert contents(tmp_path / "new" / "deep") == {"config.yaml": "new", "encoder/more": "new"}
    with atomic_folder(folder) as part:
        (part / "c.txt").write_text("c")
    assert contents(folder) == {"c.txt": "c"}
    assert sorted(one.name for one in folder.parent.iterdir()) == ["model", "new"]


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("moves", [0, 1])
def test_a_mixture_of_new_and_earlier_files_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch, moves: int):
    replace, done = Path.replace, []

    def dying(path, target):
        if len(done) == moves:
            raise KilledError
        done.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(KilledError):
        write_parts(folder)
    assert not (folder / "config.yaml").exists()
    assert [path.name for path in done] == ["encoder"][:moves]


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_leftovers_of_a_killed_process_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    """Killed before, between and after the two renames that replace a folder."""
    before, rename, calls = contents(folder), Path.rename, []

    def dying(path, target):
        calls.append(path)
        if len(calls) == {"before": 1, "between": 2, "after": 9}[moment]:
            raise KilledError
        rename(path, target)

    monkeypatch.setattr(Path, "rename", dying)
    monkeypatch.setattr(io.shutil, "rmtree", lambda *a, **k: None)  # a killed process deletes nothing
    try:
        with atomic_folder(folder) as part:
            (part / "c.txt").write_text("c")
    except KilledError:
        pass
    monkeypatch.undo()
    remove_leftovers(folder.parent)
    assert [one.name for one in folder.parent.iterdir()] == ["model"]
    assert contents(folder) == ({"c.txt": "c"} if moment == "after" else before)


def test_a_file_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, seen = tmp_path / "a.txt", []
    monkeypatch.setattr(io, "flush_to_disk", lambda one: seen.append((one == tmp_path, path.exists())))
    write_text(path, "a")
    assert seen == [(False, False), (True, True)]


def test_a_pipe_is_written_directly(tmp_path: Path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "a\n")
    reader.join(10)
    assert read == ["a\n"] and pipe.is_fifo()
