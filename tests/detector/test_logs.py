from __future__ import annotations

import logging

from detector.logs import OnceFilter


def test_a_record_about_one_topic_passes_once(caplog):
    logger = logging.getLogger("test_logs")
    logger.addFilter(OnceFilter())
    for name in ("a", "b"):
        logger.warning("%s is rotated", name, extra={"once": "rotated"})
        logger.warning("%s is small", name)
    assert caplog.messages == ["a is rotated", "a is small", "b is small"]
