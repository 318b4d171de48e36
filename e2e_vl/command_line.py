"""What the commands in tools/ share."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of the command, as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def says_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Errors about settings, files and diverging losses become one sentence on stderr and the exit status 2."""

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except (ValueError, OSError, FloatingPointError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped
