"""Which errors become one sentence on the command line, and which keep their traceback."""

from __future__ import annotations

import errno

import pytest

from detector.errors import UserError
from e2e_vl.cli.main import print_errors


def raising(error: BaseException):
    @print_errors
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    "error",
    [
        UserError("f.json: record 3 has no 'id'"),
        FloatingPointError("a loss is NaN"),
        OSError(errno.ENOSPC, "No space left on device", "f.json"),
        PermissionError(errno.EACCES, "Permission denied", "f.json"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture):
    assert raising(error)() == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_errors_without_words_get_some(capsys: pytest.CaptureFixture):
    assert raising(MemoryError())() == raising(ConnectionError())() == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "MemoryError: out of memory" in first and "ConnectionError" in second


@pytest.mark.parametrize("error", [KeyError("id"), TypeError("no number"), OSError("of a library"), AssertionError()])
def test_faults_of_the_program_keep_their_traceback(error: Exception):
    with pytest.raises(type(error)):
        raising(error)()
