"""What becomes of an error about one record of a file: readers raise it, a check of the data notes it and reads on."""

from __future__ import annotations

from types import TracebackType

# of code that takes a checked record for granted, which only a check must survive
_UNFORESEEN = (TypeError, KeyError, IndexError, AttributeError, OverflowError)


class RecordErrors:
    """Readers do the work on each record within `with errors.about(where)`; here the first error ends the reading."""

    def about(self, where: str) -> RecordErrors:
        """Name the file and the record of the work that comes."""
        return self

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

    def __init__(self) -> None:
        self.sentences: dict[str, None] = {}
        self._where = "a record"

    def about(self, where: str) -> NotedErrors:
        self._where = where
        return self

    def note(self, sentence: str) -> None:
        """Note a problem that is no exception."""
        self.sentences.setdefault(sentence)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, ValueError | OSError):
            self.note(str(error))
        elif isinstance(error, _UNFORESEEN):
            self.note(f"{self._where}: a field has another type than expected ({kind.__name__}: {error})")
        else:
            return False
        return True
