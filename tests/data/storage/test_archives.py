from __future__ import annotations

import random
import zipfile

import pytest

from detector import zip_directory
from detector.errors import UserError
from e2e_vl.data.storage.archives import ArchivedFiles


def test_many_members_are_found_by_the_index(tmp_path):
    names = [f"{i:08d}.txt" for i in range(500)]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.mkdir("folder")
        for name in names:
            archive.writestr(name, name * 3)
    files = ArchivedFiles(tmp_path, tmp_path / "cache")
    for name in names[::7]:
        assert files.read(f"a.zip@/{name}") == (name * 3).encode()
    with pytest.raises(FileNotFoundError, match=r"a.zip: has no member 00000500.txt"):
        files.read("a.zip@/00000500.txt")
    (tmp_path / "plain.txt").write_text("x")
    assert files.read("plain.txt") == b"x"
    with pytest.raises(FileNotFoundError, match=r"none.txt: there is no such file"):
        files.read("none.txt")
    with pytest.raises(FileNotFoundError, match=r"b.zip: no such archive, and .*b/x is no file either"):
        files.read("b.zip@/x")
    (tmp_path / "b.zip").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"b.zip: no readable zip archive"):
        files.read("b.zip@/x")
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x", "y")
    with pytest.raises(ValueError, match=r"c.zip: .*x. is encrypted or compressed in a way"):
        files.read("c.zip@/x")


KINDS = ("plain", "zip64", "zip64 with a long comment", "after other bytes", "with a comment", "empty")


@pytest.mark.parametrize("kind", KINDS)
def test_the_directory_is_read_as_zipfile_reads_it(tmp_path, monkeypatch, kind):
    path, draw = tmp_path / "a.zip", random.Random(0)
    if kind.startswith("zip64"):  # limits of zipfile, so that a small archive has what a large one has
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 300)
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 20)
    if kind == "after other bytes":
        path.write_bytes(b"some program" * 99)
    contents = {} if kind == "empty" else {f"größe/{n}-{'x' * (n % 90)}.txt": draw.randbytes(n) for n in range(60)}
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for number, (name, content) in enumerate(contents.items()):
            archive.writestr(name, content, zipfile.ZIP_STORED if number % 2 else None)
        archive.comment = {KINDS[2]: b"x" * 65535, KINDS[4]: b"PK\5\6 and PK\6\7 are signatures"}.get(kind, b"")
    monkeypatch.setattr(zip_directory, "_CHUNK", 7)
    if kind != KINDS[2]:
        monkeypatch.setattr(zip_directory, "_LONGEST_COMMENT", 200)
    files = ArchivedFiles(tmp_path, tmp_path / "cache")
    for name, content in contents.items():
        assert files.read(f"a.zip@/{name}") == content
    with pytest.raises(FileNotFoundError, match="has no member none"):
        files.read("a.zip@/none")


def test_a_damaged_directory_is_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(9):
            archive.writestr(f"{number}.txt", "content")
    whole = path.read_bytes()
    first = whole.index(b"PK\1\2")
    for damaged in (whole[:-30], whole[:first] + b"XXXX" + whole[first + 4 :], b"", b"PK\5\6", whole[first + 9 :]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.zip: no readable zip archive \(.*\); get it again"):
            ArchivedFiles(tmp_path, tmp_path / "cache").read("a.zip@/1.txt")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_of_a_member_is_named(tmp_path, method):
    path, content = tmp_path / "a.zip", random.Random(1).randbytes(400)  # deflate cannot pack it, so it stores blocks
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("b/first.jpg", "whole")
        archive.writestr("b/second.jpg", content)
    whole = path.read_bytes()
    at = whole.index(content)
    files = ArchivedFiles(tmp_path, tmp_path / "cache")
    for place in (at, at + 200, at + 399):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"a\.zip: the member b/second\.jpg .*its checksum differs"):
            files.read("a.zip@/b/second.jpg")
        assert files.read("a.zip@/b/first.jpg") == b"whole"
    path.write_bytes(whole)
    assert files.read("a.zip@/b/second.jpg") == content


def test_indices_of_all_parts_are_made_before_a_file_is_wanted(tmp_path):
    for name in ("part.0.zip", "part.1.zip", "other.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("x", name)
    files = ArchivedFiles(tmp_path, tmp_path / "cache")
    files.prepare("part.0.zip@/x")
    files.prepare("folder/x")
    assert sorted(one.name.partition(".zip")[0] for one in (tmp_path / "cache").iterdir()) == ["part.0", "part.1"]
    assert files.read("part.1.zip@/x") == b"part.1.zip"
