"""Paths that users write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detector.errors import UserError, user_path

ROOT = Path(__file__).parents[2]


def test_homes_and_plain_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a" and user_path(Path("~/a")) == tmp_path / "a"
    assert user_path("a/~/b c:d") == Path("a/~/b c:d") and user_path("-") == Path("-")


def test_a_path_that_no_file_can_have(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    names = ("a\0b", Path("a\0b"), "\ud800", "x" * 300, "x/" * 3000, "~nobody-of-this-name/x", tmp_path / "loop")
    for name in names:
        with pytest.raises(UserError, match=r"The file .* cannot be looked for .*; give another path") as told:
            user_path(name, "The file")
        assert "\n" not in str(told.value) and len(str(told.value)) < 250
    assert user_path(tmp_path / "not there", "x") == tmp_path / "not there"


def test_an_address_is_no_path():
    with pytest.raises(UserError, match="is an address and not a path; download the file first"):
        user_path("https://example.org/a.jpg", "The image")


def test_no_other_code_looks_for_homes():
    sources = [path for folder in ("detector", "e2e_vl", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = [path.name for path in sources if re.search(r"\.expanduser\(", path.read_text(encoding="utf-8"))]
    assert found == ["user_paths.py"]
