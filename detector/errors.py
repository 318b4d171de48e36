"""Errors that a user can fix. Their messages name the file or setting and what to do.

The command line prints only the message of these errors. Any other error is a bug and is shown with its traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_URL = re.compile(r"([a-z][a-z0-9+.-]+:)+//", re.IGNORECASE)  # a drive of Windows has one letter


class UserError(ValueError):
    """A file, a record or a setting is invalid."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder does not exist."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


class StoppedRunError(BaseException):
    """A run was stopped by a signal. Like KeyboardInterrupt, it is not a subclass of `Exception`.

    Args:
        message: printed for the user, unless it is empty.
        status: exit status of the process.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of the error's class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def reading(path: str | Path, *damage: type[Exception]) -> Iterator[None]:
    """Convert errors of reading a file to UserErrors with its name, as a context manager.

    Args:
        path: the file, or a record in a file, for the error message.
        damage: exceptions that indicate a damaged file or another format.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise MissingFileError(f"{path}: no such file{where}; check the path.") from error
    except damage as error:
        raise UserError(f"{path}: damaged or in another format ({first_line(error)}); replace the file.") from error


def user_path(written: str | bytes | os.PathLike[Any], what: str = "The path") -> Path:
    """Convert user input to a path and expand `~`. `what` begins error messages.

    Raises:
        UserError: it is a URL, or no path at all, such as None.
    """
    try:
        text = os.fsdecode(written)
    except TypeError as error:
        raise UserError(f"{what} must be a path, not {type(written).__name__}.") from error
    if _URL.match(text):
        raise UserError(f"{what} '{text}' is a URL, not a path; download the file first.")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user, so `~` is the beginning of a name
        return Path(text)
