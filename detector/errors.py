"""The errors that a user can mend: one sentence which names the file, the record and the remedy.

Only these become one sentence on the command line; every other error is a fault of the program and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 2000  # characters


class UserError(ValueError):
    """A file, a record or a setting is wrong; the message is a whole sentence which says what to do.

    A line of more than `LONGEST_LINE` characters, which a damaged file may put into it, is shown without its middle:
    the file stands at the beginning and the remedy at the end. A list of problems has a line for each. Characters that
    would act on a terminal, or that no file can hold, are shown as escapes.
    """

    def __str__(self) -> str:
        text = str(self.args[0]) if self.args else ""
        return "\n".join(map(_without_middle, printable(text).split("\n")))


class DiskError(OSError):
    """Something cannot be written, as the disk is full or the folder is locked; the message says what to do."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder is not there; the message names it and says where it comes from.

    It is a FileNotFoundError, too, whose `errno` and `filename` stay empty, since the sentence says everything.
    """


def first_line(error: BaseException) -> str:
    """What another library says went wrong, as a part of a sentence; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _without_middle(line: str) -> str:
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def printable(text: str) -> str:
    """A text with escapes for control characters, signs that turn the writing direction, and halves of characters.

    Line feeds stay; `in_one_line` shows these as escapes, too.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def in_one_line(text: str) -> str:
    """A text of a user in a message: its line breaks are shown as escapes."""
    return printable(text).replace("\n", "\\n")


# control characters but for tabs and line feeds, separators of lines, signs of direction, surrogates, no characters
_UNPRINTABLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


# Reading a file that is there: what the system says against it becomes a sentence that names the file.


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Around what opens and reads one file, and writes none.

    Raises:
        UserError: the file may not be read, its disk is at fault, or it does not fit into memory. The system's own
            errors do not always name the file.
    """
    try:
        yield
    except FileNotFoundError:  # has an own sentence everywhere, or is about another file
        raise
    except MemoryError as error:
        raise UserError(
            f"{path}: it does not fit into the memory that is left; check that it is the right file, or use a machine "
            "with more."
        ) from error
    except OSError as error:
        if error.errno is None:  # a library's, about what the file holds
            raise
        raise UserError(
            f"{path}: cannot be read ({error.strerror.lower()}); check its permissions and its disk, or copy it again."
        ) from error


# Paths as users write them, in settings, on the command line and in Python.


_ADDRESSES = ("http://", "https://", "ftp://", "file://", "s3://")
_LONGEST = 100  # characters of a path in a message


def user_path(written: str | Path, what: str = "The path") -> Path:
    """The path that a user wrote, with `~` and `~name` replaced by home folders; nothing need be there.

    Args:
        what: begins the message.

    Raises:
        UserError: no file can have this name, it is an address of the web, its links lead to each other, or it begins
            with an unknown user's home.
    """
    text = str(written)
    if isinstance(written, str) and text.startswith(_ADDRESSES):
        raise UserError(f"{what} {_shown(text)} is an address and not a path; download the file first.")
    try:
        path = Path(written).expanduser()
        path.exists()
        path.resolve()
    except RuntimeError:
        reason = "its links lead to each other, or ~ stands before an unknown name"
    except ValueError:  # a zero byte, half of a character
        reason = "no file can have this name"
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
    else:
        return path
    raise UserError(f"{what} {_shown(text)} cannot be looked for ({reason}); give another path.")


def _shown(text: str) -> str:
    written = repr(text)
    return written if len(written) <= _LONGEST else f"{written[: _LONGEST // 2]}...{written[-_LONGEST // 2 :]}"
