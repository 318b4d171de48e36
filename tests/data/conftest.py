from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.tiny_refcoco import TinyRefCOCO


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRefCOCO:
    return TinyRefCOCO(tmp_path).write()
