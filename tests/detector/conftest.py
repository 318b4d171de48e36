"""Makes a helper module of this folder, and the detectors in it, available to its tests."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from detector.faster_rcnn import FasterRCNN


@pytest.fixture(scope="session")
def published() -> ModuleType:
    """published.py, which is in no package."""
    spec = spec_from_file_location("published", Path(__file__).with_name("published.py"))
    module = module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def original(published: ModuleType) -> FasterRCNN:
    """With an attribute head."""
    return published.make(published.TREE, 1)


@pytest.fixture(scope="session")
def plain(published: ModuleType) -> FasterRCNN:
    """Without one."""
    return published.make(published.WITHOUT_ATTRIBUTES, 2)
