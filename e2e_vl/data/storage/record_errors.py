"""What becomes of an error about one record of a file: readers raise it, a check of the data notes it and reads on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import TracebackType

logger = logging.getLogger(__name__)

# of code that takes a checked record for granted, which only a check must survive
_UNFORESEEN = (TypeError, KeyError, IndexError, AttributeError, OverflowError)


class RecordErrors:
    """Readers do the work on each record within `with errors.about(where)`; here the first error ends the reading.

    Attributes:
        is_check: the data are checked, so that readers do also what takes long.
    """

    is_check = False

    def about(self, where: str) -> RecordErrors:
        """Name the file and the record of the work that comes."""
        return self

    def warn(self, sentence: str) -> None:
        """Say what is left out, although the file can be used without it."""
        logger.warning("%s", sentence)

    def __enter__(self) -> RecordErrors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return False


RAISE = RecordErrors()


class NotedErrors(RecordErrors):
    """Notes every error and leaves out its record.

    Attributes:
        sentences: the errors, each once, in the order in which they were found. (A dict is used as an ordered set.)
    """

    is_check = True

    def __init__(self) -> None:
        self.sentences: dict[str, None] = {}
        self._where = "a record"

    def about(self, where: str) -> NotedErrors:
        self._where = where
        return self

    def note(self, sentence: str) -> None:
        """Note a problem that is no exception."""
        self.sentences.setdefault(sentence)

    def sentence(self, error: BaseException | None) -> str | None:
        """What is noted about an error; None: it is not about a record."""
        if isinstance(error, ValueError | OSError) and not isinstance(error, ChildProcessError):
            return str(error)
        if isinstance(error, _UNFORESEEN):
            return f"{self._where}: a field has another type than expected ({type(error).__name__}: {error})"
        return None

    @contextlib.contextmanager
    def apart(self) -> Iterator[dict[str, None]]:
        """What is noted meanwhile is in the dict that this gives, and nowhere else."""
        kept, self.sentences = self.sentences, {}
        try:
            yield self.sentences
        finally:
            self.sentences = kept

    def warn(self, sentence: str) -> None:
        self.note(sentence)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        sentence = self.sentence(error)
        if sentence is None:
            return False
        self.note(sentence)
        return True
