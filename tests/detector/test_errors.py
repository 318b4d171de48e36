"""Sentences of errors, and paths that users write."""

from __future__ import annotations

from pathlib import Path

import pytest

from detector.errors import MissingFileError, UserError, first_line, reading, user_path


def test_a_missing_file_is_both_a_users_error_and_a_file_that_is_not_found():
    error = MissingFileError("f.json: there is no such file")
    assert isinstance(error, UserError) and isinstance(error, FileNotFoundError)
    assert error.errno is None and str(error) == "f.json: there is no such file"


@pytest.mark.parametrize(("message", "expected"), [("\nno route\nTraceback ...", "no route"), (" \n", "OSError")])
def test_the_first_line_of_an_error_is_never_empty(message: str, expected: str):
    assert first_line(OSError(message)) == expected


def test_what_the_system_says_names_the_file(tmp_path: Path):
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read .*Is a directory"), reading(tmp_path):
        tmp_path.read_bytes()
    with pytest.raises(UserError, match="x: it does not fit into memory"), reading("x"):
        raise MemoryError


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == user_path(Path("~/a")) == tmp_path / "a"
    assert user_path("a/~/b c:d") == Path("a/~/b c:d")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a\0b", "x" * 300, "~nobody-of-this-name/x", tmp_path / "loop"):
        with pytest.raises(UserError, match=r"The file .* cannot be used .*; give another path"):
            user_path(name, "The file")
    with pytest.raises(UserError, match="is an address and not a path; download the file first"):
        user_path("https://example.org/a.jpg", "The image")
