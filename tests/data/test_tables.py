"""Serialised lists, streamed JSON, and files that are read through an index."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from e2e_vl.data.tables import (
    MAX_EXAMPLES,
    Archives,
    RowIndex,
    SerializedList,
    SkippedRecords,
    TextGroups,
    TextLines,
    stream_dict,
    stream_lines,
    stream_list,
)
from tests.data.helpers import refused

SMAPS = Path("/proc/self/smaps_rollup")  # only on Linux


class Note(msgspec.Struct, array_like=True, frozen=True):
    number: int
    words: str | None
    answers: tuple[str, ...] = ()


NOTES = [Note(2**63 - 1, "Ist das größer? 猫", ("yes", "yes", "")), Note(-(2**63), ""), Note(0, None, ("no",))]


def test_items_come_back_as_their_type():
    notes = SerializedList(iter(NOTES), Note)
    for shared in (notes, pickle.loads(pickle.dumps(notes))):
        assert len(shared) == 3
        assert list(shared) == NOTES == [shared[row] for row in range(3)]
        assert shared[-1] == NOTES[-1] and shared[1:] == NOTES[1:]
        with pytest.raises(IndexError):
            shared[3]
    assert not SerializedList([], Note)
    assert list(SerializedList(["a", "ü"], str)) == ["a", "ü"]


def growth_in_a_fork(read: Callable[[], object]) -> int:
    """KiB of memory that a forked process no longer shares after it has called `read`."""

    def unshared_kib() -> int:
        lines = SMAPS.read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        before = unshared_kib()
        read()
        os.write(writing, str(unshared_kib() - before).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        grown = int(file.read())
    os.waitpid(process, 0)
    return grown


@pytest.mark.skipif(not SMAPS.is_file(), reason="unshared memory is only known on Linux")
def test_a_forked_worker_does_not_copy_the_items():
    notes = [Note(1000 + number, f"question {number}", (f"answer {number % 99}",) * 3) for number in range(60_000)]
    table = SerializedList(notes, Note)

    def read_all(records):
        for record in records:
            assert record.number >= 0

    copied, shared = (growth_in_a_fork(partial(read_all, records)) for records in (notes, table))
    assert copied > 5_000, "a list of objects is copied, so the measurement can tell"
    assert shared < copied / 5


def test_ids_lead_to_their_rows():
    rows = RowIndex([7, "b", 100, "größe"])
    assert [rows.row(id) for id in (7, "7", "b", 100, "größe")] == [0, 0, 1, 2, 3]
    assert [rows.row(id) for id in (10, "", "bb", 1000)] == [None] * 4
    assert RowIndex([]).row(0) is None


def test_texts_are_grouped_by_their_image_in_the_order_of_first_mention():
    groups = TextGroups.of_images(["b", "a", "b", 3, "a"])
    assert list(groups) == [[0, 2], [1, 4], [3]] and groups[1:] == [[1, 4], [3]] and groups[-1] == [3]
    assert len(TextGroups.of_images([])) == 0
    consecutive = TextGroups.consecutive([2, 0, 3])
    assert list(consecutive) == [[0, 1], [], [2, 3, 4]]
    assert [consecutive.group_of(text) for text in range(5)] == [0, 0, 2, 2, 2]
    some = TextGroups.of_lists([[7], [], [9, 2]])
    assert [some.group_of(text) for text in (7, 9, 2)] == [0, 2, 2]


def test_streamed_json(tmp_path):
    path = tmp_path / "a.json"
    notes = [[1, "größer", ["a"]], [2, None, []]]
    path.write_text(json.dumps({"info": {}, "notes": notes}), encoding="utf-8")
    assert list(stream_list(path, Note, "notes")) == [Note(1, "größer", ("a",)), Note(2, None)]
    path.write_text(json.dumps({"x.y": {"z": 1.5}, "w": {}}))
    assert list(stream_dict(path)) == [("x.y", {"z": 1.5}), ("w", {})]
    with refused("a.json: entry x.y"):
        list(stream_dict(path, dict[str, int]))
    path.write_text('{"w": [1, ')
    with refused("a.json"):
        list(stream_dict(path))
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        list(stream_list(tmp_path / "none.json"))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_a_text_file(tmp_path, end):
    lines = ["The first line.", "  zweite Zeile: naïve ", "x", "ab " * 50_000]
    path = tmp_path / "a.txt"
    path.write_bytes(("\ufeff" + end.join([*lines[:2], " \t ", "", *lines[2:]]) + f"{end} {end}").encode())
    text_lines = TextLines(path, tmp_path / "cache")
    assert list(text_lines) == [line.strip() for line in lines]
    assert text_lines[-1] == lines[-1].strip()


def test_text_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\nbroken \xff\xfe\n")
    with refused("a.txt, line 2"):
        list(TextLines(path, tmp_path))
    path.write_bytes(b"\n \n\t\r\n")
    with refused("a.txt"):
        TextLines(path, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        TextLines(tmp_path / "nowhere.txt", tmp_path)


def test_files_in_archives_and_in_folders(tmp_path):
    contents = {f"größe/{n}.txt": random.Random(n).randbytes(n) for n in range(60)}
    with zipfile.ZipFile(tmp_path / "a.1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("größe")
        for number, (name, content) in enumerate(contents.items()):
            archive.writestr(name, content, zipfile.ZIP_STORED if number % 2 else None)
    archives = Archives(tmp_path, tmp_path / "cache")
    for name, content in contents.items():
        assert archives.read(f"a.1.zip@/{name}") == content
    with pytest.raises(FileNotFoundError, match=r"a\.1\.zip.*none"):
        archives.read("a.1.zip@/none")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("unpacked")
    (tmp_path / "plain.txt").write_text("x")
    assert archives.read("b.zip@/x") == archives.read("b.2.zip@/x") == b"unpacked", "parts share a folder"
    assert archives.read("plain.txt") == b"x"
    for name in ("none.txt", "b.zip@/y"):
        with pytest.raises(FileNotFoundError, match=name):
            archives.read(name)
    (tmp_path / "c.zip").write_bytes(b"no archive")
    with refused("c.zip"):
        archives.read("c.zip@/x")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_one_name_are_named(tmp_path):
    for name, contents in (("same.zip", (b"one", b"one")), ("other.zip", (b"one", b"two"))):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for content in contents:
                archive.writestr("a.jpg", content)
    archives = Archives(tmp_path, tmp_path / "cache")
    assert archives.read("same.zip@/a.jpg") == b"one"
    with refused("other.zip: two different members have the name a.jpg"):
        archives.read("other.zip@/a.jpg")


def test_json_lines_in_other_encodings(tmp_path):
    rows = '{"id": 1}\n{"id": "größer"}\n'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert list(stream_lines(tmp_path / "a.jsonl")) == [{"id": 1}, {"id": "größer"}]
    (tmp_path / "a.jsonl").write_text(rows, encoding="utf-16")
    with refused("a.jsonl: the encoding is UTF-16"):
        list(stream_lines(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text(rows, encoding="cp1252")
    with refused("a.jsonl, line 2: not UTF-8"):
        list(stream_lines(tmp_path / "a.jsonl"))


def test_a_flipped_bit_of_a_member_is_named(tmp_path):
    path, content = tmp_path / "a.zip", random.Random(1).randbytes(400)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/first.jpg", "whole")
        archive.writestr("b/second.jpg", content)
    whole = path.read_bytes()
    at = whole.index(content) + 200
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    archives = Archives(tmp_path, tmp_path / "cache")
    assert archives.read("a.zip@/b/first.jpg") == b"whole"
    with refused("a.zip", "b/second.jpg"):
        archives.read("a.zip@/b/second.jpg")


def test_a_message_shows_some_examples_and_counts_the_others(caplog):
    skipped = SkippedRecords("refs.json")
    for number in range(1000 + MAX_EXAMPLES):
        skipped.add("refs without a sentence", number)
    skipped.log()
    examples = "; ".join(map(str, range(MAX_EXAMPLES)))
    assert f"refs.json: skipped 1,012 refs without a sentence: {examples} and 1,000 more" in caplog.text
