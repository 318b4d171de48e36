"""Which errors become one sentence on the command line, and which keep their traceback."""

from __future__ import annotations

import errno

import pytest

from detector.errors import UserError
from e2e_vl.cli.main import print_errors


@print_errors
def command(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("f.json: record 3 has no 'id'"), "f.json: record 3 has no 'id'"),
        (FloatingPointError("a loss is NaN"), "a loss is NaN"),
        (OSError(errno.ENOSPC, "No space left", "f.json"), f"[Errno {errno.ENOSPC}] No space left: 'f.json'"),
        (MemoryError(), "MemoryError: out of memory, or the system gave no reason."),
        (ConnectionError(), "ConnectionError: out of memory, or the system gave no reason."),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(error: Exception, words: str, capsys: pytest.CaptureFixture):
    assert command(error) == 2
    assert capsys.readouterr().err == f"error: {words}\n"


@pytest.mark.parametrize("error", [KeyError("id"), TypeError("no number"), OSError("of a library"), AssertionError()])
def test_faults_of_the_program_keep_their_traceback(error: Exception):
    with pytest.raises(type(error)):
        command(error)
