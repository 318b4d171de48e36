"""The errors that a user can mend: one sentence which names the file, the record and the remedy.

Only these become one sentence on the command line; every other error is a fault of the program and keeps its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """A file, a record or a setting is wrong; the message is a whole sentence that says what to do."""


class DiskError(OSError):
    """Something cannot be written, as the disk is full or the folder is read-only; the message says what to do."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder does not exist; the message names it and says where it comes from."""


class StoppedRunError(BaseException):
    """A run was asked to stop and did; it is not at fault.

    As a KeyboardInterrupt, it must pass what catches every `Exception`.

    Args:
        sentence: for the user; "" on processes that say nothing.
        status: exit status of the process.
    """

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def first_line(error: BaseException) -> str:
    """The message of another library's error, as a part of a sentence; its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def reading(path: str | Path, *damage: type[Exception]) -> Iterator[None]:
    """A context in which a file is opened and read; errors of the system become a UserError that names the file.

    Args:
        path: the file, or the record of a file that is read.
        damage: what the library in use raises about a file that is damaged or of another format; named as well.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file; check the path.") from error
    except MemoryError as error:
        raise UserError(f"{path}: it does not fit into memory; check that it is the right file.") from error
    except (OSError, *damage) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions and its disk.") from error
        if not isinstance(error, damage):
            raise
        raise UserError(f"{path}: damaged, or of another format ({first_line(error)}); get it again.") from error


def user_path(written: str | Path, what: str = "The path") -> Path:
    """The path that a user wrote, with `~` expanded; the file need not exist.

    Args:
        what: begins the error message.

    Raises:
        UserError: no file can have this name, or it is a web address.
    """
    if str(written).startswith(("http://", "https://", "ftp://", "file://", "s3://")):
        raise UserError(f"{what} '{written}' is an address and not a path; download the file first.")
    try:
        path = Path(written).expanduser()
        path.exists()
        path.resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"{what} {str(written)!r:.100} cannot be used ({first_line(error)}); give another path."
        ) from error
    return path
