"""What the commands in e2e_vl/cli/ and the scripts in tools/ share."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from detector.errors import DiskError, UserError

# what a user can mend, or what the machine has done; the message is a sentence
SENTENCES = (UserError, DiskError, ChildProcessError, ConnectionError, FloatingPointError, MemoryError)


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


def make_parser(doc: str, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of the command, as it is written.

    `prog` is what the usage line calls the command; None = the name of the script.
    """
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shape)


def says_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Errors about settings, files, memory and diverging losses become one sentence on stderr and the exit status 2.

    So do those of the operating system, such as a full disk. Every other error is a fault of the program and keeps its
    traceback. A run that was stopped says so and has the exit status of the signal that stopped it.
    """

    @functools.wraps(main)
    def wrapped(*arguments: Any, **named: Any) -> int:
        try:
            return main(*arguments, **named)
        except StoppedRunError as stopped:
            if str(stopped):
                print(stopped, file=sys.stderr)
            return stopped.status
        except (*SENTENCES, OSError) as error:
            if not isinstance(error, SENTENCES) and error.errno is None:  # a library's
                raise
            # as a user's error it is cut where it is long, such as a file name that is
            print(f"error: {UserError(str(error) or _without_words(error))}", file=sys.stderr)
            return 2

    return wrapped


def _without_words(error: Exception) -> str:
    """A sentence for an error that has none, such as Python's MemoryError."""
    if isinstance(error, MemoryError):
        return "there is not enough memory; use smaller batches, images or files, or fewer workers and processes."
    return f"the system gave up with {type(error).__name__} and no reason; try again, and look at disk and network."
