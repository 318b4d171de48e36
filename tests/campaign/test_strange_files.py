"""What may stand in the place of a file, before readers of every kind: each is read or refused in one sentence."""

from __future__ import annotations

import gzip
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detector.errors import UserError, reading
from detector.io import read_json as read_any_json
from detector.io import read_yaml
from detector.weight_files import load_arrays
from e2e_vl.analysis.captions import read_conllu
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.data.features import RegionFeatures, open_features, write_tsv
from e2e_vl.data.flickr30k import read_image_ids
from e2e_vl.data.storage.files import read_json, read_text
from e2e_vl.data.storage.json_rows import read_json_rows
from e2e_vl.io import read_log
from e2e_vl.records import Record
from e2e_vl.text import load_tokenizer

JSON = b'{\n "a": [1, 2]\n}\n'
PARSES = b"1\tdogs\t_\tNOUN\t_\t_\t0\troot\t_\t_\n\n"
WORDPIECES = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ndog\n"


class _Rows(Record):
    a: Any


def _features(path: Path) -> Any:
    store = open_features(path)
    return [(one, store[one].image_size) for one in store.ids]


READERS: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {  # name -> file, good content, reader
    "text": ("words.txt", b"one\ntwo\n", lambda path: read_text(path, "words").split()),
    "json": ("facts.json", JSON, lambda path: read_json(path, "facts")),
    "rows of json": ("rows.json", JSON, lambda path: list(read_json_rows(path, "facts", _Rows, "a").a)),
    "json of a run": ("metrics.json", JSON, read_any_json),
    "settings": ("config.yaml", b"a: 1\nb: [x]\n", read_yaml),
    "answers": ("answers.txt", b"yes\nno\n", read_answers),
    "parses": ("parses.conllu", PARSES, lambda path: list(read_conllu(path))),
    "image ids": ("train.txt", b"12\n13\n", read_image_ids),
    "vocabulary": ("vocab.txt", WORDPIECES.encode(), lambda path: sorted(load_tokenizer(path).get_vocab().items())),
    "log": ("log.jsonl", b'{"step": 1, "kind": "train"}\n', read_log),
    "pickle": ("refs.p", b"\x80\x02]q\x00.", load_arrays),
    "features": ("features.tsv", b"", _features),
}
MAY_BE_MISSING = {"log"}  # of a run that has logged nothing


def _link(path: Path, target: str | Path) -> None:
    path.unlink()
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _socket(path: Path) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


def _packed(path: Path) -> None:
    content = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("file", content)


PLACES: dict[str, Callable[[Path], None]] = {
    "nothing": Path.unlink,
    "a folder": _folder,
    "a pipe": _pipe,
    "a socket": _socket,
    "a link to itself": lambda path: _link(path, path),
    "a link to nothing": lambda path: _link(path, path.with_name("nothing")),
    "/dev/zero": lambda path: _link(path, "/dev/zero"),
    "/dev/full": lambda path: _link(path, "/dev/full"),
    "/proc/self/mem": lambda path: _link(path, "/proc/self/mem"),
    "gzip": lambda path: path.write_bytes(gzip.compress(path.read_bytes(), mtime=0)),
    "zip": _packed,
    "zero bytes": lambda path: path.write_bytes(bytes(20) + path.read_bytes()),
}
SAME: dict[str, Callable[[bytes], bytes]] = {  # what editors make of a text, which stays the same text
    "mark of UTF-8": lambda content: b"\xef\xbb\xbf" + content,
    "line ends of Windows": lambda content: content.replace(b"\n", b"\r\n"),
}


def good_file(reader: str, folder: Path) -> Path:
    name, content, _ = READERS[reader]
    if reader == "features":
        boxes = np.array([[1, 2, 30, 40]], dtype=np.float32)
        records = [RegionFeatures(one, (64, 64), boxes, np.ones((1, 4), np.float32)) for one in ("7", "8")]
        write_tsv(folder / name, records, {"detector": "drawn"})
        (folder / f"{name}.json").unlink()  # as a file from elsewhere
    else:
        (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
def test_what_stands_in_the_place_of_a_file_is_refused_by_name(reader: str, tmp_path: Path):
    for number, (place, put) in enumerate(PLACES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = good_file(reader, folder)
        put(path)
        if reader in MAY_BE_MISSING and not path.exists():
            continue
        with pytest.raises(UserError) as caught:
            READERS[reader][2](path)
        assert path.name in str(caught.value) and len(str(caught.value)) < 1000, (place, str(caught.value))


@pytest.mark.parametrize("change", SAME)
@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"pickle"}))
def test_what_editors_add_to_a_text_changes_nothing_or_is_refused(reader: str, change: str, tmp_path: Path):
    path = good_file(reader, tmp_path)
    read = READERS[reader][2]
    expected = repr(read(path))
    path.write_bytes(SAME[change](path.read_bytes()))
    try:
        found = repr(read(path))
    except UserError as error:
        assert path.name in str(error)
    else:
        assert found == expected


@pytest.mark.parametrize("reader", ["features", "image ids"])
def test_a_mark_of_utf8_is_not_a_part_of_the_first_row(reader: str, tmp_path: Path):
    path = good_file(reader, tmp_path)
    read = READERS[reader][2]
    expected = read(path)
    path.write_bytes(SAME["mark of UTF-8"](path.read_bytes()))
    assert read(path) == expected


def test_an_image_id_of_a_table_that_is_no_text_is_named_with_its_line(tmp_path: Path):
    path = good_file("features", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"8\t64", b"\xe4\t64"))
    with pytest.raises(UserError, match=r"features.tsv: the image id in line 2 is not UTF-8 text"):
        open_features(path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "other"), r"a.json: cannot be read \(permission denied\); check its"),
        (OSError(5, "Input/output error"), r"a.json: cannot be read \(input/output error\); check its permissions"),
        (MemoryError(), "a.json: it does not fit into the memory that is left"),
    ],
)
def test_what_the_system_says_names_the_file(error: Exception, message: str):
    with pytest.raises(UserError, match=message), reading("a.json"):
        raise error


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), UserError("a sentence"), OSError("damaged")])
def test_what_has_a_sentence_of_its_own_stays(error: Exception):
    with pytest.raises(type(error)) as caught, reading("a.json"):
        raise error
    assert caught.value is error
