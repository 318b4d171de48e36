"""Records that are declared: what fits, and what is said of what does not."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, field

from detector.errors import UserError
from e2e_vl.records import (
    Box,
    FourNumbers,
    Number,
    Record,
    Score,
    Side,
    Words,
    as_written,
    checked,
    cut_text,
    decoded,
    parsed_json,
)


class Part(Record):
    answer: Words


class Row(Record):
    id: Number
    corners: FourNumbers
    box: Box = (0.0, 0.0, 1.0, 1.0)
    text: Words = "a"
    scores: dict[str, list[dict[str, Score]]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    width: Side = 1
    note: str = ""
    label: Annotated[Literal["x", "y"], Meta(description='"x" or "y"')] = "x"


ROW = {"id": 3, "corners": [1, 2, 3.5, 4]}


def test_what_fits_is_an_instance_and_other_keys_are_left_out():
    assert checked(Row, ROW | {"more": None}, "f") == Row(3, (1.0, 2.0, 3.5, 4.0))
    assert decoded(Row, b'{"id": 3, "corners": [1, 2, 3.5, 4]}', "f") == Row(3, (1.0, 2.0, 3.5, 4.0))


def test_whole_numbers_may_be_written_with_a_point():
    row = ROW | {"id": 5.0, "width": 640.0}
    found = checked(Row, row, "f")
    assert (found.id, found.width) == (5, 640) and type(found.width) is int
    assert row["width"] == 640.0 and type(row["width"]) is float, "the value itself stays as it is"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"id": "a"}, "f: row 3: id is 'a', expected a whole number"),
        ({"id": True}, "f: row 3: id is True, expected a whole number"),
        ({"id": 10**400}, "expected a whole number up to 9223372036854775807"),
        ({"id": 640.5}, "f: row 3: id is 640.5, expected a whole number"),
        ({"width": 0}, "f: row 3: width is 0, expected a whole number from 1 on"),
        ({"corners": [1, 2, 3]}, "f: row 3: corners is [1, 2, 3], expected a list of 4 values"),
        ({"corners": [1, 2, 3, float("nan")]}, "f: row 3: corners[3] is nan, expected a finite number"),
        ({"corners": [1, 2, float("-inf"), 4]}, "f: row 3: corners[2] is -inf, expected a finite number"),
        ({"corners": [1, 10**400, 3, 4]}, "f: row 3: corners[1] is 1000"),
        ({"corners": [1, True, 3, 4]}, "f: row 3: corners[1] is True, expected a number"),
        ({"corners": None}, "f: row 3: corners is None, expected a list"),
        (
            {"box": [1, 2, "3", 4]},
            "f: row 3: box is [1, 2, '3', 4], expected four finite numbers [x, y, width, height]",
        ),
        ({"text": " "}, "f: row 3: text is ' ', expected a text that is not blank"),
        ({"scores": {"a": [], "b": [{"yes": 1, "no": 7}]}}, "f: row 3: scores.b[0].no is 7, expected a number up to"),
        ({"scores": {"a": [{"no": -0.5}]}}, "f: row 3: scores.a[0].no is -0.5, expected a number from 0"),
        ({"scores": {"a": {}}}, "f: row 3: scores.a is {}, expected a list"),
        ({"parts": [{"answer": "x"}, {"answer": 3}]}, "f: row 3: parts[1].answer is 3, expected a text"),
        ({"parts": [{}]}, "f: row 3: parts[0] has no 'answer'"),
        ({"parts": [4]}, "f: row 3: parts[0] is 4, expected an object"),
        ({"\ud83d": 1}, "f: row 3 has a text with half of a character"),
        ({"label": "z"}, 'f: row 3: label is \'z\', expected "x" or "y"'),
    ],
)
def test_the_field_is_named_with_what_is_expected_and_the_remedy(change: dict[str, Any], sentence: str):
    with pytest.raises(UserError) as caught:
        checked(Row, ROW | change, "f: row 3")
    assert sentence in str(caught.value)
    assert str(caught.value).endswith("; correct the record, or copy or download the file again")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1], "f is a list, expected an object with id, corners"),
        (None, "f is a NoneType, expected an object with id, corners"),
        ({}, "f has no 'id', 'corners'"),
        ({"id": "a"}, "f has no 'corners'"),
    ],
)
def test_records_without_their_keys(value: Any, sentence: str):
    with pytest.raises(UserError, match=re.escape(sentence)):
        checked(Row, value, "f")


def test_a_value_within_itself_is_refused():
    row: dict[str, Any] = {"id": 1, "corners": [1, 2, 3, 4]}
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UserError, match=r"f has lists within lists|f: parts.0. is"):
        checked(Row, row | {"parts": loop}, "f")


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "9" * 5000, "\\", b"\xff\xfe"])
def test_texts_that_are_not_json(text: str | bytes):
    with pytest.raises(UserError, match=r"^f is not valid JSON \(.*\); one object per line, copy or download"):
        decoded(Row, text, "f", form="one object per line")
    with pytest.raises(UserError, match=r"^the rows are not valid JSON"):
        parsed_json(text, "the rows are")


def test_what_only_pythons_decoder_reads_is_read_too():
    text = r'{"id": 1, "corners": [1, 2, 3, 4], "note": "\ud83d\ude00", "more": NaN}'
    assert decoded(Row, text, "f").note == "\U0001f600"
    with pytest.raises(UserError, match=r"^f is not valid JSON \(a text has half of a character, a lone surrogate\)"):
        decoded(Row, text.replace(r"\ude00", ""), "f")
    with pytest.raises(UserError, match=r"f \(seven\): corners\[0\] is nan, expected a finite number"):
        decoded(Row, '{"id": 1, "corners": [NaN, 2, 3, 4], "name": "seven"}', "f", key="name")


def test_a_key_that_is_there_twice_is_refused():
    text = '{"id": 1, "corners": [1, 2, 3, 4], "more": {"a": 1, "a": 2}, "parts": [], "name": "seven"}'
    with pytest.raises(UserError, match=r"^f is not clear: more has the key 'a' twice; copy or download"):
        decoded(Row, text, "f")
    with pytest.raises(
        UserError, match=r"^the rows are not clear: \[1\]\.more has the key 'a' twice; copy or download"
    ):
        parsed_json(f"[3, {text}]", "the rows are")


def test_values_are_shown_in_short():
    assert cut_text("a" * 200).endswith("...") and len(cut_text("a" * 200)) < 120
    assert cut_text(10**5000) == "a int too long to show"
    assert as_written((1.0, 2.5)) == [1, 2.5]


def test_many_floats_where_whole_numbers_are_declared_take_one_pass():
    class Many(Record):
        numbers: dict[str, int]

    floats = {"numbers": {str(number): float(number) for number in range(20_000)}}
    started = time.process_time()
    assert checked(Many, floats, "f").numbers == {str(number): number for number in range(20_000)}
    assert time.process_time() - started < 1
    with pytest.raises(UserError, match=r"numbers\.7 is 7.5, expected"):
        checked(Many, {"numbers": {**floats["numbers"], "7": 7.5}}, "f")
