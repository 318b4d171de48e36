"""What only the Detectron2 backend has; that it equals the built-in one is tested in tests/parity."""

from __future__ import annotations

import sys

import pytest

from detector.checkpoint import get_detector_class
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN


def test_without_detectron2_choosing_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("detectron2.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "detectron2", None)  # makes `import detectron2` fail, installed or not
    monkeypatch.delitem(sys.modules, "detector.detectron2_backend", raising=False)
    with pytest.raises(UserError, match="python -m pip install 'git"):
        get_detector_class("detectron2")
    assert get_detector_class("builtin") is FasterRCNN
