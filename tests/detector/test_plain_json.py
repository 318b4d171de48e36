"""The JSON files of runs and saved models, from anywhere."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from detector.errors import MissingFileError, UserError
from detector.io import parse_plain_json, read_plain_json

FAULTS = [
    (b"[" * 1_000_000, ": its lists and objects are more than 50 deep in each other"),
    (b'{"a":' * 100_000, ": its lists and objects are more than 50 deep in each other"),
    (b"[" * 51 + b"]" * 51, ": its lists and objects are more than 50 deep in each other"),
    (b'{"a": NaN}', " holds NaN, which is not JSON"),
    (b"[-Infinity]", " holds -Infinity, which is not JSON"),
    (b'{"a": {"b": 1, "c": 2, "b": 3}}', " holds the name 'b' twice"),
    (b"[1e999]", ": a number is too large"),
    (b"1" + b"0" * 400, ": a whole number has more than 128 bits"),
    (b"-1" + b"0" * 400, ": a whole number has more than 128 bits"),
    (b"1" * 1_000_000, " holds a number of too many digits"),
    (b'{"secret"', " is not JSON (expecting ':' delimiter in line 1, column 10)"),
    (b"secret", " is not JSON (expecting value in line 1, column 1)"),
    (b"", " is not JSON (expecting value in line 1, column 1)"),
    (b"{} secret", " is not JSON (extra data in line 1, column 4)"),
    (b'"\xff"', " is not JSON: byte 1 is not utf-8 text"),
    (b"\0", " is not JSON (expecting value in line 1, column 1)"),
]


@pytest.mark.parametrize(("content", "problem"), FAULTS)
def test_a_fault_is_one_short_sentence_soon(content: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "metrics.json"
    path.write_bytes(content)
    begin = time.process_time()
    with pytest.raises(UserError) as error:
        read_plain_json(path)
    assert str(error.value) == f"{path}{problem}; get the file again."
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("text", [r'{"a": ["\ud83d"]}', r'{"\uDe00": 1}', b'["\xed\xa0\xbd"]'])
def test_half_a_character_is_refused(text: str | bytes):
    with pytest.raises(UserError, match=r"^x( is not JSON|: a text holds half of a character)"):
        parse_plain_json(text, "x")
    assert parse_plain_json(r'["\ud83d\ude00", "\\ud83d"]', "x") == ["\U0001f600", "\\ud83d"]


def test_kinds_keys_and_sizes(tmp_path: Path):
    path = tmp_path / "step.json"
    with pytest.raises(MissingFileError, match=r"step\.json: no such file"):
        read_plain_json(path)
    path.write_text('[{"a": 1, "b": [1e3, -5, "\\ud83d\\ude00", null, 1000000000000000019884624838656]}]')
    assert read_plain_json(path, list)[0]["b"][4] == int(1e30)
    assert read_plain_json(path, None) == read_plain_json(path, list)
    with pytest.raises(UserError, match=r"step\.json does not hold an object of names and values"):
        read_plain_json(path)
    with pytest.raises(UserError, match=r"step\.json has more than 10 bytes"):
        read_plain_json(path, list, max_bytes=10)
    path.write_text('{"step": 1}')
    with pytest.raises(UserError, match=r"step\.json does not hold a list"):
        read_plain_json(path, list)
    with pytest.raises(UserError, match=r"step\.json lacks processes, place; get the file again"):
        read_plain_json(path, keys=("step", "processes", "place"))
    assert parse_plain_json("[" * 50 + "]" * 50, "x")
