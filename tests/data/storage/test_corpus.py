from __future__ import annotations

import multiprocessing
import pickle

import pytest

from e2e_vl.data import captions as module
from e2e_vl.data.captions import TextLines

LINES = ["The first line.", "  zweite Zeile: naïve ", "x", "the last line has a few more words"]


def write(path, content: str | bytes):
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n \n\n"])
def test_lines_are_found_whatever_the_chunks_and_line_ends(tmp_path, monkeypatch, chunk, end, last):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    content = end.join(["", "  ", *LINES[:2], " \t ", "", *LINES[2:]]) + last
    lines = TextLines(write(tmp_path / "a.txt", content), tmp_path / "cache")
    assert list(lines) == [line.strip() for line in LINES]


def test_long_lines_and_a_byte_order_mark(tmp_path):
    lines = TextLines(write(tmp_path / "a.txt", "\ufeffone\n" + "ab " * 50_000 + "\nend"), tmp_path)
    assert lines[0] == "one"
    assert lines[1] == ("ab " * 50_000).strip()
    assert lines[2] == "end"


def test_the_index_is_kept_and_made_again_when_the_file_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.doc", "one\ntwo\n")
    assert list(TextLines(path, tmp_path / "cache")) == ["one", "two"]
    [index] = (tmp_path / "cache").iterdir()
    before = index.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(module, "_line_starts", None)
        assert list(TextLines(path, tmp_path / "cache")) == ["one", "two"]
    assert index.stat().st_mtime_ns == before
    write(path, "one\ntwo\nthree\n")
    assert list(TextLines(path, tmp_path / "cache")) == ["one", "two", "three"]


def _count(path, cache, results):
    results.put(list(TextLines(path, cache)))


def test_processes_may_make_the_index_at_once_and_read_it_after_a_fork(tmp_path):
    path = write(tmp_path / "a.txt", "\n".join(str(i) for i in range(3000)))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_count, args=(path, tmp_path / "cache", results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(lines == [str(i) for i in range(3000)] for lines in found)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    lines = pickle.loads(pickle.dumps(TextLines(path, tmp_path / "cache")))
    assert lines[2999] == "2999"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no line with content"),
        (b"\n \n\t\r\n", "no line with content"),
        (b"fine\nbroken \xff\xfe\n", r"not UTF-8 text \(near byte 12\)"),
        (b"cut off \xc3", "not UTF-8 text"),
        (b"PK\x03\x04\0\0", "zero bytes"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        TextLines(write(tmp_path / "a.txt", content), tmp_path / "cache", "corpus")
    assert str(tmp_path / "a.txt") in str(caught.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if "unfinished" in path.name]


def test_other_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.txt: cannot read the corpus"):
        TextLines(tmp_path / "nowhere.txt", tmp_path, "corpus")
    write(tmp_path / "file", "")
    with pytest.raises(OSError, match=r"set data.config.cache"):
        TextLines(write(tmp_path / "b.txt", "b"), tmp_path / "file")
