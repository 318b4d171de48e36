from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.data.base import VLDataset
from tests.data.tiny_readers import READERS
from tests.data.tiny_refcoco import TinyRefCOCO


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRefCOCO:
    return TinyRefCOCO(tmp_path).write()


@pytest.fixture(params=READERS)
def dataset(request, tiny) -> VLDataset:
    return READERS[request.param](tiny)
