"""What the commands in e2e_vl/cli/ and the scripts in tools/ share."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from detector.errors import DiskError, StoppedRunError, UserError

# what a user can mend, or what the machine has done; the message is a sentence
SENTENCES = (UserError, DiskError, ChildProcessError, ConnectionError, FloatingPointError, MemoryError)


def make_parser(doc: str, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of the command, as it is written.

    `prog` is what the usage line calls the command; None = the name of the script.
    """
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shape)


def says_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Errors about settings, files, memory and diverging losses become one sentence on stderr and the exit status 2.

    So do those of the operating system, such as a full disk. Every other error is a bug and keeps its traceback. A run
    that was stopped says so and has the exit status of the signal that stopped it.
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
            sentence = str(error) or f"{type(error).__name__}: out of memory, or the system gave no reason."
            print(f"error: {sentence}", file=sys.stderr)
            return 2

    return wrapped
