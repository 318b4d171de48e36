from __future__ import annotations

import zipfile

import pytest

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
    with pytest.raises(ValueError, match=r"c.zip: x is encrypted or compressed in a way"):
        files.read("c.zip@/x")
