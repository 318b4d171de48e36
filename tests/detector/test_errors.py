"""Sentences of errors: whole as a rule, without their middle where a damaged file makes them long."""

from __future__ import annotations

import pytest

from detector.errors import LONGEST_LINE, MissingFileError, UserError, first_line, in_one_line


def test_a_missing_file_is_both_a_users_error_and_a_file_that_is_not_found():
    error = MissingFileError("f.json: there is no such file")
    assert isinstance(error, ValueError) and isinstance(error, FileNotFoundError)
    assert error.errno is None and str(error) == "f.json: there is no such file"


def test_a_long_value_of_a_damaged_file_loses_its_middle():
    for kind in (UserError, MissingFileError):
        sentence = str(kind(f"f.json: the caption is {'x' * 10_000}; correct it"))
        assert sentence.startswith("f.json: the caption is xxx") and sentence.endswith("xxx; correct it")
        assert " ... " in sentence and len(sentence) < LONGEST_LINE + 10


def test_a_list_of_many_problems_stays_whole():
    problems = "\n".join(f"  {number}. f{number}.json: there is no such file" for number in range(500))
    assert str(UserError(problems)) == problems and len(problems) > LONGEST_LINE


def test_signs_that_act_on_a_terminal_are_escapes():
    told = str(UserError("a\0b\x1b[31m\u202ec\ud800.json\u2028: no\tfile\nb"))
    assert told == "a\\x00b\\x1b[31m\\u202ec\\ud800.json\\u2028: no\tfile\nb"
    assert in_one_line("a\nb\r") == "a\\nb\\r" and in_one_line("Größe 中 😀") == "Größe 中 😀"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("no route", "no route"),
        ("\nno route\nTraceback ...", "no route"),
        ("", "ConnectionError"),
        (" \n", "ConnectionError"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(said: str, expected: str):
    assert first_line(ConnectionError(said)) == expected
    assert first_line(ConnectionError()) == "ConnectionError"
