"""Paths that users write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detector.errors import UserError
from detector.user_paths import user_path

ROOT = Path(__file__).parents[2]


def test_homes_and_plain_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a" and user_path(Path("~/a")) == tmp_path / "a"
    assert user_path("a/~/b c:d") == Path("a/~/b c:d") and user_path("-") == Path("-")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", "zero byte"),
        (Path("a\0b"), "zero byte"),
        ("~nobody-of-this-name/x", "knows no home folder"),
        ("http://example.org/a.jpg", "download the file first"),
    ],
)
def test_what_cannot_be_a_path(path, message):
    with pytest.raises(UserError, match=message) as error:
        user_path(path)
    assert "\n" not in str(error.value)


def test_no_other_code_looks_for_homes():
    sources = [path for folder in ("detector", "e2e_vl", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = [path.name for path in sources if re.search(r"\.expanduser\(", path.read_text(encoding="utf-8"))]
    assert found == ["user_paths.py"]
