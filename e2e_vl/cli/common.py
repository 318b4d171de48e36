"""Helpers shared by the commands in e2e_vl/cli/ and the scripts in tools/."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from detector.errors import DiskError, StoppedRunError, UserError

# errors whose message is shown without a traceback
EXPECTED_ERRORS = (UserError, DiskError, ChildProcessError, ConnectionError, FloatingPointError, MemoryError)


def make_parser(doc: str, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help begins with the unformatted docstring of the command.

    Args:
        doc: the docstring.
        prog: name of the command in the usage line; None = the name of the script.
    """
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shape)


def print_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Print errors about settings, files, memory and diverging losses without a traceback, and exit with status 2.

    The same holds for errors of the operating system, such as a full disk. Every other error is a bug and keeps its
    traceback. A run stopped by a signal has the exit status of the signal.
    """

    @functools.wraps(main)
    def wrapped(*arguments: Any, **named: Any) -> int:
        try:
            return main(*arguments, **named)
        except StoppedRunError as stopped:
            if str(stopped):
                print(stopped, file=sys.stderr)
            return stopped.status
        except (*EXPECTED_ERRORS, OSError) as error:
            if not isinstance(error, EXPECTED_ERRORS) and error.errno is None:  # raised by a library
                raise
            message = str(error) or f"{type(error).__name__}: out of memory, or the system gave no reason."
            print(f"error: {message}", file=sys.stderr)
            return 2

    return wrapped
