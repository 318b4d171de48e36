"""Reading at random from files that stay open."""

from __future__ import annotations

import io

from e2e_vl.data.storage.index_files import OpenFiles


class Slow(io.BytesIO):
    """Gives three bytes at a time, as a network disk may give less than asked for."""

    def read(self, size: int = -1) -> bytes:
        return super().read(min(size, 3))


def test_reads_that_give_less_than_asked_for_go_on(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    files = OpenFiles()
    assert files.read(path, 2, 5) == b"23456"
    files._files[path] = Slow(b"0123456789")
    assert files.read(path, 2, 5) == b"23456"
    assert files.read(path, 8, 5) == b"89"
    assert files.read(path, 20, 5) == b""


def test_only_the_latest_files_stay_open(tmp_path):
    files = OpenFiles(limit=2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    opened = [files[path] for path in paths]
    assert [file.closed for file in opened] == [True, False, False]
    assert files.read(paths[0], 0, 1) == b"a" and opened[1].closed
