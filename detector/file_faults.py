"""Reading a file that is there: what the system says against it becomes a sentence that names the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from detector.errors import UserError


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
