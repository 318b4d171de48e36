"""Files are written by one writer (`detector/io.py`), so that each is there as a whole or not at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("detector", "e2e_vl", "tools")
WRITER = "detector/io.py"
WHOLE = {"atomic_file", "atomic_folder", "atomic_files"}

# Functions that write a file or a folder at the place they are told: those of libraries, and ours that build on them.
WRITING = {
    *("write_bytes", "savez", "savez_compressed", "tofile", "savetxt", "savefig", "imwrite", "to_csv"),
    *("save_file", "save_pretrained", "save_model", "copyfile", "copytree", "copy2", "write_video", "extractall"),
    *("open_memmap", "memmap"),
}
WITH_MODE = {"open", "File", "ZipFile", "fdopen"}
STREAMS = {"buffer", "stream", "file"}  # what an open file is called: `image.save(buffer, "PNG")`

# What may write outside of a block of the writer, and why that leaves no half of a file.
EXCEPTIONS = {
    ("detector/zoo.py", "_download"): "into a name of its own, which `take_place` exchanges when it is verified",
    ("e2e_vl/data/storage/index_files.py", "cached_index"): "the same, where the folder may turn out to be read-only",
    ("e2e_vl/data/features.py", "save_npz"): "into a file that its caller opened",
    ("e2e_vl/io.py", "write"): "a line at the end of the log; half a line is left out when it is read",
    ("e2e_vl/run/checkpoint.py", "save_model"): "into a folder that its callers are making",
    ("e2e_vl/encoders/base.py", "save_pretrained"): "a part of `save_model`",
    ("e2e_vl/run/checkpoint.py", "_finish"): "into the folder of `begin_folder`",
    ("e2e_vl/run/train.py", "_evaluate"): "into the folder that `BestModel.write` is making",
    ("e2e_vl/analysis/figures.py", "*"): "into the folder that `write_results` is making",
    ("e2e_vl/analysis/tables.py", "write_csv"): "into the folder that `write_results` is making",
    ("tools/experiments/jobs.py", "_run"): "what a command prints while it runs",
    ("e2e_vl/synthetic/*", "*"): "drawn data; a stamp that is written last says that they are all there",
    ("tools/benchmarks/*", "*"): "data of a measurement, made again each time",
}


def written_at(file: str, source: str) -> Iterator[tuple[int, str, str]]:
    """(line, function around it, what is called) of each call that writes outside of a block of the writer."""

    def walk(node: ast.AST, function: str, is_whole: bool) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef):
            function, is_whole = node.name, False
        if isinstance(node, ast.With):
            for item in node.items:  # from the left to the right: `with atomic_file(path) as part, part.open("w")`
                yield from walk(item, function, is_whole)
                is_whole = is_whole or name_of(item.context_expr) in WHOLE
            for child in node.body:
                yield from walk(child, function, is_whole)
            return
        if isinstance(node, ast.Call) and not is_whole and writes(node):
            yield node.lineno, function, name_of(node)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function, is_whole)

    yield from walk(ast.parse(source, filename=file), "", False)


def name_of(node: ast.AST) -> str:
    """The last name of what is called."""
    function = getattr(node, "func", node)
    return getattr(function, "attr", getattr(function, "id", ""))


def writes(call: ast.Call) -> bool:
    """Whether a call writes to a path of the file system."""
    name, is_method = name_of(call), isinstance(call.func, ast.Attribute)
    if name == "write_text":
        return is_method  # `path.write_text`; the function of the writer is called by its plain name
    if name == "save":  # of a picture, an array, torch; into an open file it is not
        target = (
            call.args[-1] if name_of(call.func.value if is_method else call) == "torch" else (call.args or [None])[0]
        )
        return is_method and not (isinstance(target, ast.Name) and target.id in STREAMS)
    if name in WITH_MODE:
        words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        is_lmdb = name == "open" and is_method and name_of(call.func.value) == "lmdb"
        flags = {one.attr for word in words for one in ast.walk(word) if isinstance(one, ast.Attribute)}
        return (
            is_lmdb
            or bool(flags & {"O_WRONLY", "O_RDWR"})
            or any(set(mode) & set("wax+") and len(mode) < 4 for mode in modes)
        )
    return name in WRITING


def allowed(file: str, function: str) -> bool:
    folder = f"{file.rpartition('/')[0]}/*"
    return any((where, what) in EXCEPTIONS for where in (file, folder) for what in (function, "*"))


def sources() -> dict[str, str]:
    """File, relative to the repository -> its text, without the writer."""
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    del texts[WRITER]
    return texts


def test_nothing_is_written_outside_of_the_writer():
    found = [
        f"{file}:{line} calls {name} outside of a block of `atomic_file`, `atomic_folder` or `atomic_files`"
        for file, source in sources().items()
        for line, function, name in written_at(file, source)
        if not allowed(file, function)
    ]
    assert not found, "\n".join(found)


def test_every_exception_is_needed():
    used = set()
    for file, source in sources().items():
        for _, function, _ in written_at(file, source):
            folder = f"{file.rpartition('/')[0]}/*"
            used |= {(where, what) for where in (file, folder) for what in (function, "*")}
    assert EXCEPTIONS.keys() <= used, EXCEPTIONS.keys() - used


@pytest.mark.parametrize(
    "source",
    [
        "path.write_text('x')",
        "path.open('w')",
        "open(path, mode='ab')",
        "np.savez(path, a=1)",
        "image.save(path)",
        "torch.save(state, path)",
        "save_file(tensors, path)",
        "h5py.File(path, 'w')",
        "lmdb.open(str(path))",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "model.save_pretrained(folder)",
        "with path.open('w') as part, whole_file(path):\n    pass",
        "with whole_file(path):\n    def late():\n        path.write_bytes(b'')",
    ],
)
def test_a_writing_call_is_found(source):
    assert len(list(written_at("x.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "write_text(path, 'x')",
        "path.open()",
        "path.open('rb')",
        "image.save(buffer, 'PNG')",
        "torch.save(state, file)",
        "h5py.File(path, 'r')",
        "os.open(path, os.O_RDONLY)",
        "with whole_file(path) as part, part.open('wb') as file:\n    file.write(b'')",
        "with whole_folder(folder) as part:\n    model.save_pretrained(part)",
    ],
)
def test_other_calls_are_left_alone(source):
    assert list(written_at("x.py", source)) == []
