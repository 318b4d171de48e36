"""Paths that users write, and the context in which files are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from detector.errors import MissingFileError, UserError, first_line, reading, user_path


def test_the_first_line_of_an_error_is_never_empty():
    assert first_line(OSError("\nno route\nTraceback ...")) == "no route"
    assert first_line(OSError(" \n")) == "OSError"


def test_errors_of_reading_name_the_file(tmp_path: Path):
    with pytest.raises(MissingFileError, match="none"), reading(tmp_path / "none"):
        (tmp_path / "none").read_bytes()
    with pytest.raises(UserError, match=f"{tmp_path}: .*wrong magic"), reading(tmp_path, KeyError, EOFError):
        raise EOFError("wrong magic")
    with pytest.raises(UserError, match="as it is"), reading(tmp_path, ValueError):
        raise UserError("as it is")
    with pytest.raises(KeyError), reading(tmp_path, EOFError):
        raise KeyError("a bug")


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == user_path(Path("~/a")) == tmp_path / "a"
    assert user_path("a/~/b c:d") == Path("a/~/b c:d")
    assert user_path("~nosuchuser/a") == Path("~nosuchuser/a") and user_path(b"a") == Path("a")
    for written in ("https://example.org/a.jpg", "gs://example/a.jpg", "HF://a/b", "blob:https://example.org/a"):
        with pytest.raises(UserError, match=rf"The image '{written}' is a URL"):
            user_path(written, "The image")
    for written in (None, 3, ["a"]):
        with pytest.raises(UserError, match="The image must be a path, not"):
            user_path(written, "The image")
