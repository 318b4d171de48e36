"""A file whose long list is parsed value by value is read, and refused, as a file that is parsed as a whole."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from detector.errors import MissingFileError, UserError
from e2e_vl.data.storage.files import read_json
from e2e_vl.data.storage.json_rows import read_json_rows
from e2e_vl.records import Record


class Shelf(Record):
    books: list[Any]
    name: str


GOOD = [
    '{"books": [], "name": "a"}',
    '{"name": "ä \\ud83d\\ude00:", "books": [1, -0.0, 2.5e3, null, "x:y", [1], {"a": {"b": [true]}}], "m:": {":": 1}}',
    '\ufeff{"books": [1], "name": "a"}',
    '{"books": [123456789012345678901234567890, NaN, 1e999], "name": "a"}',
    ' { "books" : [ {"a" : 1 } , 2 ] , "name" : "a" } ',
    '{"books": ["\\u003a"], "name": "a"}',
]
BAD = [
    *("", "[", "[]", "{}", '"books"', "nul", '{"books": [1, "name": "a"}', '{"books": [1], "name": "a"}}'),
    *('{"books": {}, "name": "a"}', '{"books": null, "name": "a"}', '{"books": [1]}', '{"name": "a"}'),
    '{"books": [1], "name": 2}',
    '{"books": [{"a": 1, "a": 2}], "name": "a"}',
    '{"books": [{"b": {"a": 1, "a": 1}}], "name": "a"}',
    '{"books": [1], "name": "a", "books": [2]}',
    '{"books": [1], "name": "a", "name": "b"}',
    '{"books": [1], "name": "a", "more": {"a": 1, "\\u0061": 2}}',
    '{"books": [1], "name": "a", "more": {":": 1, ":": 2}}',
    '{"books": ["\\ud83d"], "name": "a"}',
    '{"books": [1], "name": "\\ude00"}',
    '{"books": ' + "[" * 100_000 + ', "name": "a"}',
    '{"books": [' + "9" * 5000 + '], "name": "a"}',
    b'{"books": ["\xff"], "name": "a"}',
    b'{"books": ["\xed\xa0\xbd"], "name": "a"}',
]


def told(read, path: Path) -> str:
    try:
        found = read(path)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return repr((list(found.books), found.name))  # repr: NaN is not equal to itself


def both(path: Path) -> list[str]:
    return [
        told(lambda one: read_json(one, "books", Shelf), path),
        told(lambda one: read_json_rows(one, "books", Shelf, "books"), path),
    ]


@pytest.mark.parametrize("content", [*GOOD, *BAD], ids=range(len(GOOD) + len(BAD)))
def test_a_file_is_read_as_if_it_were_parsed_as_a_whole(tmp_path: Path, content: str | bytes):
    path = tmp_path / "books.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    whole, by_rows = both(path)
    assert by_rows == whole
    assert whole.startswith("UserError") == (content in BAD)


def test_damaged_files_give_the_same_values_or_the_same_error(tmp_path: Path):
    draw, path, refused = random.Random(0), tmp_path / "books.json", 0
    for _ in range(1500):
        content = bytearray(draw.choice(GOOD).encode())
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(content))
            content[place : place + draw.randrange(3)] = draw.choice(
                [b":", b'"', b"{", b"}", b",", b"a", b"\x80", b"0"]
            )
        path.write_bytes(content)
        whole, by_rows = both(path)
        assert by_rows == whole, bytes(content)
        refused += whole.startswith("UserError")
    assert 300 < refused < 1450


def test_the_list_can_be_walked_over_again_and_a_lost_file_is_named(tmp_path: Path):
    path = tmp_path / "books.json"
    path.write_text('{"books": [{"a": 1}], "name": "a"}')
    found = read_json_rows(path, "books", Shelf, "books")
    assert list(found.books) == list(found.books) == [{"a": 1}]
    with pytest.raises(MissingFileError, match=r"gone\.json: cannot read the books"):
        read_json_rows(tmp_path / "gone.json", "books", Shelf, "books")


def test_the_values_of_the_list_are_never_in_memory_together(tmp_path: Path):
    path = tmp_path / "books.json"
    path.write_text(json.dumps({"books": [{"outline": [0.5] * 200} for _ in range(2000)], "name": "a"}))

    def most(read) -> int:
        tracemalloc.start()
        for book in read(path).books:
            assert len(book["outline"]) == 200
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    whole = most(lambda one: read_json(one, "books", Shelf))
    by_rows = most(lambda one: read_json_rows(one, "books", Shelf, "books"))
    assert by_rows < whole / 3
