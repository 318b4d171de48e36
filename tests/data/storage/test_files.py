"""JSON files and records: what is read, and what is said of what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from detector.errors import MissingFileError, UserError
from e2e_vl.data.storage.files import checked_records, corners_of, read_json, require_file
from e2e_vl.records import Box, Id, Record


class Row(Record):
    id: Id
    box: Box


def test_a_file_is_read_as_what_it_is_declared_to_be(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text('[{"id": 1, "box": [1, 2.5, 3, 4]}]')
    assert read_json(path, "rows", list[Row]) == [Row(1, (1.0, 2.5, 3.0, 4.0))]
    assert read_json(path, "rows") == [{"id": 1, "box": [1, 2.5, 3, 4]}]
    with pytest.raises(UserError, match=r"rows\.json holds|rows\.json is"):
        read_json(path, "rows", Row)


def test_a_file_that_is_not_there_is_a_users_error(tmp_path: Path):
    with pytest.raises(MissingFileError, match=r"gone: cannot read the rows, there is no such file; check the path"):
        require_file(tmp_path / "gone", "rows")
    with pytest.raises(MissingFileError, match="it is a folder"):
        require_file(tmp_path, "rows")


@pytest.mark.parametrize(
    "content", ["", "[", "[" * 100_000, "9" * 5000, "\ufeff[1]", '{"a": 1}}', b"\xff\xfe\x00", b"\x80", "nul"]
)
def test_what_is_not_json_is_one_sentence(tmp_path: Path, content: str | bytes):
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if content == "\ufeff[1]":  # the mark that Windows writes
        assert read_json(path, "rows") == [1]
        return
    with pytest.raises(UserError, match=r"rows\.json: the rows are not valid JSON .*copy or download the file again"):
        read_json(path, "rows")


def test_records_that_are_there_twice_or_not_in_a_list():
    rows = [{"id": 1, "box": [1, 2, 3, 4]}, {"id": 1.0, "box": [1, 2, 3, 4]}]
    assert [row.id for _, row in checked_records(Row, rows, "f: row", "id")] == [1, 1]
    with pytest.raises(UserError, match=r"f: row (1\.0|number 1) is listed twice"):
        list(checked_records(Row, rows, "f: row", "id", unique="ids"))
    for wrong in ({}, "text", None, 3):
        with pytest.raises(UserError, match="f: row: expected a list of records"):
            list(checked_records(Row, wrong, "f: row", "id"))


@pytest.mark.parametrize("box", [(1, 2, 0, 4), (1, 2, 3, -4), (1e8, 2, 1e-12, 4)])
def test_boxes_without_an_area(box: Any):
    assert corners_of((1, 2, 3, 4), "f") == (1, 2, 4, 6)
    with pytest.raises(UserError, match=r"f: the box .* is empty or inverted"):
        corners_of(box, "f")
