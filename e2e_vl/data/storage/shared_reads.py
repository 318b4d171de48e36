"""Files that several splits of a run read, each read once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from e2e_vl.data.storage.record_errors import RAISE, RecordErrors

Found = TypeVar("Found")


class SharedReads:
    """Keeps what was read, as long as someone keeps this object; who opens several splits gives the same one to each.

    What is read is shared, so nobody may change it.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def copy(self) -> SharedReads:
        """Another one that has what this one has now; what it reads is freed with it."""
        other = SharedReads()
        other._found = dict(self._found)
        return other

    def read(
        self, reader: Callable[..., Found], *places: Hashable, errors: RecordErrors = RAISE, **options: Hashable
    ) -> Found:
        """What `reader(*places, errors=errors, **options)` returns, called once for the same arguments.

        With errors that are noted, bad records are left out; so what was read then serves only others that note them,
        and only the first one is told.
        """
        key = (reader, places, type(errors), tuple(sorted(options.items())))
        if key not in self._found:
            with collection_paused():
                self._found[key] = reader(*places, errors=errors, **options)
        return self._found[key]


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the search for cyclic garbage while millions of objects are made that stay: it would look at all of them
    again and again, and takes a third of the time of reading a large JSON file."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
