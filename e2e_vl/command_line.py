"""What the commands in e2e_vl/commands/ and the scripts in tools/ share."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any


def make_parser(doc: str, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of the command, as it is written.

    `prog` is what the usage line calls the command; None = the name of the script.
    """
    shape = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shape)


def says_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Errors about settings, files and diverging losses become one sentence on stderr and the exit status 2."""

    @functools.wraps(main)
    def wrapped(*arguments: Any, **named: Any) -> int:
        try:
            return main(*arguments, **named)
        except (ValueError, OSError, FloatingPointError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped
