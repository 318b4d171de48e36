"""Detectors that are only read, for all tests of this folder."""

from __future__ import annotations

import pytest

from detector.faster_rcnn import FasterRCNN
from tests.detector import published


@pytest.fixture(scope="session")
def original() -> FasterRCNN:
    """With an attribute head."""
    return published.make(published.TREE, 1)


@pytest.fixture(scope="session")
def plain() -> FasterRCNN:
    """Without one."""
    return published.make(published.WITHOUT_ATTRIBUTES, 2)
