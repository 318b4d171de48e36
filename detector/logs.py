"""Warnings that are logged once."""

from __future__ import annotations

import logging


class OnceFilter(logging.Filter):
    """Drops log records whose attribute `once` has the value of an earlier record of the same logger.

        logger.addFilter(OnceFilter())
        logger.warning("Image %s is rotated, like others.", name, extra={"once": "rotated"})

    Records without the attribute pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        topic = getattr(record, "once", None)
        if topic is None:
            return True
        is_new = topic not in self._logged
        self._logged.add(topic)
        return is_new
