"""Errors that a user can correct: the message is one sentence that names the file, the record and the remedy.

The command line prints the message of these errors only; every other error is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """A file, a record or a setting is wrong; the message is one sentence with the remedy."""


class DiskError(OSError):
    """A file cannot be written because the disk is full or the folder is read-only."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder does not exist; the message names it."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed; the message gives the command that installs it."""


class StoppedRunError(BaseException):
    """A run stopped because it was asked to. Like KeyboardInterrupt, it is no `Exception`, so nothing catches it.

    `sentence` is for the user ("" prints nothing), `status` the exit status of the process.
    """

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, or the error's class if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def reading(path: str | Path, *damage: type[Exception]) -> Iterator[None]:
    """A context in which a file is opened and read; its errors become a UserError that names the file.

    Args:
        path: the file, or the record of a file that is read.
        damage: what the library in use raises about a file that is damaged or of another format.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file; check the path.") from error
    except damage as error:
        raise UserError(f"{path}: damaged, or of another format ({first_line(error)}); get it again.") from error


def user_path(written: str | Path, what: str = "The path") -> Path:
    """The path that a user wrote, with `~` expanded; the file need not exist. A web address raises UserError.

    Args:
        what: begins the error message.
    """
    if str(written).startswith(("http://", "https://", "ftp://", "file://", "s3://")):
        raise UserError(f"{what} '{written}' is an address and not a path; download the file first.")
    return Path(written).expanduser()
